"""The upcoming messages: bars, peaks, routes and destinations, and the report as JSON."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING

from delayer.audit import coming, faults
from delayer.audit.coming import calendar
from delayer.audit.findings import Bar, Finding, Peak, run_of
from delayer.core.units import DAY_MS
from tests.audit.rows import NOW, held, judged, message, packed, segment, store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MINUTE = NOW // 60_000 * 60_000 + 600_000


def test_the_calendar(spark: SparkSession) -> None:
    second = (NOW // DAY_MS + 2) * DAY_MS + 5000
    messages = [message(number, due_ms=second + number % 1000, size=number) for number in range(3000)]
    messages += [
        message(9000, due_ms=NOW + 60_000),
        packed(9001, due_ms=NOW + 9 * 365 * DAY_MS),
        held(9002, due_ms=NOW),
    ]
    told = calendar(store(spark, messages), 100.0)
    assert told.peaks[0] == Peak(second, 1000, 3000, sum(range(3000)), 30.0)
    assert told.minutes == (Bar((NOW + 60_000) // 60_000 * 60_000, 60_000, 1, 100),)
    assert [bar.messages for bar in told.hours] == [1, 3000]
    assert [bar.messages for bar in told.days] == [1, 3000, 1]


def test_messages_in_segments_that_do_not_read_back_stay_in_the_calendar(spark: SparkSession) -> None:
    sound = [packed(number, 1) for number in range(1, 4)]
    lost = [packed(number, 2, due_ms=NOW + 8 * DAY_MS + number) for number in range(4, 11)]
    unread = {"segment": 2, "lane": 1, "kind": "segment", "faults": [faults.CHANGED]}
    days = calendar(store(spark, [*sound, unread], [segment(1, sound), segment(2, lost)]), 1.0).days
    assert [(bar.messages, bar.unread) for bar in days] == [(10, 7)]


def test_messages_beyond_the_shown_days_count_in_the_edge_bars(spark: SparkSession) -> None:
    messages = [message(1, due_ms=NOW + 9_000 * DAY_MS), message(2, due_ms=NOW - 30_000 * DAY_MS)]
    days = calendar(store(spark, messages), 1.0).days
    assert [round((bar.start_ms - NOW) / DAY_MS) for bar in days] == [-400, 4000]


def test_every_message_is_in_every_total(spark: SparkSession) -> None:
    random = Random(1)
    due = [(NOW // DAY_MS + random.randrange(-500, 5000)) * DAY_MS + random.randrange(DAY_MS) for _ in range(500)]
    make = (message, held, packed)
    messages = [
        random.choice(make)(number, due_ms=due_ms, lane=random.randrange(1, 4), size=number)
        for number, due_ms in enumerate(due)
    ]
    report = judged(spark, messages)
    waiting = [one for one in messages if one["kind"] != "held"]
    assert sum(bar.messages for bar in report.calendar.days) == len(waiting)
    assert sum(share.messages for share in report.calendar.routes) == len(waiting)
    assert report.totals.held == len(messages) - len(waiting)
    assert report.totals.size == sum(range(500))
    assert report.totals.first_due_ms == min(one["due_ms"] for one in waiting)
    assert report.totals.last_due_ms == max(one["due_ms"] for one in waiting)
    overdue = sum(found.count for found in report.findings if found.rule == "overdue")
    assert overdue == sum(one["due_ms"] <= NOW - 60_000 for one in waiting)


def test_a_minute_is_a_peak_of_its_own_if_no_second_of_it_is(spark: SparkSession) -> None:
    messages = [message(number, due_ms=MINUTE + 1000 * (number % 60)) for number in range(600)]
    peaks = calendar(store(spark, messages), 14_000.0).peaks
    assert (peaks[0].width_ms, peaks[0].messages) == (1000, 10)
    assert (60_000, 600) in [(peak.width_ms, peak.messages) for peak in peaks]
    slow = calendar(store(spark, messages), 4.0)
    assert [(found.count, found.severity) for found in coming.peaks(slow)] == [(600, "warning")]
    assert coming.peaks(calendar(store(spark, messages), 5.0)) == [], "one minute later needs no warning"


def test_routes_and_destinations_are_the_largest_and_the_number_of_the_others(spark: SparkSession) -> None:
    messages = [message(number, to_key=b"%d" % (number % 1000), route=b"%d" % (number % 2)) for number in range(2001)]
    messages.append(held(9000, to_key=b"held"))
    extract = store(spark, messages)
    told = calendar(extract, 1.0)
    assert told.destinations[0].messages == 3
    assert told.destinations[0].to_key == b"0"
    assert (len(told.destinations), told.destinations_more) == (200, 800)
    assert [(share.route, share.messages) for share in told.routes] == [(b"0", 1001), (b"1", 1000)]
    assert told.routes_more == 0
    targets = coming.targets(extract, 5000)
    assert len(targets) == 1001
    assert [(one.messages, one.held) for one in targets if one.routing_key == b"held"] == [(1, 1)]


def test_an_empty_store(spark: SparkSession) -> None:
    report = judged(spark)
    assert report.findings == ()
    assert (report.totals.waiting, report.totals.first_due_ms, report.calendar.days) == (0, None, ())
    assert json.loads(report.to_json())["rules"][0] == {
        "rule": "conservation", "violations": 0, "warnings": 0, "skipped": "", "unlisted": 0, "count": 0,
    }  # fmt: skip


def test_names_with_any_bytes_are_json(spark: SparkSession) -> None:
    text = judged(spark, [message(1, route=b"\xff\xc3\xa4", to_key=b"\xfe\x00")]).to_json()
    assert text.isascii()
    [share] = json.loads(text)["calendar"]["destinations"]
    assert share["to_key"].encode("utf-8", "surrogateescape") == b"\xfe\x00"


def test_findings_of_one_rule_are_bounded_violations_first() -> None:
    found = [Finding("overdue", "violation" if n < 120 else "warning", f"lane {n}", n) for n in range(150)]
    run, listed = run_of("overdue", found)
    assert (run.violations, run.warnings, run.unlisted) == (120, 30, 50)
    assert (run.severity, run.count) == ("violation", sum(range(120))), "without the warnings"
    assert [one.count for one in listed] == list(range(119, 19, -1))
