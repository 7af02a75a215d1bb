"""How many messages wait, by route and by when they are due: for metrics and the page, at a bounded price.

What is due within the hour is counted row by row as long as it is little, by the index and from the watermarks on; the
partitions of later days are counted from a sample of their pages where they are large. What the counters say of the
whole (exactly) then corrects the sum of the samples. So with ten million rows the price is that of some hundred
megabytes read at most, and the figures of the days ahead are right to about a percent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import asyncpg

from delayer.core import horizon
from delayer.store import partitions
from delayer.store.status import KINDS, waiting

PAGES: Final = 20_000
"""Pages (8 KB) that one census reads at most, more or less, of all partitions together."""
FEWEST: Final = 50
MOST: Final = 2_000
"""Pages of one partition that are read at least, if it has them, and at most."""
NEAR: Final = 20_000
"""Rows due within the hour that are counted one by one, of each lane."""
SECONDS: Final = 10.0
COMPACTED: Final = b"(compacted)"
"""Stands for the routes of messages in segments: those are not unpacked for being counted."""
_SIZES: Final = (
    "SELECT c.relname, pg_relation_size(c.oid) / 8192 FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid"
    " WHERE i.inhparent = 'message'::regclass"
)
_SAMPLE: Final = (
    "SELECT route, width_bucket(due_at, $1::timestamptz[]), count(*) FROM {} TABLESAMPLE SYSTEM ({}) GROUP BY 1, 2"
)
# $1 bounds, $2 end of the hour, $3 rows of each lane. From a little before the watermark on: behind it are the dead.
NEAR_ROWS: Final = """
SELECT near.route, width_bucket(due_at, $1::timestamptz[]), count(*), max(rows)
FROM lane AS l
CROSS JOIN LATERAL (
    SELECT route, due_at, count(*) OVER () AS rows
    FROM (
        SELECT route, due_at FROM message
        WHERE lane = l.number AND due_at >= l.watermark - interval '10 seconds' AND due_at < $2
        ORDER BY due_at
        LIMIT $3
    ) AS soonest
) AS near
GROUP BY 1, 2
"""

Counts = dict[tuple[bytes, int], float]


@dataclass(frozen=True, slots=True)
class Census:
    """``counts`` by route and bucket (core/horizon.py). ``exact``: nothing was estimated."""

    taken_ms: int
    counts: Mapping[tuple[bytes, int], float]
    exact: bool

    def by_route(self) -> dict[bytes, dict[int, float]]:
        """The same, route by route."""
        found: dict[bytes, dict[int, float]] = {}
        for (route, bucket), count in self.counts.items():
            found.setdefault(route, {})[bucket] = count
        return found

    def together(self) -> dict[int, float]:
        """Of all routes."""
        found: dict[int, float] = {}
        for (_, bucket), count in self.counts.items():
            found[bucket] = found.get(bucket, 0.0) + count
        return found


async def take(connection: asyncpg.Connection) -> Census:
    """Count, on one snapshot. Raises the driver's errors."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        await connection.execute(f"SET LOCAL statement_timeout = '{SECONDS:.0f}s'")
        now_ms = await connection.fetchval("SELECT now()")
        sampled, certain = await _partitions(connection, horizon.bounds(now_ms))
        exact_total = await _total(connection)
        counts = corrected(sampled, certain, exact_total)
        near = await _near(connection, now_ms)
        if near is not None and sampled:
            counts = with_near(counts, near)
        for first_ms, last_ms, messages in await connection.fetch(
            "SELECT first_due, last_due, messages - cancelled FROM segment"
        ):
            for bucket, count in horizon.spread(first_ms, last_ms, messages, now_ms).items():
                counts[COMPACTED, bucket] = counts.get((COMPACTED, bucket), 0.0) + count
    return Census(now_ms, counts, exact=not sampled)


async def _partitions(connection: asyncpg.Connection, bounds: list[int]) -> tuple[Counts, Counts]:
    """What samples say, already for the whole of their partitions; and what was counted."""
    sizes = {name: pages for name, pages in await connection.fetch(_SIZES) if pages and _ours(name)}
    each = min(max(PAGES // max(len(sizes), 1), FEWEST), MOST)
    sampled: Counts = {}
    certain: Counts = {}
    for name, pages in sizes.items():
        share = min(each / pages, 1.0)
        into = certain if share == 1.0 else sampled
        for route, bucket, count in await connection.fetch(_SAMPLE.format(name, share * 100), bounds):
            into[route, bucket] = into.get((route, bucket), 0.0) + count / share
    return sampled, certain


def _ours(name: str) -> bool:
    return name == "message_default" or partitions.day_of(name) is not None


async def _total(connection: asyncpg.Connection) -> int:
    """Rows that wait, by the counters: see status.waiting."""
    kinds = dict(await connection.fetch("SELECT kind, sum(n)::bigint FROM counter GROUP BY kind"))
    return waiting(dict.fromkeys(KINDS, 0) | kinds)


async def _near(connection: asyncpg.Connection, now_ms: int) -> Counts | None:
    """What is due within the hour, row by row; None where it is too much for that."""
    rows = await connection.fetch(NEAR_ROWS, horizon.bounds(now_ms), now_ms + horizon.HOUR, NEAR)
    if any(of_lane >= NEAR for _, _, _, of_lane in rows):
        return None
    return {(route, bucket): float(count) for route, bucket, count, _ in rows}


def corrected(sampled: Counts, certain: Counts, total: int) -> Counts:
    """Samples are stretched so that everything adds up to ``total``, which is exact. Pure.

    >>> corrected({(b"a", 1): 90.0, (b"b", 2): 30.0}, {(b"a", 1): 4.0}, 64)
    {(b'a', 1): 49.0, (b'b', 2): 15.0}
    """
    estimated = sum(sampled.values())
    stretch = max(total - sum(certain.values()), 0.0) / estimated if estimated else 0.0
    found = {place: count * stretch for place, count in sampled.items()}
    for place, count in certain.items():
        found[place] = found.get(place, 0.0) + count
    return found


def with_near(counts: Counts, near: Counts) -> Counts:
    """The buckets of the coming hour from ``near``, the others as they are; a difference goes to nobody. Pure."""
    last = horizon.OFFSETS.index(horizon.HOUR)
    return {place: count for place, count in counts.items() if place[1] > last} | near
