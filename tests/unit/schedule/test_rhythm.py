"""Rhythms: five zones over fifty years compared with another reading, intervals, and counts."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.core.units import DAY_MS, HOUR_MS, MINUTE_MS
from delayer.schedule.rhythm import Cron, Every, Rhythm, count_between, next_after, rhythm_in_words
from delayer.schedule.wall import UnknownZone, check_zone
from tests.unit.schedule.readings import FIRST_YEAR, LAST_YEAR, READINGS, ZONES, Reading, changes, read

OF_THE_CALENDAR = [reading for reading in READINGS if len(reading.days) < 7 or len(reading.dates) < 31]


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000)


def walk(rhythm: Rhythm, after_ms: int, until_ms: int) -> list[int]:
    found, at_ms = [], next_after(rhythm, after_ms)
    while at_ms is not None and at_ms <= until_ms:
        found.append(at_ms)
        at_ms = next_after(rhythm, at_ms)
    return found


def both(reading: Reading, zone: str, start: int, end: int) -> tuple[list[int], list[int]]:
    ours = walk(Cron(reading.expression, zone), start * 1000 - 1, end * 1000 - 1)
    return ours, [at * 1000 for at in read(reading, zone, start, end)]


def a_year(year: int) -> tuple[int, int]:
    start, end = (int(datetime(one, 1, 1, tzinfo=UTC).timestamp()) for one in (year, year + 1))
    return start, end


@pytest.mark.parametrize("zone", ZONES)
def test_every_change_of_the_clocks_in_fifty_years(zone: str) -> None:
    for change in changes(zone):
        for reading in READINGS:
            hours = 30 if reading.by_clock else 3
            ours, theirs = both(reading, zone, change - hours * 3600, change + hours * 3600)
            assert ours == theirs, (reading, datetime.fromtimestamp(change, UTC))


def test_the_zones_have_changes_of_every_kind() -> None:
    assert {zone: len(changes(zone)) for zone in ZONES} == {
        "Europe/Berlin": 100, "America/New_York": 100, "Australia/Lord_Howe": 98, "Asia/Kathmandu": 1, "UTC": 0,
    }  # fmt: skip


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("year", [2027])
def test_a_year_of_minutes(zone: str, year: int) -> None:
    for reading in READINGS[:2]:
        ours, theirs = both(reading, zone, *a_year(year))
        assert ours == theirs, reading


@pytest.mark.slow
@pytest.mark.parametrize("zone", ZONES)
def test_fifty_years_of_minutes(zone: str) -> None:
    """Between two changes of the clocks, only the calendar differs from year to year."""
    for year in range(FIRST_YEAR, LAST_YEAR + 1):
        for reading in READINGS if year % 20 == 6 else OF_THE_CALENDAR:
            ours, theirs = both(reading, zone, *a_year(year))
            assert ours == theirs, (reading, year)


@pytest.mark.parametrize(
    ("expression", "zone", "times"),
    [
        ("30 2 * * *", "Europe/Berlin", ["2026-03-28T02:30+01:00", "2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00"]),
        ("30 2 * * *", "Europe/Berlin", ["2026-10-24T02:30+02:00", "2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]),
        ("0 30 2 * * *", "Europe/Berlin", ["2026-03-28T02:30+01:00", "2026-03-29T03:00+02:00"]),
        ("0 30 2 * * *", "Europe/Berlin", ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]),
        ("15 2 * * *", "Australia/Lord_Howe", ["2026-10-03T02:15+10:30", "2026-10-04T02:30+11:00"]),
        ("45 * * * *", "Australia/Lord_Howe", ["2026-04-05T01:45+11:00", "2026-04-05T01:45+10:30"]),
        ("30 * * * *", "Europe/Berlin", ["2026-10-25T02:30+02:00", "2026-10-25T02:30+01:00", "2026-10-25T03:30+01:00"]),
        ("0,30 2,3 * * *", "Europe/Berlin", ["2026-03-29T03:00+02:00", "2026-03-29T03:30+02:00"]),
        ("0 12 * * *", "Pacific/Apia", ["2011-12-29T12:00-10:00", "2011-12-31T00:00+14:00", "2011-12-31T12:00+14:00"]),
        ("0 0 * * *", "Asia/Beirut", ["2026-03-28T00:00+02:00", "2026-03-29T01:00+03:00", "2026-03-30T00:00+03:00"]),
        ("0 0 29 2 *", "UTC", ["2096-02-29T00:00+00:00", "2104-02-29T00:00+00:00"]),
    ],
)  # fmt: skip
def test_nights_in_which_the_clocks_change(expression: str, zone: str, times: list[str]) -> None:
    for before, after in pairwise(map(ms, times)):
        assert next_after(Cron(expression, zone), before) == after
        assert next_after(Cron(expression, zone), after - 1) == after
        assert count_between(Cron(expression, zone), before, after) == 1


def test_seconds_go_through_a_change_without_a_pause() -> None:
    change = ms("2026-10-25T02:00:00+01:00")
    assert walk(Cron("* * * * * *", "Europe/Berlin"), change - 2_000, change + 1_000) == [
        change - 1_000, change, change + 1_000,
    ]  # fmt: skip
    change = ms("2026-03-29T03:00:00+02:00")
    assert walk(Cron("*/2 * * * * *", "Europe/Berlin"), change - 2_000, change + 2_000) == [change, change + 2_000]


@pytest.mark.parametrize(
    ("every", "after", "expected"),
    [
        (Every(1_000), 0, 1_000),
        (Every(1_000), 999, 1_000),
        (Every(1_000, 250), 250, 1_250),
        (Every(MINUTE_MS, DAY_MS), 0, DAY_MS),
        (Every(MINUTE_MS, DAY_MS), DAY_MS, DAY_MS + MINUTE_MS),
        (Every(7 * DAY_MS, -1), DAY_MS, 7 * DAY_MS - 1),
    ],
)
def test_intervals_count_from_their_first_time(every: Every, after: int, expected: int) -> None:
    assert next_after(every, after) == expected


def test_nothing_is_before_the_first_time() -> None:
    noon = ms("2026-03-02T12:00Z")
    for first, found in ((noon, noon), (noon - 1, noon), (noon + 1, noon + DAY_MS)):
        cron = Cron("0 12 * * *", first_ms=first)
        assert next_after(cron, noon - 9 * DAY_MS) == found
        assert count_between(cron, noon - 9 * DAY_MS, noon + DAY_MS) == (noon + 2 * DAY_MS - found) // DAY_MS
        assert count_between(cron, noon - 9 * DAY_MS, first - 1) == 0
    assert count_between(Every(1_000, noon), 0, noon - 5_000) == 0
    assert count_between(Every(1_000, noon), 0, noon) == 1


@given(st.integers(1, DAY_MS), st.integers(0, 2 * DAY_MS), st.integers(0, 3 * DAY_MS), st.integers(0, 50))
def test_intervals_do_not_drift(period: int, first: int, after: int, steps: int) -> None:
    every, at = Every(period, first), after
    for _ in range(steps + 1):
        at = next_after(every, at) or 0
    assert at > after and (at - first) % period == 0 and at >= first
    assert count_between(every, after, at) == steps + 1


CRONS = st.sampled_from([reading.expression for reading in READINGS] + ["0 */6 L * *", "30 1 * * *", "* 1-3 * * *"])
ODD_ZONES = ("America/St_Johns", "Asia/Beirut", "Pacific/Apia", "Africa/Casablanca", "Antarctica/Troll")


@given(CRONS, st.sampled_from(ZONES + ODD_ZONES), st.integers(ms("1987-01-01T00:00Z"), ms("2036-01-01T00:00Z")),
       st.integers(0, 4 * DAY_MS))  # fmt: skip
def test_a_count_is_a_walk(expression: str, zone: str, after: int, length: int) -> None:
    cron = Cron(expression, zone)
    assert count_between(cron, after, after + length) == len(walk(cron, after, after + length))


@pytest.mark.parametrize("zone", ZONES + ODD_ZONES)
def test_a_count_is_a_walk_next_to_changes(zone: str) -> None:
    for change in changes(zone)[-6:]:
        for reading in READINGS:
            cron = Cron(reading.expression, zone)
            for hours in (-24, -1, 0, 1):
                after = change * 1000 + hours * HOUR_MS - MINUTE_MS // 2
                until = after + 26 * HOUR_MS
                assert count_between(cron, after, until) == len(walk(cron, after, until))


@pytest.mark.parametrize("zone", ZONES + ODD_ZONES)
def test_seconds_are_counted_through_changes(zone: str) -> None:
    """Both clocks that show each second, and those that name each second of the day, which they show twice."""
    for change in changes(zone)[-12:]:
        after, until = change * 1000 - 5 * HOUR_MS - 1, change * 1000 + 20 * HOUR_MS - 1
        assert count_between(Cron("* * * * * *", zone), after, until) == 25 * 3_600
        for start in (after, change * 1000 - 1, change * 1000 + 7 * MINUTE_MS - 1):
            seconds, minutes = (
                count_between(Cron(f"{expression} 0-59 0-23 * * *", zone), start, until) for expression in "*0"
            )
            assert seconds == 60 * minutes


def test_a_rhythm_ends_with_the_calendar() -> None:
    assert next_after(Cron("0 0 1 1 *"), ms("9998-06-01T00:00Z")) == ms("9999-01-01T00:00Z")
    assert next_after(Cron("0 0 1 1 *"), ms("9999-06-01T00:00Z")) is None
    assert next_after(Cron("0 0 1 1 *"), 1 << 60) is None


@pytest.mark.words
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Europe/Berln", "found 'Europe/Berln'; did you mean Europe/Berlin?"),
        ("europe/berlin", "did you mean Europe/Berlin?"),
        ("Kathmandu", "did you mean Asia/Kathmandu?"),
        ("Europe", "expected an IANA name such as Europe/Berlin or UTC, found 'Europe'"),
        ("../../etc/passwd", "found '../../etc/passwd'"),
        ("right/UTC", "found 'right/UTC'"),
        ("localtime", "found 'localtime'"),
        ("", "found ''"),
        ("Nowhere\0", "found"),
    ],
)
def test_unknown_zones(name: str, words: str) -> None:
    with pytest.raises(UnknownZone) as wrong:
        check_zone(name)
    assert words in str(wrong.value)
    if "/" in name or not name:
        return
    if name != "localtime":
        with pytest.raises(UnknownZone):
            next_after(Cron("@daily", name), 0)


def test_an_expression_that_cannot_be_read_is_shown_as_it_is() -> None:
    """A failed schedule has one, and a list shows it."""
    assert rhythm_in_words(Cron("0 7 * * FOO", "UTC")) == '"0 7 * * FOO" (UTC)'
