"""Rhythms: a cron expression in a zone, or an interval. Instants are integers, epoch milliseconds. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from delayer.core.units import DAY_MS, HOUR_MS, MINUTE_MS
from delayer.schedule.cron import BadCron, count_in_day, cron_in_words, is_fixed
from delayer.schedule.wall import next_instant, zone_of

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_HOUR: Final = timedelta(hours=1)
_MINUTE: Final = timedelta(minutes=1)
_DAY: Final = timedelta(days=1)
_UNITS: Final = (("day", DAY_MS), ("hour", HOUR_MS), ("minute", MINUTE_MS), ("second", 1_000), ("millisecond", 1))


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression on the wall clock of an IANA zone, from ``first_ms`` on."""

    expression: str
    zone: str = "UTC"
    first_ms: int = 0


@dataclass(frozen=True, slots=True)
class Every:
    """An interval of elapsed time. It is counted from ``first_ms``, not from a release, so it does not drift."""

    period_ms: int
    first_ms: int = 0


Rhythm = Cron | Every


def next_after(rhythm: Rhythm, after_ms: int) -> int | None:
    """Find the first time later than ``after_ms``; None if there is none. Raises BadCron, and UnknownZone if the host's
    zone data lost the zone.

    >>> next_after(Every(900_000), 1_000), next_after(Every(1_000, first_ms=5_300), 0)
    (900000, 5300)
    """
    if isinstance(rhythm, Every):
        return rhythm.first_ms + max(0, _ordinal(rhythm, after_ms) + 1) * rhythm.period_ms
    zone, after_ms = zone_of(rhythm.zone), max(after_ms, rhythm.first_ms - 1)
    try:
        found = next_instant(rhythm.expression, zone, _EPOCH + after_ms * _MILLISECOND)
    except OverflowError:  # beyond Python's calendar
        return None
    return None if found is None else _to_ms(found)


def count_between(rhythm: Rhythm, after_ms: int, until_ms: int) -> int:
    """Count the times later than ``after_ms`` and not later than ``until_ms``. Fast for years of seconds, because only
    the minutes in which the clocks change are walked through."""
    if isinstance(rhythm, Cron):
        after_ms = max(after_ms, rhythm.first_ms - 1)
    if until_ms <= after_ms:
        return 0
    if isinstance(rhythm, Every):
        return max(-1, _ordinal(rhythm, until_ms)) - max(-1, _ordinal(rhythm, after_ms))
    zone, count = zone_of(rhythm.zone), 0
    start, stop = (_EPOCH + (ms + 1) * _MILLISECOND for ms in (after_ms, until_ms))
    while start < stop:
        for end in (_next_midnight(start, zone), start + _HOUR, start + _MINUTE):
            if is_even := _is_even(rhythm, start, end := min(end, stop), zone):
                break
        if is_even:
            here, there = (at.astimezone(zone).replace(tzinfo=None) for at in (start, end))
            count += count_in_day(rhythm.expression, here, there)
        else:
            count += _walk(rhythm, _to_ms(start), _to_ms(end))
        start = end
    return count


def rhythm_in_words(rhythm: Rhythm) -> str:
    """Describe a rhythm for people.

    >>> rhythm_in_words(Every(5_400_000)), rhythm_in_words(Every(1_000)), rhythm_in_words(Cron("0 7 * * 1-5", "UTC"))
    ('Every 90 minutes', 'Every second', 'At 07:00 on Monday through Friday (UTC)')
    """
    if isinstance(rhythm, Cron):
        try:
            words = cron_in_words(rhythm.expression)
        except BadCron:  # Of a schedule that failed for this.
            words = f'"{rhythm.expression}"'
        return f"{words} ({rhythm.zone})"
    unit, length = next((unit, length) for unit, length in _UNITS if rhythm.period_ms % length == 0)
    count = rhythm.period_ms // length
    return f"Every {unit}" if count == 1 else f"Every {count} {unit}s"


def _ordinal(rhythm: Every, at_ms: int) -> int:
    """The number of the last time not later than this; negative before the first, which is 0."""
    return (at_ms - rhythm.first_ms) // rhythm.period_ms


def _to_ms(instant: datetime) -> int:
    return (instant - _EPOCH) // _MILLISECOND


def _next_midnight(at: datetime, zone: ZoneInfo) -> datetime:
    return datetime.combine(at.astimezone(zone).date() + _DAY, time(), zone).astimezone(UTC)


def _is_even(rhythm: Cron, start: datetime, end: datetime, zone: ZoneInfo) -> bool:
    """Whether these instants are on one day, or the midnight at its end, whose clock neither skips nor repeats a time
    of the rhythm between them, nor has just done so."""
    here = start.astimezone(zone)
    offsets = {at.astimezone(zone).utcoffset() for at in (start - _MILLISECOND, here, end)}
    again = here.fold == 1 and is_fixed(rhythm.expression)
    return not again and len(offsets) == 1 and start < end <= _next_midnight(start, zone)


def _walk(rhythm: Cron, start_ms: int, end_ms: int) -> int:
    count, at_ms = 0, next_after(rhythm, start_ms - 1)
    while at_ms is not None and at_ms < end_ms:
        count += 1
        at_ms = next_after(rhythm, at_ms)
    return count
