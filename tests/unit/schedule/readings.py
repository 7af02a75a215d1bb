"""Another reading of rhythms, to compare with: minute by minute, from what a zone's clock shows at every quarter of an
hour. It knows nothing of folds, of cronsim, or of the code that it checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import numpy as np

ZONES = ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "UTC")
FIRST_YEAR, LAST_YEAR = 1980, 2029
QUARTER, MINUTE = 900, 60
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Reading:
    """A cron expression, and the same as numbers. A day matches ``dates`` and ``days``, which count from 0 for Sunday.
    ``by_clock``: whether it names times of day."""

    expression: str
    minutes: Sequence[int]
    hours: Sequence[int] = tuple(range(24))
    dates: Sequence[int] = tuple(range(1, 32))
    days: Sequence[int] = tuple(range(7))
    by_clock: bool = True


READINGS = (
    Reading("30 2 * * *", [30], [2]),
    Reading("15 2 * * SUN", [15], [2], days=[0]),
    Reading("0,45 1-3 * * *", [0, 45], [1, 2, 3]),
    Reading("0 0 * * *", [0], [0]),
    Reading("30 2 25-31 * *", [30], [2], dates=range(25, 32)),
    Reading("*/20 * * * *", [0, 20, 40], by_clock=False),
    Reading("45 * * * *", [45], by_clock=False),
    Reading("*/10 2 * * *", range(0, 60, 10), [2], by_clock=False),
)


@cache
def changes(name: str) -> tuple[int, ...]:
    """The instants, epoch seconds, of the quarters before which the zone's offset was another."""
    start, end = (
        int((datetime(year, 1, 1, tzinfo=UTC) - _EPOCH).total_seconds()) for year in (FIRST_YEAR, LAST_YEAR + 1)
    )
    days = [day for day in range(start, end, 86_400) if _offset(name, day) != _offset(name, day + 86_400)]
    quarters = (at for day in days for at in range(day + QUARTER, day + 86_401, QUARTER))
    return tuple(at for at in quarters if _offset(name, at) != _offset(name, at - QUARTER))


@cache
def _offset(name: str, at: int) -> int:
    shown = (_EPOCH + timedelta(seconds=at)).astimezone(ZoneInfo(name)).replace(tzinfo=UTC)
    return int((shown - _EPOCH).total_seconds()) - at


def read(reading: Reading, name: str, start: int, end: int) -> Iterator[int]:
    """The times of the expression from ``start`` to before ``end``, whole days of epoch seconds. Begin a day after a
    change at least: what the clock showed before is not looked at."""
    instants = np.arange(start, end, MINUTE)
    offsets = np.repeat([_offset(name, at) for at in range(start, end, QUARTER)], QUARTER // MINUTE)
    wall = instants + offsets
    if not reading.by_clock:
        yield from instants[_matches(reading, wall)].tolist()
        return
    shown_before = np.concatenate(([wall[0] - MINUTE], np.maximum.accumulate(wall)[:-1]))
    times = instants[_matches(reading, wall) & (wall > shown_before)].tolist()
    for at in np.flatnonzero(wall > shown_before + MINUTE):
        skipped = np.arange(shown_before[at] + MINUTE, wall[at], MINUTE)
        if _matches(reading, skipped).any():
            times.append(int(instants[at]))
    yield from sorted(set(times))


def _matches(reading: Reading, wall: np.ndarray) -> np.ndarray:
    days = wall // 86_400
    dates = (days.astype("datetime64[D]") - days.astype("datetime64[D]").astype("datetime64[M]")).astype(int) + 1
    found: np.ndarray = (
        np.isin(wall // 60 % 60, list(reading.minutes))
        & np.isin(wall // 3600 % 24, list(reading.hours))
        & np.isin(dates, list(reading.dates))
        & np.isin((days + 4) % 7, list(reading.days))
    )
    return found
