"""Count messages by horizon: buckets of time from now. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from delayer.core.units import DAY_MS, HOUR_MS, MINUTE_MS

MONTH_MS: Final = 30 * DAY_MS
YEAR_MS: Final = 365 * DAY_MS

OFFSETS: Final = (
    0,
    *range(MINUTE_MS, HOUR_MS + 1, MINUTE_MS),
    *range(2 * HOUR_MS, 2 * DAY_MS + 1, HOUR_MS),
    *range(3 * DAY_MS, 60 * DAY_MS + 1, DAY_MS),
    *range(3 * MONTH_MS, 24 * MONTH_MS + 1, MONTH_MS),
    *range(2 * YEAR_MS, 10 * YEAR_MS + 1, YEAR_MS),
)
"""Bucket 0 has overdue messages. Bucket i has those due from OFFSETS[i-1] to before OFFSETS[i] from now, the last
bucket the rest. Years begin more than five days after the last month, so OFFSETS ascends."""

CLASSES: Final = {
    "overdue": 0, "minute": MINUTE_MS, "hour": HOUR_MS, "day": DAY_MS, "week": 7 * DAY_MS, "month": MONTH_MS,
    "year": 12 * MONTH_MS,
}  # fmt: skip
"""Classes of metrics, each for messages due within its limit but not the previous. A month is 30 days, a year 360."""
LATER: Final = "later"


class Series(NamedTuple):
    """One chart: ``bars`` of ``step`` milliseconds each, from now on."""

    name: str
    step: int
    bars: int


SERIES: Final = (
    Series("minutes", MINUTE_MS, 60),
    Series("hours", HOUR_MS, 48),
    Series("days", DAY_MS, 60),
    Series("months", MONTH_MS, 24),
)


def bounds(now_ms: int) -> list[int]:
    """The times between the buckets."""
    return [now_ms + offset for offset in OFFSETS]


def bucket_of(due_ms: int, now_ms: int) -> int:
    """The bucket of one due time.

    >>> [bucket_of(now, 0) for now in (-1, 0, 59_999, 60_000, 3_600_000)]
    [0, 1, 1, 2, 61]
    """
    return bisect_right(OFFSETS, due_ms - now_ms)


def by_class(counts: Mapping[int, float]) -> dict[str, float]:
    """The number of messages in each of CLASSES and LATER."""
    found = dict.fromkeys((*CLASSES, LATER), 0.0)
    for bucket, count in counts.items():
        end = OFFSETS[bucket] if bucket < len(OFFSETS) else None
        name = next((name for name, limit in CLASSES.items() if end is not None and end <= limit), LATER)
        found[name] += count
    return found


def bars(counts: Mapping[int, float], series: Series) -> list[float]:
    """The number of messages in each bar of ``series``, without those overdue or past the last bar."""
    found = [0.0] * series.bars
    for bucket, count in counts.items():
        if 0 < bucket < len(OFFSETS):
            begin = OFFSETS[bucket - 1]
            at = begin // series.step
            # Buckets wider than a bar belong to a coarser series.
            if at < series.bars and OFFSETS[bucket] - begin <= series.step:
                found[at] += count
    return found


def spread(first_ms: int, last_ms: int, messages: int, now_ms: int) -> dict[int, float]:
    """Spread a segment's messages over the buckets, evenly from its first to its last due time.

    >>> spread(0, 120_000, 30, 0)
    {1: 15.0, 2: 15.0}
    """
    edges: Sequence[int] = bounds(now_ms)
    if last_ms <= first_ms:
        return {bucket_of(first_ms, now_ms): float(messages)}
    found: dict[int, float] = {}
    at = first_ms
    while at < last_ms:
        bucket = bucket_of(at, now_ms)
        end = min(last_ms, edges[bucket]) if bucket < len(edges) else last_ms
        found[bucket] = found.get(bucket, 0.0) + messages * (end - at) / (last_ms - first_ms)
        at = end
    return found
