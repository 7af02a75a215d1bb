"""Cron expressions: five fields, or six with seconds first, as times on a wall clock. Pure.

cronsim finds the times and the words, and follows Debian's cron: if day-of-month or day-of-week begins with ``*``, a
day must match both; otherwise either is enough. This module adds ranges that wrap (``22-2``, ``FRI-MON``), ``@daily``
and its relatives, and errors that name the field. The module ``wall`` turns the times into instants of a zone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, time, timedelta
from functools import lru_cache
from typing import Final, NamedTuple

from cronsim import CronSim, CronSimError

from delayer.core.delay_headers import quote_value

MACROS: Final[Mapping[str, str]] = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_DAYS: Final = {name: number for number, name in enumerate(("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"))}
_MONTHS: Final = {
    name: number
    for number, name in enumerate(
        ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"), start=1
    )
}
_SECOND: Final = timedelta(seconds=1)
_ANY_TIME: Final = datetime(2000, 1, 1)  # noqa: DTZ001  # wall clocks have no zone here
_TERM = re.compile(r"([A-Z]{3}|[0-9]{1,2})-([A-Z]{3}|[0-9]{1,2})(?:/([0-9]{1,2}))?")
_LAST = re.compile("([A-Z]{3})L")


LONGEST: Final = 200
"""Maximum characters of an expression."""


class BadCron(ValueError):
    """A text is not a cron expression, or describes no date. The text names the expected and the found value."""


class _Field(NamedTuple):
    name: str
    lowest: int
    highest: int
    names: Mapping[str, int]
    expected: str


_FIELDS: Final = (
    _Field("second", 0, 59, {}, "0 to 59"),
    _Field("minute", 0, 59, {}, "0 to 59"),
    _Field("hour", 0, 23, {}, "0 to 23"),
    _Field("day-of-month", 1, 31, {}, "1 to 31, L (the last day) or LW (the last weekday)"),
    _Field("month", 1, 12, _MONTHS, "1 to 12 or JAN to DEC"),
    _Field(
        "day-of-week", 0, 6, _DAYS,
        "0 to 7 or SUN to SAT (0 and 7 are Sunday), FRI#2 (the second Friday) or FRIL (the last Friday)",
    ),
)  # fmt: skip
_DAY, _MONTH = 3, 4


class _Times(NamedTuple):
    """An expression as read. ``fields``: six, in cronsim's spelling. ``dates``: its days, each at midnight."""

    fields: str
    dates: str
    is_fixed: bool
    hours: frozenset[int]
    minutes: frozenset[int]
    seconds: frozenset[int]


def check_cron(expression: str) -> None:
    """Raise BadCron unless the text is a cron expression with a date that exists."""
    _read(expression)


def is_fixed(expression: str) -> bool:
    """Whether the expression names times of day. An expression whose minute or hour begins with ``*`` names distances
    instead, which a change of the clocks does not stretch. Debian's cron has the same rule.

    >>> is_fixed("30 2 * * *"), is_fixed("*/15 * * * *"), is_fixed("0 * * * *")
    (True, False, False)
    """
    return _read(expression).is_fixed


def next_wall(expression: str, after: datetime) -> datetime | None:
    """Find the first time of the expression later than ``after``, both on a wall clock, in whole seconds. None if there
    is none within fifty years.

    >>> next_wall("0 7 * * 1-5", datetime(2026, 5, 1, 7))
    datetime.datetime(2026, 5, 4, 7, 0)
    """
    return _next(_read(expression).fields, after)


def count_in_day(expression: str, start: datetime, stop: datetime) -> int:
    """Count the expression's times from ``start`` to before ``stop``, on one day of a wall clock. ``stop`` is on that
    day, or is the midnight that ends it."""
    times = _read(expression)
    midnight = datetime.combine(start, time())
    if _next(times.dates, midnight - _SECOND) != midnight:
        return 0
    whole = len(times.hours) * len(times.minutes) * len(times.seconds)
    return (whole if stop.date() > start.date() else _rank(times, stop)) - _rank(times, start)


def cron_in_words(expression: str) -> str:
    """Describe the times, such as "At 07:00 on Monday through Friday"."""
    return CronSim(_read(expression).fields, _ANY_TIME).explain()


def _rank(times: _Times, at: datetime) -> int:
    """Count the expression's times of a day before ``at``."""
    minutes, seconds = len(times.minutes), len(times.seconds)
    rank = sum(hour < at.hour for hour in times.hours) * minutes * seconds
    if at.hour in times.hours:
        rank += sum(minute < at.minute for minute in times.minutes) * seconds
        if at.minute in times.minutes:
            rank += sum(second < at.second + (at.microsecond > 0) for second in times.seconds)
    return rank


def _next(fields: str, after: datetime) -> datetime | None:
    try:
        return next(CronSim(fields, after))
    except (StopIteration, OverflowError):  # cronsim looks fifty years ahead; Python's calendar ends with the year 9999
        return None


@lru_cache(maxsize=4096)
def _read(expression: str) -> _Times:
    if len(expression) > LONGEST:
        raise BadCron(f"expected at most {LONGEST} characters, found {len(expression)}")
    fields = MACROS.get(expression.strip().lower(), expression).upper().split()
    if len(fields) not in (5, 6) or not expression.isprintable():
        raise BadCron(
            "expected five fields (minute, hour, day-of-month, month, day-of-week), or six with the second first, "
            f"or one of {', '.join(MACROS)}, found {quote_value(expression)}"
        )
    fields = [*["0"] * (6 - len(fields)), *fields]
    spelled = [_spell(text, field) for text, field in zip(fields, _FIELDS, strict=True)]
    try:
        read = CronSim(" ".join(spelled), _ANY_TIME)
    except CronSimError:
        raise BadCron(_complaint(fields)) from None
    return _Times(
        " ".join(spelled),
        " ".join(("0 0 0", *spelled[_DAY:])),
        not spelled[1].startswith("*") and not spelled[2].startswith("*"),
        frozenset(read.hours),
        frozenset(read.minutes),
        frozenset(read.seconds),
    )


def _spell(text: str, field: _Field) -> str:
    """Spell a field as cronsim reads it: ranges that wrap become lists, and ``FRIL`` becomes ``5L``."""
    return ",".join(_spell_term(term, field) for term in text.split(","))


def _spell_term(term: str, field: _Field) -> str:
    if (last := _LAST.fullmatch(term)) and last[1] in field.names:
        return f"{field.names[last[1]]}L"
    span = _TERM.fullmatch(term)
    if span is None:
        return term
    first, end = (
        field.names[one] if one in field.names else int(one) if one.isdigit() else -1 for one in span.groups()[:2]
    )
    step, highest = int(span[3] or 1), 7 if field.names is _DAYS else field.highest
    if first == end and step:
        return str(first)  # cronsim 2.8 reads "0-0/2" as "0/2".
    if step and field.lowest <= end < first <= highest:
        return ",".join(map(str, [*range(first, field.highest + 1), *range(field.lowest, end + 1)][::step]))
    return term  # cronsim accepts or rejects it.


def _complaint(given: Sequence[str]) -> str:
    for place, (text, field) in enumerate(zip(given, _FIELDS, strict=True)):
        for original in text.split(","):
            alone = ["*"] * len(_FIELDS)
            alone[place] = _spell_term(original, field) or "-"
            try:
                CronSim(" ".join(alone), _ANY_TIME)
            except CronSimError:
                return (
                    f"{field.name}: expected {field.expected}, or * for every one, ranges (1-5), steps (*/5) and lists "
                    f"(1,3,5) of these, found {quote_value(original)}{_hint(original)}"
                )
    return (
        f"day-of-month: expected a day that month {given[_MONTH]} has, found {quote_value(given[_DAY])}: "
        "this date never comes"
    )


def _hint(term: str) -> str:
    if "?" in term:
        return "; write *, and weekdays by name, because Quartz counts them from 1 for Sunday"
    if "~" in term or "H" in term:
        return "; for a random part write a fixed time and a jitter"
    return ""
