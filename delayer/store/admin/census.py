"""The census: counts the waiting messages by route and due time, for metrics and the page, at a bounded cost.

It counts messages due within the hour by the index, if they are few. It samples the pages of a large store, scales the
sample to the counters' sum, and reads at most some hundred megabytes. With ten million rows the figures of large days
are right to about a percent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from asyncpg import Connection

from delayer.core import horizon
from delayer.core.units import HOUR_MS
from delayer.schedule.schedule import SCHEDULE
from delayer.store.admin.stats import counters, waiting_of
from delayer.store.segments import catalog

PAGES: Final = 20_000
"""Approximate maximum number of pages (8 KB) read by one census."""
NEAR: Final = 20_000
"""Maximum number of rows per lane, due within the hour, that are counted one by one."""
COMPACTED: Final = b"(compacted)"
"""Replaces the routes of messages in segments, which are not unpacked to be counted."""
SCHEDULES: Final = b"(schedules)"
"""Replaces the route of messages that a schedule made: they have none."""
_ROUTE: Final = (
    f"CASE WHEN route = '' AND position('{SCHEDULE.decode()}'::bytea IN properties) > 0"
    f" THEN '{SCHEDULES.decode()}'::bytea ELSE route END AS route"
)
_SIZE: Final = (
    "SELECT coalesce(sum(pg_relation_size(inhrelid)), 0)::bigint / 8192 FROM pg_inherits"
    " WHERE inhparent = 'message'::regclass"
)
MOST: Final = 200
"""Maximum number of destinations in a census: the largest of waiting rows, of the coming hour, and of held messages."""
# Counts the ``counted`` rows by route and bucket, and by destination with the first due instant. $1 bounds.
_GROUPED: Final = f"""
SELECT route, bucket, to_exchange, to_key, n, due, rows FROM (
    SELECT route, bucket, to_exchange, to_key, count(*) AS n, min(due_at) AS due, max(rows) AS rows,
           row_number() OVER (PARTITION BY grouping(to_key) ORDER BY count(*) DESC) AS rank
    FROM (
        SELECT *, width_bucket(due_at, $1::timestamptz[]) AS bucket FROM ({{}}) AS counted
    ) AS placed
    GROUP BY GROUPING SETS ((route, bucket), (to_exchange, to_key))
) AS grouped
WHERE to_key IS NULL OR rank <= {MOST}
"""
_SAMPLE: Final = _GROUPED.format(
    f"SELECT {_ROUTE}, to_exchange, to_key, due_at, 0 AS rows FROM message TABLESAMPLE SYSTEM ({{}})"
)
# $1 bounds, $2 end of the hour, $3 rows per lane. Starts just before the watermark, to skip dead rows.
NEAR_ROWS: Final = _GROUPED.format(f"""
SELECT near.*
FROM lane AS l
CROSS JOIN LATERAL (
    SELECT *, count(*) OVER () AS rows
    FROM (
        SELECT {_ROUTE}, to_exchange, to_key, due_at FROM message
        WHERE lane = l.number AND due_at >= l.watermark - interval '10 seconds' AND due_at < $2
        ORDER BY due_at
        LIMIT $3
    ) AS soonest
) AS near
""")
_HELD: Final = (
    f"SELECT route, to_exchange, to_key, count(*) FROM (SELECT {_ROUTE}, to_exchange, to_key FROM held LIMIT 100000)"
    f" AS first GROUP BY GROUPING SETS ((route), (to_exchange, to_key)) ORDER BY count(*) DESC LIMIT {5 * MOST}"
)

DestinationAddress = tuple[bytes, bytes]
"""An exchange and a routing key."""


class DestinationCount(NamedTuple):
    """Messages of one exchange and routing key. ``next_due_ms``: the first of those read. A sample may miss an earlier
    message."""

    waiting: float = 0.0
    next_due_ms: int | None = None
    held: int = 0

    def and_waiting(self, messages: float, due_ms: int | None) -> DestinationCount:
        """A copy with these messages added."""
        first_ms = min((one for one in (self.next_due_ms, due_ms) if one is not None), default=None)
        return self._replace(waiting=self.waiting + messages, next_due_ms=first_ms)


NONE_THERE: Final = DestinationCount()


@dataclass(frozen=True, slots=True)
class Census:
    """``counts`` by route and bucket (core/horizon.py), ``held`` by route, and the largest destinations. ``exact``:
    whether no count is estimated. Destinations do not include messages in segments."""

    taken_ms: int
    counts: Mapping[tuple[bytes, int], float]
    exact: bool
    held: Mapping[bytes, int] = field(default_factory=dict)
    destinations: Mapping[DestinationAddress, DestinationCount] = field(default_factory=dict)

    def by_route(self) -> dict[bytes, dict[int, float]]:
        """The counts by route, then by bucket."""
        found: dict[bytes, dict[int, float]] = {}
        for (route, bucket), count in self.counts.items():
            found.setdefault(route, {})[bucket] = count
        return found

    def together(self) -> dict[int, float]:
        """The counts of all routes by bucket."""
        found: dict[int, float] = {}
        for (_, bucket), count in self.counts.items():
            found[bucket] = found.get(bucket, 0.0) + count
        return found


async def take_census(connection: Connection, most_pages: int = PAGES) -> Census:
    """Count, on one snapshot, from a sample of at most ``most_pages`` pages (8 KB). Raises the driver's errors."""
    tally = _Tally()
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        now_ms = await connection.fetchval("SELECT now()")
        share = min(most_pages / max(await connection.fetchval(_SIZE), 1), 1.0)
        rows = await connection.fetch(_SAMPLE.format(share * 100), horizon.bounds(now_ms))
        if share == 1.0:
            tally.add(rows, 1.0)
        else:
            read = sum(row["n"] for row in rows if row["to_key"] is None)
            tally.add(rows, waiting_of(await counters(connection)) / max(read, 1))
            tally.add_near(await connection.fetch(NEAR_ROWS, horizon.bounds(now_ms), now_ms + HOUR_MS, NEAR))
        for one in await catalog.list_segments(connection):
            for bucket, count in horizon.spread(one.first_due_ms, one.last_due_ms, one.messages, now_ms).items():
                tally.counts[COMPACTED, bucket] += count
        groups = await connection.fetch(_HELD)
    held = {route: messages for route, _, key, messages in groups if key is None}
    for _, exchange, key, messages in groups:
        if key is not None:
            tally.destinations[exchange, key] = tally.of(exchange, key)._replace(held=messages)
    return Census(now_ms, tally.counts, share == 1.0, held, tally.destinations)


class _Tally:
    """Adds up the counts and the largest destinations of a census."""

    def __init__(self) -> None:
        self.counts: defaultdict[tuple[bytes, int], float] = defaultdict(float)
        self.destinations: dict[DestinationAddress, DestinationCount] = {}

    def of(self, exchange: bytes, key: bytes) -> DestinationCount:
        return self.destinations.get((exchange, key), NONE_THERE)

    def add(self, rows: Iterable[Mapping[str, Any]], weight: float) -> None:
        """Add rows of _GROUPED, each message read counting as ``weight`` messages."""
        for row in rows:
            messages, to = row["n"] * weight, (row["to_exchange"], row["to_key"])
            if row["to_key"] is None:
                self.counts[row["route"], row["bucket"]] += messages
            else:
                self.destinations[to] = self.of(*to).and_waiting(messages, row["due"])

    def add_near(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace the sample's figures of the coming hour by rows of NEAR_ROWS, if these are complete. In any case add
        messages that the sample missed to their destinations."""
        near = _Tally()
        near.add(rows, 1.0)
        if all(row["rows"] < NEAR for row in rows):
            later = horizon.OFFSETS.index(HOUR_MS) + 1
            self.counts = defaultdict(float, {at: n for at, n in self.counts.items() if at[1] >= later} | near.counts)
        for to, soon in near.destinations.items():
            one = self.of(*to)
            self.destinations[to] = one.and_waiting(max(soon.waiting - one.waiting, 0.0), soon.next_due_ms)
