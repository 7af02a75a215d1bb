"""The deep audit's report on the history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from delayer.audit import past
from delayer.audit.findings import Calendar, Past
from delayer.core.units import DAY_MS, HOUR_MS
from tests.audit.rows import NOW, Row, message, store
from tests.audit.test_job import audit
from tests.support.rows import put, row
from tests.support.store import claim_when_due, opened, owned, parcel, sql
from tests.unit.audit import audit_reports

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOUR = NOW // HOUR_MS * HOUR_MS


def change(at_ms: int, what: str = "released", **other: Any) -> Row:
    """A row of the history."""
    sound = {
        "at_ms": at_ms, "what": what, "route": b"delayer.in", "to_exchange": b"delayer.out", "to_key": b"orders",
        "late_ms": 5, "delay_ms": 3_600_000, "size": 100, "kind": None,
    }  # fmt: skip
    return sound | other


def told(spark: SparkSession, rows: list[Row]) -> Past:
    found = past.build_history_report(store(spark, [message()], history=rows), Calendar(100.0))
    assert found is not None
    return found


def test_lateness_by_route_and_hour(spark: SparkSession) -> None:
    rows = [change(HOUR - 2 * HOUR_MS + n, late_ms=n) for n in range(100)]
    rows += [change(HOUR - HOUR_MS + n, route=b"mail.in", late_ms=10_000 + n) for n in range(50)]
    rows += [change(HOUR - HOUR_MS, "held", late_ms=1 << 40), change(HOUR, "cancelled", late_ms=-5)]
    rows += [change(HOUR, late_ms=-3)]
    rows += [change(HOUR, late_ms=1 << 40, delay_ms=delay_ms) for delay_ms in (-(1 << 40), 0)]
    rows += [change(HOUR, late_ms=7, delay_ms=None)]
    found = told(spark, rows)
    assert (found.first_ms, found.last_ms) == (HOUR - 2 * HOUR_MS, HOUR)
    names = ("start_ms", "released", "held", "cancelled", "worst_ms")
    assert [tuple(one[name] for name in names) for one in found.hours] == [
        (HOUR - 2 * HOUR_MS, 100, 0, 0, 99),
        (HOUR - HOUR_MS, 50, 1, 0, 10_049),
        (HOUR, 4, 0, 1, 7),
    ]
    assert [one["route"] for one in found.routes] == [b"delayer.in", b"mail.in"]
    example = audit_reports.past()
    assert (found.whole.keys(), found.routes[0].keys()) == (example.whole.keys(), example.routes[0].keys())
    assert found.routes[1]["hours"] == [
        {"start_ms": HOUR - HOUR_MS, "released": 50, "held": 0, "cancelled": 0}
        | {"p50_ms": 10_024, "p99_ms": 10_049, "worst_ms": 10_049}
    ]
    assert found.routes[0]["whole"]["p50_ms"] in (48, 49, 50)
    [second, _, hour] = found.capacity
    assert (second["released"].messages, hour["released"].messages) == (100, 100)
    assert (found.worse, found.odd) == ([], [])


def test_destinations_that_get_worse(spark: SparkSession) -> None:
    """One is held more often, one is later, one was as bad before, and one has too few messages."""
    rows: list[Row] = []
    for to_key, before, now in ((b"held", 0, 5), (b"same", 5, 5), (b"few", 0, 5)):
        for at_ms, held in ((NOW - 2 * DAY_MS, before), (NOW - HOUR_MS, now)):
            many = 30 if to_key != b"few" else 6
            rows += [change(at_ms, "held" if n < held else "released", to_key=to_key) for n in range(many)]
    for at_ms, late_ms in ((NOW - 2 * DAY_MS, 400), (NOW - HOUR_MS, 30_000)):
        rows += [change(at_ms, to_key=b"late", late_ms=late_ms) for _ in range(40)]
    names = tuple(audit_reports.past().worse[0])
    found = told(spark, rows).worse
    assert set(found[0]) == set(names)
    assert [tuple(one[name] for name in names) for one in found] == [
        (b"delayer.out", b"late", 40, 0.0, 0.0, 400, 30_000),
        (b"delayer.out", b"held", 30, 0.0, 0.1667, 5, 5),
    ]


def test_seconds_given_as_milliseconds(spark: SparkSession) -> None:
    rows = [change(NOW, delay_ms=3_600_000 + n) for n in range(50)]
    rows += [change(NOW, delay_ms=3_550, to_key=b"wrong") for _ in range(7)]
    rows += [change(NOW, delay_ms=60_000), change(NOW, delay_ms=None), change(NOW, delay_ms=100, route=b"fast")]
    rows += [change(NOW, delay_ms=2_000_000_000, to_key=b"long")]
    odd = told(spark, rows).odd
    assert [(one["to_key"], one["messages"], one["odd"], one["odd_ms"]) for one in odd] == [
        (b"wrong", 7, 7, 3_550),
        (b"long", 1, 1, 2_000_000_000),
    ]
    assert odd[0].keys() == audit_reports.past().odd[0].keys()
    assert {one["route"] for one in odd} == {b"delayer.in"}
    assert all(3_600_000 <= one["usual_ms"] < 3_600_050 for one in odd)


def test_without_a_history(spark: SparkSession) -> None:
    assert past.build_history_report(store(spark, [message()]), Calendar(100.0)) is None


@pytest.mark.deadline(300)
async def test_the_job_reads_the_history_of_the_store(spark: SparkSession, database: str) -> None:
    async with opened(database, history_days=2) as there, owned(there) as lanes, sql(database) as admin:
        await put(admin, [row(1, there.now_lower_ms() + DAY_MS)])
        await there.park(lanes[0], [parcel(there.now_lower_ms() + 500)], [])
        rows = await claim_when_due(lanes[0])
        await lanes[0].claimers[0].settle(rows, [], lambda: [float(due.due_ms + 7) for due in rows])
        found = audit(spark, database).past
    assert found is not None
    assert (found.whole["released"], found.whole["p99_ms"]) == (1, 7)
    assert [one["route"] for one in found.routes] == [b"delayer.in"]
