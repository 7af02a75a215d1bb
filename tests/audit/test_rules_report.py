"""What an audit tells beside findings: the calendar, what cannot be read; its report as JSON."""

from __future__ import annotations

import json

import pytest

from delayer.audit.rules import checks, judge
from delayer.audit.rules.checks import Damage
from delayer.audit.rules.model import DAY_MS, GRACE_MS, Context, Lane
from tests.audit.rows import DAY, NOW, brief, fitting, judged, message, said
from tests.audit.sound import CLAIMS, CONTEXT, SEGMENTS, SOUND


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
    run = next(run for run in report.rules if run.rule == checks.OVERDUE)
    assert (run.violations, run.warnings, run.unlisted) == (120, 30, 50)
    assert len([found for found in report.findings if found.rule == checks.OVERDUE]) == 100
    assert all(found.severity == "violation" for found in report.findings if found.rule == checks.OVERDUE)


def test_places_that_the_database_cannot_read_are_found_by_table() -> None:
    places = [Damage(f"message_{DAY}", *place) for place in (("pages 0 to 7", "one"), ("pages 8 to 15", "two"))]
    report = judged(SOUND, SEGMENTS, CLAIMS, context=CONTEXT, damage=[*places, places[0]])
    (damage,) = report.findings
    assert brief(damage) == ("integrity", "violation", f"table message_{DAY}: the database cannot read it", 2)
    assert damage.first_due_ms is None
    assert damage.details == {
        "places": ["pages 0 to 7", "pages 8 to 15"],
        "reasons": ["one", "two"],
        "due_from_ms": DAY * DAY_MS,
        "due_before_ms": (DAY + 1) * DAY_MS,
    }


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
def test_rows_that_damage_hides_are_not_called_missing(table: str, skipped: set[str]) -> None:
    place = Damage(table, "pages 0 to 7", "invalid page in block 0")
    hidden = [] if table in ("message_key", "segment", "segment_cancelled") else [message(77)]
    segments = [one._replace(tombstones=0) if table == "segment_cancelled" else one for one in SEGMENTS]
    report = judged(
        SOUND, [] if table == "segment" else segments, CLAIMS, context=CONTEXT, damage=[place],
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


def test_names_are_json_whatever_their_bytes() -> None:
    report = judged([message(1, route=b"\xff\xc3\xa4", to_key=b"\xfe\x00")])
    text = report.to_json()
    assert text.isascii()
    [share] = json.loads(text)["calendar"]["destinations"]
    assert share["routing_key"].encode("utf-8", "surrogateescape") == b"\xfe\x00"


def test_instants() -> None:
    assert judge.instant(0) == "1970-01-01T00:00:00Z"
    assert judge.instant(253_402_300_799_999) == "253402300799999 ms"
