"""The audit's rules on rows written by hand: overdue and stuck messages, and the owners of their lanes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from delayer.audit import faults, rules
from delayer.audit.extract import LaneState
from delayer.audit.findings import HELD, PACKED, WAITING, LaneFigures
from delayer.audit.rules import GRACE_MS, STUCK_MS, TAKEN_MS
from delayer.core.units import DAY_MS
from tests.audit.rows import NOW, Row, held, judged, message, packed, said, store

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import SparkSession

ALIVE = {1: True, 2: None, 3: False}
KINDS = (WAITING, HELD, PACKED, faults.PACED)
LANES = tuple(LaneState(number, "somebody", alive) for number, alive in ALIVE.items())


def figures(lanes: Iterable[LaneState]) -> list[LaneFigures]:
    return [LaneFigures(lane.number, lane.owner, lane.alive, {}, 1, 0) for lane in lanes]


def overdue(
    spark: SparkSession, messages: list[Row], lanes: Iterable[LaneState] = LANES, paced: Any = None
) -> dict[str, tuple[str, int, Any]]:
    """Severity, count and details by subject."""
    found = rules.overdue(store(spark, messages, lanes=lanes), figures(lanes), paced or {})
    return {one.subject: (one.severity, one.count, one.details) for one in found}


def test_overdue_by_age_and_owner(spark: SparkSession) -> None:
    def severities(late_ms: int) -> list[str | None]:
        found = overdue(spark, [message(number, lane=number, due_ms=NOW - late_ms) for number in ALIVE])
        return [found.get(f"lane {number}", (None,))[0] for number in ALIVE]

    assert severities(GRACE_MS - 1) == [None, None, None]
    assert severities(GRACE_MS) == ["warning", "warning", "violation"]
    assert severities(STUCK_MS - 1) == ["warning", "warning", "violation"]
    assert severities(STUCK_MS) == ["violation", "violation", "violation"]


def test_overdue_says_how_late_and_of_which_routes(spark: SparkSession) -> None:
    messages = [
        message(1, due_ms=NOW - GRACE_MS),
        message(2, due_ms=NOW - 8 * DAY_MS, route=b"\xff"),
        message(3, due_ms=NOW - 2 * DAY_MS, route=b"\xff"),
        message(4, due_ms=NOW + 1),
    ]
    (found,) = judged(spark, messages).findings
    assert (found.count, found.first_due_ms) == (3, NOW - 8 * DAY_MS)
    assert found.details == {"longest_seconds": 8 * 86_400, "owned": True, "routes": {"\\xff": 2, "delayer.in": 1}}


def test_overdue_rows_of_a_limited_route_are_a_warning(spark: SparkSession) -> None:
    """But in a lane without an owner they are a violation: there they do not wait for the limit."""
    messages = [message(n, lane=n, due_ms=NOW - 8 * DAY_MS, route=b"slow") for n in ALIVE]
    others = [message(13, due_ms=NOW - GRACE_MS), packed(14, due_ms=NOW - GRACE_MS, route=b"slow")]
    found = overdue(spark, [*messages, *others], paced={b"slow": 50, b"other": 7})
    limited = [found[f"lane {number}: of routes with max_rate"] for number in ALIVE]
    assert [severity for severity, *_ in limited] == ["warning", "warning", "violation"]
    assert limited[0][2]["routes"] == {"slow": 1}
    assert limited[0][2]["max_rate"] == {"slow": 50}
    assert found["lane 1"][2]["routes"] == {"delayer.in": 1}
    assert found["segments of lane 1"][1] == 1


def test_segments_that_are_late_need_an_owner_of_any_lane(spark: SparkSession) -> None:
    late = [packed(1, lane=3, due_ms=NOW - GRACE_MS)]
    assert overdue(spark, late)["segments of lane 3"][0] == "warning"
    assert overdue(spark, late, LANES[2:])["segments of lane 3"][0] == "violation"


def test_held_messages_without_a_retry_are_found(spark: SparkSession) -> None:
    messages = [
        held(1, lane=1, due_ms=NOW - 9 * DAY_MS, retry_ms=NOW - GRACE_MS),
        held(2, lane=3, due_ms=NOW - 9 * DAY_MS, retry_ms=NOW - GRACE_MS),
        held(3, lane=2, due_ms=NOW - 9 * DAY_MS, retry_ms=NOW - GRACE_MS + 1),
        held(4, lane=2, due_ms=NOW - 9 * DAY_MS),
    ]
    subject = "lane {}: held, and not retried in time"
    found = overdue(spark, messages)
    assert {name: severity for name, (severity, *_) in found.items()} == {
        subject.format(1): "warning",
        subject.format(3): "violation",
    }


def test_a_daemon_is_the_next_step_for_overdue_messages_of_lanes_without_an_owner() -> None:
    rows = [SimpleNamespace(lane=3, kind=kind, messages=1, first_due_ms=0, late_ms=GRACE_MS) for kind in KINDS]
    found = rules.late_ones(rows, [], figures(LANES[2:]), {})
    assert [one.next for one in found] == [faults.NEXT[faults.UNOWNED]] * len(KINDS)


def test_lanes(spark: SparkSession) -> None:
    messages = [message(1, lane=2), message(2, lane=3), held(3, lane=3), message(4, lane=4, due_ms=NOW)]
    lanes = [
        LaneState(1, "", False),
        LaneState(2, "given back", False),
        LaneState(4, "gone", False),
        LaneState(5, "", True),
    ]
    report = judged(spark, [*messages, message(5, lane=5, due_ms=NOW)], lanes=lanes)
    assert said(report) == [
        ("lanes", "violation", "lane 3: not in the table of lanes", 2),
        ("lanes", "warning", "lane 4: no owner, and messages are due", 1),
    ]
    assert report.findings[1].details == {"last_owner": "gone"}


def test_a_lane_needs_an_owner_only_for_messages_due_soon(spark: SparkSession) -> None:
    extract = store(spark, lanes=LANES)

    def told(first_due_ms: int) -> list[str]:
        found = rules.lanes(extract, figures(LANES), dict.fromkeys(ALIVE, first_due_ms))
        return [one.subject for one in found]

    assert told(NOW + TAKEN_MS + 1) == []
    assert told(NOW + TAKEN_MS) == ["lane 3: no owner, and messages are due"]
