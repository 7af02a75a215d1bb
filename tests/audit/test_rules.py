"""The audit's rules on rows written by hand: what each finds, and that sound rows give no finding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from delayer.audit.findings import Report
from delayer.audit.rules import calendar, integrity, overdue, segments
from delayer.audit.rules.damage import TOMBSTONES_LOST, Damage
from delayer.audit.rules.growth import growth
from delayer.audit.rules.keys import HELD as CLAIM_HELD
from delayer.audit.rules.message import DAY_MS, GRACE_MS, HELD, PACKED, STUCK_MS, Context, Lane, Segment
from delayer.store.envelope import FORMAT
from delayer.store.status import RESTORED_MS
from tests.audit.rows import (
    DAY,
    FOUND,
    NOTHING_FOUND,
    NOW,
    brief,
    fitting,
    judged,
    message,
    pointer,
    properties,
    said,
    segment,
    waiting,
)

SOUND = [
    message(1),
    message(2, properties=properties(b"same"), body_digest=b"x" * 16),
    message(3, properties=properties(b"same"), body_digest=b"y" * 16),  # another body: not the same message
    message(4, properties=properties(b""), body_digest=b"x" * 16),
    message(5, properties=properties(b""), body_digest=b"x" * 16),  # no id: nothing can be said
    message(6, where=HELD, due_ms=NOW - 10 * DAY_MS),
    message(7, key=b"k"),
    message(8, where=PACKED),
    message(9, due_ms=NOW - GRACE_MS + 1),
    message(10, home=f"message_{DAY}", due_ms=DAY * DAY_MS + DAY_MS - 1),
    message(11, home="message_default", due_ms=(DAY + 500) * DAY_MS),
]
SEGMENTS = [segment(1), segment(2, cancelled=3, tombstones=3), segment(3, **NOTHING_FOUND)]
CLAIMS = [pointer(b"k", 7), waiting(b"k", 7), pointer(b"h", 6), waiting(b"h", 6, source=CLAIM_HELD, lane=5)]
CONTEXT = Context(NOW, {f"message_{DAY}": (DAY * DAY_MS, (DAY + 1) * DAY_MS)})


def test_nothing_is_found_in_a_sound_store() -> None:
    report = judged(SOUND, SEGMENTS, CLAIMS, context=CONTEXT)
    assert report.findings == ()
    assert not any(run.violations or run.warnings or run.skipped or run.unlisted for run in report.rules)
    assert (report.totals.waiting, report.totals.held, report.totals.packed) == (9, 1, 27)
    assert report.totals.waiting == report.totals.expected
    assert report.totals.keyed == 1


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"crc": 18}, integrity.CHECKSUM),
        ({"format": FORMAT + 1}, integrity.UNKNOWN_FORMAT),
        ({"format": 0}, integrity.UNKNOWN_FORMAT),
        ({"format": FORMAT + 1, "crc": 18, "properties": b""}, integrity.UNKNOWN_FORMAT),
        ({"properties": b"\x00\x80\x09id"}, integrity.PROPERTIES),
        ({"properties": b"\x20\x00\x00\x00\x00\x02\x07x"}, integrity.PROPERTIES),
        ({"home": f"message_{DAY}", "due_ms": (DAY + 1) * DAY_MS}, integrity.PARTITION),
        ({"home": f"message_{DAY}", "due_ms": DAY * DAY_MS - 1}, integrity.PARTITION),
        ({"home": "message_default", "due_ms": DAY * DAY_MS + 5, "lane": 2}, integrity.PARTITION),
    ],
)
def test_what_is_wrong_with_one_message(changed: dict[str, Any], fault: str) -> None:
    wrong = message(77, **changed)
    messages = [*SOUND, wrong]
    # Later than the partition's day nothing is overdue: the context's now lies before all of it.
    context = replace(CONTEXT, now_ms=min(NOW, wrong.due_ms))
    lanes = (Lane(1, "one", True), Lane(2, "two", True))
    report = judged(messages, SEGMENTS, CLAIMS, lanes=lanes, context=context)
    assert said(report) == [("integrity", "violation", f"lane {wrong.lane}, {wrong.where}: {fault}", 1)]
    assert report.findings[0].details == {"examples": [77]}
    assert report.findings[0].first_due_ms == wrong.due_ms


@pytest.mark.parametrize(
    ("kind", "by", "expected"),
    [
        ("parked", 1, ("lane 1: waiting", 1)),
        ("parked", -1, ("lane 1: waiting", 1)),
        ("released", 2, ("lane 1: waiting", 2)),
        ("cancelled", 1, ("lane 1: waiting", 1)),
    ],
)
def test_conservation(kind: str, by: int, expected: tuple[str, int]) -> None:
    counters = fitting(SOUND, SEGMENTS)
    counters[1, kind] = counters.get((1, kind), 0) + by
    report = judged(SOUND, SEGMENTS, CLAIMS, context=CONTEXT, counters=counters)
    assert said(report) == [("conservation", "violation", *expected)]
    details = report.findings[0].details
    assert abs(details["expected"] - details["found"]) == abs(by)


def test_conservation_of_held_messages() -> None:
    counters = fitting(SOUND, SEGMENTS)
    counters[1, "held"] += 1
    counters[1, "parked"] += 1
    report = judged(SOUND, SEGMENTS, CLAIMS, context=CONTEXT, counters=counters)
    assert said(report) == [("conservation", "violation", "lane 1: held", 1)]


def test_two_lanes_that_are_off_by_one_in_opposite_ways_are_both_found() -> None:
    messages = [message(1, lane=1), message(2, lane=2)]
    counters = {(1, "parked"): 2}
    report = judged(messages, lanes=[Lane(1, "", True), Lane(2, "", True)], counters=counters)
    assert [found.subject for found in report.findings] == ["lane 1: waiting", "lane 2: waiting"]
    assert report.totals.expected == report.totals.waiting == 2


def test_of_several_lanes_all_together_tell_what_is_missing() -> None:
    messages = [message(1, lane=1), message(2, lane=2), message(3, lane=2, where=HELD)]
    counters = {(1, "parked"): 3, (2, "parked"): 2, (2, "held"): 2}
    report = judged(messages, lanes=[Lane(1, "", True), Lane(2, "", True)], counters=counters)
    assert sorted(said(report)) == [
        ("conservation", "violation", "all lanes: held", 1),
        ("conservation", "violation", "all lanes: waiting", 1),
        ("conservation", "violation", "lane 1: waiting", 2),
        ("conservation", "violation", "lane 2: held", 1),
        ("conservation", "violation", "lane 2: waiting", 1),
    ]


@pytest.mark.parametrize(
    ("wrong", "severity", "subject", "count"),
    [
        (segment(9, **NOTHING_FOUND, fault="the bytes changed"), "violation", segments.UNREADABLE, 10),
        (segment(9, **{**NOTHING_FOUND, "unpacked": 10}, fault="another digest"), "violation", segments.UNREADABLE, 10),
        (segment(9, **{**NOTHING_FOUND, "unpacked": 9}, fault="expected 10"), "violation", segments.COUNT, 10),
        (
            segment(9, **{**NOTHING_FOUND, "unpacked": 10}, cancelled=4, fault=f"{TOMBSTONES_LOST}: invalid"),
            "violation",
            segments.UNREADABLE,
            6,
        ),
        (segment(9, found_first_due_ms=NOW + 8 * DAY_MS - 1), "violation", segments.DUE, 10),
        (segment(9, found_last_due_ms=NOW + 9 * DAY_MS + 1), "violation", segments.DUE, 10),
        (segment(9, found_first_id=99), "violation", segments.IDS, 10),
        (segment(9, found_last_id=998), "violation", segments.IDS, 10),
        (segment(9, found_raw_bytes=4999), "violation", segments.SIZE, 10),
        (segment(9, cancelled=2, tombstones=2, live=9), "violation", segments.FOREIGN, 8),
        (segment(9, first_due_ms=NOW + RESTORED_MS - 1), "violation", segments.LATE, 10),
        (segment(9, broken_ms=NOW), "violation", "a daemon could not restore it", 10),
        (segment(9, broken_ms=NOW, fault="x"), "violation", "does not read back", 10),
        (segment(9, broken_ms=NOW, first_due_ms=NOW), "violation", segments.MARKED, 10),
        (
            segment(9, cancelled=1),
            "violation",
            "its count of cancelled messages is not that of its tombstones",
            9,
        ),
        (
            segment(9, cancelled=10, tombstones=10),
            "warning",
            "all of its messages are cancelled, and it is still there",
            0,
        ),
    ],
)
def test_segments(wrong: Segment, severity: str, subject: str, count: int) -> None:
    report = judged(SOUND, [*SEGMENTS, wrong], CLAIMS, context=CONTEXT)
    assert said(report) == [("segments", severity, f"lane 1: {subject}", count)]
    assert report.findings[0].details == {"segments": [9]}


def test_tombstones_without_a_segment() -> None:
    said_nothing = dict.fromkeys((*FOUND, "messages", "cancelled", "packed_bytes"), 0)
    lost = segment(9, **said_nothing, **NOTHING_FOUND, lane=None, tombstones=4)
    report = judged(SOUND, [lost], CLAIMS, context=CONTEXT)
    assert said(report) == [("segments", "warning", "tombstones of a segment that is not there", 4)]
    assert report.findings[0].first_due_ms is None
    unread = judged(SOUND, [lost], CLAIMS, context=CONTEXT, damage=[Damage("segment", "page 3", "invalid page")])
    assert said(unread) == [("integrity", "violation", "table segment: the database cannot read it", 1)]


def test_a_segment_is_late_only_from_when_it_should_have_been_restored() -> None:
    assert judged(segments=[segment(1, first_due_ms=NOW + RESTORED_MS)]).findings == ()
    sooner = Context(NOW, restored_ms=1000)
    assert judged(segments=[segment(1, first_due_ms=NOW + 1000)], context=sooner).findings == ()
    assert said(judged(segments=[segment(1, first_due_ms=NOW + 999)], context=sooner)) == [
        ("segments", "violation", f"lane 1: {segments.LATE}", 10)
    ]
    nothing_left = segment(1, first_due_ms=NOW, cancelled=10, tombstones=10)
    assert said(judged(segments=[nothing_left])) == [("segments", "warning", f"lane 1: {segments.EMPTY}", 0)]


def test_the_law_of_segments() -> None:
    counters = {(1, "compacted"): 12, (2, "restored"): 3, (1, "parked"): 12}
    report = judged(segments=[segment(1)], counters=counters)
    law = [found for found in report.findings if found.rule == "segments"]
    assert [(found.subject, found.count) for found in law] == [("all segments: compacted - restored", 1)]
    assert law[0].details == {"expected": 9, "found": 10, "compacted": 12, "restored": 3}


@pytest.mark.parametrize(
    ("late_ms", "alive", "expected"),
    [
        (GRACE_MS - 1, True, []),
        (GRACE_MS, True, [("overdue", "warning")]),
        (STUCK_MS - 1, True, [("overdue", "warning")]),
        (STUCK_MS, True, [("overdue", "violation")]),
        (-overdue.ADOPTED_MS - 1, False, []),
        (-overdue.ADOPTED_MS, False, [("lanes", "warning")]),
        (-overdue.ADOPTED_MS, None, []),
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


def test_the_same_message_parked_twice() -> None:
    twin = properties(b"order-1")
    messages = [message(number, properties=twin, body_digest=b"b" * 16) for number in (5, 3, 9)]
    report = judged(messages)
    assert said(report) == [("repeats", "warning", "the same message more than once", 3)]
    assert report.findings[0].details == {"groups": 1, "surplus": 2, "examples": [[3, 5, 9]]}


@pytest.mark.parametrize(
    "other",
    [
        {"due_ms": NOW + 3_600_001},
        {"to_key": b"other"},
        {"to_exchange": b"other"},
        {"to_exchange": b"delayer.outo", "to_key": b"rders"},
        {"body_digest": b"c" * 16},
        {"properties": properties(b"order-2")},
        {"key": b"k"},
    ],
)
def test_other_messages_are_no_repeats(other: dict[str, Any]) -> None:
    first = message(1, properties=properties(b"order-1"), body_digest=b"b" * 16)
    claims = [pointer(b"k", 2), waiting(b"k", 2)] if "key" in other else []
    assert judged([first, first._replace(id=2, **other)], claims=claims).findings == ()


def test_one_id_in_two_places_is_a_violation_and_not_a_repeat_too() -> None:
    first = message(1, properties=properties(b"order-1"))
    copies = [first, first._replace(where=PACKED)]
    report = judged(copies, [segment(1, messages=1)])
    assert said(report) == [("repeats", "violation", "one id, more than one message", 2)]
    assert report.findings[0].details == {"groups": 1, "surplus": 1, "examples": [1]}


@pytest.mark.parametrize(
    ("claims", "subject", "count"),
    [
        ([pointer(b"k", 1), waiting(b"k", 1), waiting(b"k", 2)], "several waiting messages have one key", 2),
        ([waiting(b"k", 1), waiting(b"k", 2)], "several waiting messages have one key", 2),
        ([waiting(b"k", 1)], "a waiting message that its key does not stand for", 1),
        ([pointer(b"k", 2), waiting(b"k", 1)], "a waiting message that its key does not stand for", 1),
        ([pointer(b"k", 1, lane=2), waiting(b"k", 1)], "a waiting message that its key does not stand for", 1),
        ([pointer(b"k", 1, due_ms=0), waiting(b"k", 1)], "a waiting message that its key does not stand for", 1),
        ([pointer(b"k", 1), waiting(b"K", 1), pointer(b"K", 1)], "a key that stands for no message", 1),
        ([pointer(b"k", 1)], "a key that stands for no message", 1),
    ],
)
def test_keys(claims: list[Any], subject: str, count: int) -> None:
    report = judged(claims=claims)
    assert said(report) == [("keys", "violation", subject, count)]


def test_a_held_message_need_not_be_behind_its_key() -> None:
    assert judged(claims=[waiting(b"k", 1, source=CLAIM_HELD)]).findings == ()


def test_a_sample_says_nothing_about_the_whole() -> None:
    twin = properties(b"order-1")
    messages = [message(number, properties=twin, body_digest=b"b" * 16) for number in (1, 2)]
    context = Context(NOW, whole=False)
    report = judged([*messages, message(3, crc=1)], context=context, counters={(1, "parked"): 100}, sample=0.01)
    assert [found.rule for found in report.findings] == ["integrity"]
    assert {run.rule for run in report.rules if run.skipped} == {"conservation", "repeats", "keys"}
    assert report.sample == 0.01


def test_the_calendar() -> None:
    second = (NOW // DAY_MS + 2) * DAY_MS + 5000
    messages = [message(number, due_ms=second + number % 1000, body_bytes=number) for number in range(3000)]
    messages += [message(9000, due_ms=NOW + 60_000, parked_ms=5), message(9001, due_ms=NOW + 9 * 365 * DAY_MS)]
    coming = judged(messages, release_rate=100.0).calendar
    assert coming.peaks[0].start_ms == second
    assert coming.peaks[0].messages == 3000
    assert coming.peaks[0].drain_seconds == 30.0
    assert [(bar.start_ms, bar.messages) for bar in coming.minutes] == [((NOW + 60_000) // 60_000 * 60_000, 1)]
    assert [bar.messages for bar in coming.hours] == [1, 3000]
    assert [bar.messages for bar in coming.days] == [1, 3000, 1]
    assert coming.oldest[0].id == 9000
    assert coming.farthest[0].id == 9001
    assert [each.id for each in coming.largest[:2]] == [2999, 2998]
    assert len(coming.largest) == 10


def test_what_lies_beyond_the_days_shown_is_in_the_bars_at_the_edges() -> None:
    messages = [message(1, due_ms=NOW + 9_000 * DAY_MS), message(2, due_ms=NOW - 9_000 * DAY_MS)]
    days = judged(messages).calendar.days
    assert [round((bar.start_ms - NOW) / DAY_MS) for bar in days] == [-400, 4000]


def test_peaks_that_take_long_are_worth_a_warning() -> None:
    messages = [message(number, due_ms=NOW + 7_000_000) for number in range(1000)]
    assert judged(messages, release_rate=20.0).findings == ()
    (found,) = judged(messages, release_rate=10.0).findings
    assert (found.rule, found.severity, found.count) == ("peaks", "warning", 1000)
    assert found.details == {"drain_seconds": 100.0, "release_rate": 10.0}


def test_a_minute_is_a_peak_of_its_own_if_no_second_of_it_is() -> None:
    start = NOW // 60_000 * 60_000 + 600_000
    messages = [message(number, due_ms=start + 1000 * (number % 60)) for number in range(600)]
    first = judged(messages).calendar.peaks
    assert (first[0].width_ms, first[0].messages) == (1000, 10)
    assert (60_000, 600) in [(peak.width_ms, peak.messages) for peak in first]


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_release_rate_that_is_none(rate: float) -> None:
    with pytest.raises(ValueError, match="release rate: expected"):
        judged([message(1)], release_rate=rate)


def test_routes_and_destinations_are_the_largest_and_the_number_of_the_others() -> None:
    messages = [message(number, to_key=b"%d" % (number % 1000), route=b"%d" % (number % 2)) for number in range(2001)]
    coming = judged(messages).calendar
    assert coming.destinations[0].messages == 3
    assert coming.destinations[0].routing_key == b"0"
    assert (len(coming.destinations), coming.destinations_more) == (200, 800)
    assert [(share.route, share.messages) for share in coming.routes] == [(b"0", 1001), (b"1", 1000)]
    assert coming.routes_more == 0


def test_findings_of_one_rule_are_bounded_violations_first() -> None:
    messages = [message(lane, lane=lane, due_ms=NOW - GRACE_MS) for lane in range(1, 151)]
    lanes = [Lane(lane, "", lane > 120) for lane in range(1, 151)]
    report = judged(messages, lanes=lanes)
    run = next(run for run in report.rules if run.rule == overdue.RULE)
    assert (run.violations, run.warnings, run.unlisted) == (120, 30, 50)
    assert len([found for found in report.findings if found.rule == overdue.RULE]) == 100
    assert all(found.severity == "violation" for found in report.findings if found.rule == overdue.RULE)


PAGE = Damage(f"message_{DAY}", "page 7", "invalid page in block 7")
TOAST = Damage(f"message_{DAY}", "(9,3)", "missing chunk number 0", lane=1, id=77, due_ms=NOW + DAY_MS)


def test_what_the_database_cannot_read_is_found_by_table_and_place() -> None:
    report = judged(SOUND, SEGMENTS, CLAIMS, context=CONTEXT, damage=[TOAST, PAGE])
    damage, conservation = sorted(report.findings, key=lambda found: found.rule, reverse=True)
    assert brief(damage) == ("integrity", "violation", f"table message_{DAY}: the database cannot read it", 2)
    assert damage.first_due_ms == TOAST.due_ms
    assert damage.details == {
        "places": ["(9,3)", "page 7"],
        "reasons": ["missing chunk number 0", "invalid page in block 7"],
        "due_from_ms": DAY * DAY_MS,
        "due_before_ms": (DAY + 1) * DAY_MS,
        "examples": [77],
    }
    # The counters fit the rows without it.
    assert brief(conservation) == ("conservation", "violation", "lane 1: waiting", 1)


def test_a_message_of_which_the_place_is_readable_is_one_of_its_lane() -> None:
    held = Damage("held", "(1,1)", "missing chunk number 0", lane=1, id=78, due_ms=NOW)
    counters = fitting(SOUND, SEGMENTS)
    counters[1, "parked"] += 2
    counters[1, "held"] += 1
    report = judged(SOUND, SEGMENTS, CLAIMS, context=CONTEXT, counters=counters, damage=[TOAST, held])
    assert [found.subject for found in report.findings] == [
        "table held: the database cannot read it",
        f"table message_{DAY}: the database cannot read it",
    ]


@pytest.mark.parametrize(
    ("table", "skipped"),
    [
        (f"message_{DAY}", {"conservation", "repeats", "keys"}),
        ("message_default", {"conservation", "repeats", "keys"}),
        ("held", {"conservation", "repeats", "keys"}),
        ("message_key", {"keys"}),
        ("segment_cancelled", set()),
        ("segment", set()),
    ],
)
def test_what_a_damaged_index_hides_is_not_called_missing(table: str, skipped: set[str]) -> None:
    """All of its table is there, and nobody could read it."""
    index = Damage(table, f"index {table}_pkey", "invalid page in block 0")
    hidden = [] if table in ("message_key", "segment", "segment_cancelled") else [message(77)]
    report = judged(
        SOUND, [] if table == "segment" else SEGMENTS, CLAIMS, context=CONTEXT, damage=[index],
        counters=fitting([*SOUND, *hidden], SEGMENTS),
    )  # fmt: skip
    assert said(report) == [("integrity", "violation", f"table {table}: the database cannot read it", 1)]
    assert {run.rule for run in report.rules if run.skipped} == skipped


def test_damage_is_listed_up_to_a_bound_and_counted_beyond() -> None:
    places = [Damage("segment", f"page {n}", "invalid page") for n in range(3000)]
    (found,) = judged(damage=places, context=Context(NOW, whole=False)).findings
    assert found.count == 3000
    assert len(found.details["places"]) == 20
    assert found.details["reasons"] == ["invalid page"]


def test_growth() -> None:
    before = judged(SOUND, SEGMENTS, CLAIMS, context=CONTEXT)
    grown = [*SOUND, message(99, body_bytes=1000)]
    counters = fitting(SOUND, SEGMENTS)
    counters[1, "parked"] += 21
    counters[1, "released"] = 20
    later = judged(grown, SEGMENTS, CLAIMS, context=replace(CONTEXT, now_ms=NOW + 10_000), counters=counters)
    change = growth(later, before)
    assert change is not None
    assert (change.since_ms, change.seconds, change.waiting, change.held) == (NOW, 10.0, 1, 0)
    assert (change.parked, change.released, change.released_rate) == (21, 20, 2.0)
    assert change.size == 1000 + len(message().properties)
    assert growth(before, later) is None
    assert growth(replace(later, sample=0.5), before) is None


def test_a_report_comes_back_from_json() -> None:
    messages = [*SOUND, message(77, crc=1), message(78, route=b"\xff\xc3\xa4", to_key=b"\xfe\x00")]
    before = judged(SOUND)
    report = judged(messages, SEGMENTS, CLAIMS, lanes=[Lane(1, "one", None)], context=CONTEXT)
    report = replace(report, growth=growth(replace(report, store_now_ms=NOW + 1), before))
    assert Report.from_json(report.to_json()) == report
    report.to_json().encode("ascii")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 0}', '{"version": 1}', '{"version": 1, "totals": 3}'])
def test_what_is_no_report(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|Expecting"):
        Report.from_json(text)


def test_instants() -> None:
    assert calendar.instant(0) == "1970-01-01T00:00:00Z"
    assert calendar.instant(253_402_300_799_999) == "253402300799999 ms"
