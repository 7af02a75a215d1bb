"""The audit's rules on rows written by hand: what is overdue or stuck, and whose lanes those are."""

from __future__ import annotations

import pytest

from delayer.audit.rules import checks
from delayer.audit.rules.model import DAY_MS, GRACE_MS, HELD, PACKED, STUCK_MS, Context, Lane
from tests.audit.rows import NOW, judged, message, said, segment


@pytest.mark.parametrize(
    ("late_ms", "alive", "expected"),
    [
        (GRACE_MS - 1, True, []),
        (GRACE_MS, True, [("overdue", "warning")]),
        (STUCK_MS - 1, True, [("overdue", "warning")]),
        (STUCK_MS, True, [("overdue", "violation")]),
        (-checks.ADOPTED_MS - 1, False, []),
        (-checks.ADOPTED_MS, False, [("lanes", "warning")]),
        (-checks.ADOPTED_MS, None, []),
        (GRACE_MS - 1, False, [("lanes", "warning")]),
        (GRACE_MS, False, [("overdue", "violation"), ("lanes", "warning")]),
        (GRACE_MS, None, [("overdue", "warning")]),
        (STUCK_MS, None, [("overdue", "violation")]),
    ],
)
def test_overdue(late_ms: int, alive: bool | None, expected: list[tuple[str, str]]) -> None:
    late = message(5, due_ms=NOW - late_ms)
    report = judged([late], lanes=[Lane(1, "gone", alive), Lane(2, "other", True)])
    assert [(found.rule, found.severity) for found in report.findings] == expected
    assert all(found.count == 1 and found.first_due_ms == late.due_ms for found in report.findings)


def test_overdue_says_how_late_and_of_which_routes() -> None:
    messages = [
        message(1, due_ms=NOW - GRACE_MS),
        message(2, due_ms=NOW - 8 * DAY_MS, route=b"\xff"),
        message(3, due_ms=NOW - 2 * DAY_MS, route=b"\xff"),
        message(4, due_ms=NOW + 1),
    ]
    (found,) = judged(messages).findings
    assert found.details == {
        "ages": {"7 d": 1, "1 d": 1, "1 min": 1},
        "owned": True,
        "routes": {"\\xff": 2, "delayer.in": 1},
    }


@pytest.mark.parametrize(("alive", "severity"), [(True, "warning"), (None, "warning"), (False, "violation")])
def test_what_somebody_limited_is_no_violation_however_late(alive: bool | None, severity: str) -> None:
    """Only where nobody owns the lane it waits for something else."""
    messages = [message(n, due_ms=NOW - 8 * DAY_MS, route=b"slow") for n in (1, 2)]
    others = [message(3, due_ms=NOW - GRACE_MS), message(4, where=PACKED, due_ms=NOW - GRACE_MS, route=b"slow")]
    lanes = [Lane(1, "", alive), Lane(2, "", True)]
    paced = Context(NOW, paced={b"slow": 50, b"other": 7})
    report = judged([*messages, *others], lanes=lanes, context=paced)
    found = {one.subject: one for one in report.findings if one.rule == "overdue"}
    limited = found["lane 1: of routes with max_rate"]
    assert (limited.severity, limited.count) == (severity, 2)
    assert limited.details["routes"] == {"slow": 2}
    assert limited.details["max_rate"] == {"slow": 50}
    assert found["lane 1"].details["routes"] == {"delayer.in": 1}
    assert found["segments of lane 1"].count == 1


def test_of_a_sample_the_messages_in_segments_are_those_that_were_unpacked() -> None:
    messages = [message(1), message(2, where=PACKED), message(3, where=PACKED)]
    counters = {(1, "parked"): 11, (1, "compacted"): 10}
    found = [segment(1, messages=10), segment(2, messages=20)]
    whole = judged(messages, found, counters=counters)
    some = judged(messages, found, counters=counters, context=Context(NOW, whole=False))
    assert (whole.totals.waiting, whole.totals.packed, whole.totals.segments) == (1, 30, 2)
    assert (some.totals.waiting, some.totals.packed, some.totals.segments) == (1, 2, 2)


def test_segments_that_are_late_need_an_owner_of_any_lane() -> None:
    late = message(
        1,
        where=PACKED,
        due_ms=NOW - GRACE_MS,
    )
    counters = {(1, "parked"): 1, (1, "compacted"): 1}
    packed = [segment(1, messages=1, first_due_ms=NOW + DAY_MS)]
    for lanes, severity in (([Lane(1, "", False), Lane(2, "", True)], "warning"), ([Lane(1, "", False)], "violation")):
        report = judged([late], packed, lanes=lanes, counters=counters)
        assert said(report) == [("overdue", severity, "segments of lane 1", 1)]


def test_lanes() -> None:
    messages = [message(1, lane=2), message(2, lane=3), message(3, lane=3, where=HELD), message(4, lane=4, due_ms=NOW)]
    lanes = [Lane(1, "", False), Lane(2, "given back", False), Lane(4, "gone", False), Lane(5, "", True)]
    report = judged([*messages, message(5, lane=5, due_ms=NOW)], lanes=lanes)
    assert said(report) == [
        ("lanes", "violation", "lane 3: not in the table of lanes", 2),
        ("lanes", "warning", "lane 4: no owner, and messages are due", 1),
    ]
    assert report.findings[1].details == {"last_owner": "gone"}


@pytest.mark.parametrize(
    ("retry_ms", "alive", "severity"),
    [(NOW - GRACE_MS + 1, False, None), (NOW - GRACE_MS, False, "violation"), (NOW - GRACE_MS, True, "warning")],
)
def test_held_messages_that_nobody_tries_again(retry_ms: int, alive: bool, severity: str | None) -> None:
    held = message(1, where=HELD, due_ms=NOW - 9 * DAY_MS, retry_ms=retry_ms)
    found = said(judged([held], lanes=[Lane(1, "", alive)]))
    assert found == ([("overdue", severity, "lane 1: held, and not tried again in time", 1)] if severity else [])
