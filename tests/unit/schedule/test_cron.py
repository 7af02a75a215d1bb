"""Cron expressions on a wall clock: forms, wrapped ranges, dates that never come, and the errors."""

# ruff: noqa: DTZ001  # a wall clock has no zone

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.schedule.cron import BadCron, check_cron, count_in_day, cron_in_words, is_fixed, next_wall

START = datetime(2026, 3, 28, 12)  # a Saturday


def nexts(expression: str, count: int, after: datetime = START) -> list[str]:
    found = []
    for _ in range(count):
        after = next_wall(expression, after)  # type: ignore[assignment]
        found.append(after.strftime("%a %d %b %Y %X"))
    return found


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("30 2 * * *", ["Sun 29 Mar 2026 02:30:00", "Mon 30 Mar 2026 02:30:00"]),
        ("*/7 * * * * *", ["Sat 28 Mar 2026 12:00:07", "Sat 28 Mar 2026 12:00:14"]),
        ("0 30 2 * * *", ["Sun 29 Mar 2026 02:30:00"]),
        ("5/20 * * * *", ["Sat 28 Mar 2026 12:05:00", "Sat 28 Mar 2026 12:25:00"]),
        ("0 0 L * *", ["Tue 31 Mar 2026 00:00:00", "Thu 30 Apr 2026 00:00:00"]),
        ("0 0 LW 5 *", ["Fri 29 May 2026 00:00:00", "Mon 31 May 2027 00:00:00"]),
        ("0 0 * * 5L", ["Fri 24 Apr 2026 00:00:00", "Fri 29 May 2026 00:00:00"]),
        ("0 0 * * fril", ["Fri 24 Apr 2026 00:00:00"]),
        ("0 0 * * FRI#2", ["Fri 10 Apr 2026 00:00:00"]),
        ("0 0 * 2 MON#5", ["Mon 29 Feb 2044 00:00:00", "Mon 29 Feb 2072 00:00:00"]),
        ("0 0 29 2 *", ["Tue 29 Feb 2028 00:00:00", "Sun 29 Feb 2032 00:00:00"]),
        ("0 22-1 * * *", ["Sat 28 Mar 2026 22:00:00", "Sat 28 Mar 2026 23:00:00", "Sun 29 Mar 2026 00:00:00",
                          "Sun 29 Mar 2026 01:00:00", "Sun 29 Mar 2026 22:00:00"]),
        ("0 22-4/3 * * *", ["Sat 28 Mar 2026 22:00:00", "Sun 29 Mar 2026 01:00:00", "Sun 29 Mar 2026 04:00:00"]),
        ("0 0 * * fri-mon", ["Sun 29 Mar 2026 00:00:00", "Mon 30 Mar 2026 00:00:00", "Fri 03 Apr 2026 00:00:00"]),
        ("0 0 * * fri-sun", ["Sun 29 Mar 2026 00:00:00", "Fri 03 Apr 2026 00:00:00"]),
        ("0 0 * * 7-2", ["Sun 29 Mar 2026 00:00:00", "Mon 30 Mar 2026 00:00:00", "Tue 31 Mar 2026 00:00:00"]),
        ("0 0 1 nov-feb *", ["Sun 01 Nov 2026 00:00:00", "Tue 01 Dec 2026 00:00:00", "Fri 01 Jan 2027 00:00:00"]),
        ("50-10/10 0 * * *", ["Sun 29 Mar 2026 00:00:00", "Sun 29 Mar 2026 00:10:00", "Sun 29 Mar 2026 00:50:00"]),
        ("0 0 13 * FRI", ["Fri 03 Apr 2026 00:00:00", "Fri 10 Apr 2026 00:00:00", "Mon 13 Apr 2026 00:00:00"]),
        ("0 0 */10 * FRI", ["Fri 01 May 2026 00:00:00", "Fri 31 Jul 2026 00:00:00"]),
        ("0 0 30 2 1", ["Mon 01 Feb 2027 00:00:00"]),  # either is enough
        ("@daily", ["Sun 29 Mar 2026 00:00:00"]),
        ("@Weekly", ["Sun 29 Mar 2026 00:00:00"]),
        ("@hourly", ["Sat 28 Mar 2026 13:00:00"]),
        ("@monthly", ["Wed 01 Apr 2026 00:00:00"]),
        ("@yearly", ["Fri 01 Jan 2027 00:00:00"]),
    ],
)  # fmt: skip
def test_the_next_times(expression: str, expected: list[str]) -> None:
    assert nexts(expression, len(expected)) == expected


def test_a_fraction_of_a_second_after_a_time_is_after_it() -> None:
    assert next_wall("0 12 * * *", START - timedelta(milliseconds=1)) == START
    assert next_wall("0 12 * * *", START + timedelta(milliseconds=1)) == START + timedelta(days=1)


def test_the_calendar_ends() -> None:
    assert next_wall("0 0 1 1 *", datetime(9999, 6, 1)) is None


@pytest.mark.words
@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("* * * *", "expected five fields .* found '\\* \\* \\* \\*'"),
        ("0 0 0 1 1 * 2030", "expected five fields"),
        ("", "expected five fields"),
        ("@reboot", "or one of @yearly, .* found '@reboot'"),
        ("@every 5m", "expected five fields"),
        ("60 * * * *", "minute: expected 0 to 59, or .* found '60'"),
        ("*/0 * * * *", "minute: .* found '\\*/0'"),
        ("1,,2 * * * *", "minute: .* found ''"),
        ("٣ * * * *", "minute: "),
        ("61 * * * * *", "second: "),
        ("0 24 * * *", "hour: expected 0 to 23, .* found '24'"),
        ("0 7,25,9 * * *", "hour: .* found '25'"),
        ("0 22-2,25 * * *", "hour: .* found '25'"),
        ("0 5-5/0 * * *", "hour: .* found '5-5/0'"),
        ("0 25-2 * * *", "hour: .* found '25-2'"),
        ("0 0 0 * *", "day-of-month: expected 1 to 31, L .*found '0'"),
        ("0 0 15W * *", "day-of-month: .* found '15W'"),
        ("0 0 ? * MON", "day-of-month: .* found '\\?'; write \\*, and weekdays by name"),
        ("0~59 0 * * *", "minute: .* found '0~59'; for a random part write a fixed time and a jitter"),
        ("0 0 * 13 *", "month: expected 1 to 12 or JAN to DEC"),
        ("0 0 * * 8", "day-of-week: expected 0 to 7 or SUN to SAT"),
        ("0 0 * * FRI#6", "day-of-week: .* found 'FRI#6'"),
        ("0 0 30 2 *", "day-of-month: expected a day that month 2 has, found '30': this date never comes"),
        ("0 0 31 FEB,4,jun *", "day-of-month: expected a day that month FEB,4,JUN has, found '31'"),
        ("0 0 30 2 */2", "this date never comes"),
        ("0 0 * *\n *\x07", "expected five fields"),
        ("0 7 * * " + ",".join("1" * 100_000), "expected at most 200 characters, found 200007"),
    ],
)
def test_errors_name_the_field_and_the_value(expression: str, words: str) -> None:
    with pytest.raises(BadCron, match=words):
        check_cron(expression)


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("0 7 * * 1-5", "At 07:00 on Monday through Friday"),
        ("@daily", "At 00:00 every day"),
        ("0 0 * * fril", "At 00:00 on the last Friday of the month"),
        ("0 0 13 * FRI", "At 00:00 on the 13th day of month and on Friday"),
        ("0 0 */10 * FRI", "At 00:00 on every 10th day of month if it's on Friday"),
        ("0 0 * * fri-mon", "At 00:00 on Friday, Saturday, Sunday, and Monday"),
        ("*/10 * * * * *", "Every 10th second of every minute"),
    ],
)
def test_words(expression: str, words: str) -> None:
    assert cron_in_words(expression) == words


@pytest.mark.parametrize(
    ("expression", "expected"),
    [("30 2 * * *", True), ("15 30 2 * * *", True), ("0,30 1-3 * * *", True), ("* 30 2 * * *", True), ("@daily", True),
     ("*/5 2 * * *", False), ("30 * * * *", False), ("30 */2 * * *", False), ("* * * * * *", False)],
)  # fmt: skip
def test_expressions_name_times_of_day_or_distances(expression: str, expected: bool) -> None:
    assert is_fixed(expression) is expected


def _fields(lowest: int, highest: int) -> st.SearchStrategy[str]:
    number = st.integers(lowest, highest)
    term = st.one_of(
        st.just("*"),
        number.map(str),
        st.tuples(number, number).map(lambda ends: f"{ends[0]}-{ends[1]}"),
        st.tuples(number, number, st.integers(1, 9)).map(lambda span: f"{span[0]}-{span[1]}/{span[2]}"),
        st.integers(1, 9).map(lambda step: f"*/{step}"),
    )
    return st.lists(term, min_size=1, max_size=3).map(",".join)


def _values(text: str, lowest: int, highest: int) -> set[int]:
    """The values of a field, read anew: what a range passes on a ring."""
    values = set()
    for term in text.split(","):
        span, _, step = term.partition("/")
        first, _, last = (f"{lowest}-{highest}" if span == "*" else span).partition("-")
        size = highest - lowest + 1
        length = (int(last or first) - int(first)) % size
        values |= {(int(first) - lowest + far) % size + lowest for far in range(0, length + 1, int(step or 1))}
    return values


TIMES = st.datetimes(datetime(1975, 1, 1), datetime(2090, 1, 1))


@given(_fields(0, 59), _fields(0, 23), _fields(1, 12), _fields(0, 6), TIMES)
def test_the_next_time_matches_and_none_between_does(
    minute: str, hour: str, month: str, day: str, after: datetime
) -> None:
    expression = f"{minute} {hour} * {month} {day}"
    minutes, hours, months = _values(minute, 0, 59), _values(hour, 0, 23), _values(month, 1, 12)
    days = _values(day, 0, 6)

    def is_day(at: datetime) -> bool:
        return at.month in months and at.isoweekday() % 7 in days

    found = next_wall(expression, after)
    assert found is not None and found > after and is_day(found) and found.hour in hours and found.minute in minutes
    # The day before is whole, so its last possible time is before `after`, or the day does not match.
    at = (after + timedelta(minutes=1)).replace(second=0, microsecond=0)
    while at < found:
        if is_day(at):
            assert at.hour not in hours or at.minute not in minutes
            at += timedelta(minutes=1)
        else:
            at = at.replace(hour=0, minute=0) + timedelta(days=1)


@given(_fields(0, 59), _fields(0, 23), TIMES, TIMES.map(datetime.time))
def test_counting_a_day_is_walking_through_it(minute: str, hour: str, start: datetime, time: object) -> None:
    expression = f"{minute} {hour} * * MON-THU"
    other = datetime.combine(start, time)  # type: ignore[arg-type]
    start, stop = sorted((start, other))
    walked, at = 0, next_wall(expression, start - timedelta(microseconds=1))
    while at is not None and at < stop:
        walked += 1
        at = next_wall(expression, at)
    assert count_in_day(expression, start, stop) == walked


def test_a_whole_day_is_its_hours() -> None:
    midnights = [datetime(2026, 3, day) for day in (2, 3, 4, 5, 6, 7)]
    assert [count_in_day("0,30 * * * 1-5", *day) for day in pairwise(midnights)] == [48] * 5
    assert count_in_day("* * * * * 1-5", datetime(2026, 3, 7), datetime(2026, 3, 8)) == 0
