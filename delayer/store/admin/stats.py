"""Statistics of the store: its lanes and counters, and a census by route and due time.

- overview: exact and cheap, from the counters and the ends of the indexes.
- take_census: for metrics and the page, at a bounded cost. Counts messages due within the hour by the index, if they
  are few. Samples the pages of a large store, scaled to the counters' sum, and reads at most some hundred megabytes.
  With ten million rows the figures of large days are right to about a percent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from asyncpg import Connection

from delayer.core import horizon
from delayer.core.units import DAY_MS, HOUR_MS
from delayer.store import pool, schema, statements
from delayer.store.segments import catalog
from delayer.store.segments.catalog import OverdueSegments, SegmentTotals
from delayer.store.session import connect_for

LANE_KINDS = ("parked", "restored", "released", "cancelled", "compacted", "held")
RESTORED_MS = HOUR_MS
"""Minimum time from a segment's restore to its first due instant. Daemons begin a day before, and take seconds for a
million messages."""
STUCK_MS: Final = 30_000
"""A lane may have due messages for this long without settling a claim. A claim takes at most ten seconds."""


class FirstRow(NamedTuple):
    """The soonest waiting row of a lane, in epoch milliseconds."""

    due_ms: int
    parked_ms: int


@dataclass(frozen=True, slots=True)
class LaneOverview:
    """One lane. ``next_due_ms`` (epoch ms): None if nothing waits; may be in the past."""

    number: int
    owner: str
    alive: bool
    counters: Mapping[str, int]
    next_due_ms: int | None
    next_retry_ms: int | None
    route: bytes | None = None
    """The limited route of this lane."""
    behind_ms: int = 0
    """How long its first message has been due and in the store; 0 unless that is too long (STUCK_MS)."""
    stuck_ms: int = 0
    """Like ``behind_ms``, but measured from the lane's last settled claim if that was later."""

    @property
    def held(self) -> int:
        return self.counters["held"]

    @property
    def waiting(self) -> int:
        return waiting_of(self.counters)

    def overdue_ms(self, now_ms: int) -> int:
        """How long its first message has been due; 0 if none is."""
        return 0 if self.next_due_ms is None else max(now_ms - self.next_due_ms, 0)


@dataclass(frozen=True, slots=True)
class StoreOverview:
    """The whole store. Without our schema (``schema_found`` is None or another) ``lanes`` is empty."""

    schema_found: str | None
    schema_expected: str
    store_now_ms: int
    lanes: Sequence[LaneOverview]
    segments: SegmentTotals
    late: OverdueSegments

    @property
    def upgrade_pending(self) -> bool:
        return self.schema_found != self.schema_expected

    @property
    def counters(self) -> dict[str, int]:
        """The sums over all lanes, with every kind."""
        return {kind: sum(lane.counters[kind] for lane in self.lanes) for kind in LANE_KINDS}

    @property
    def waiting(self) -> int:
        return sum(lane.waiting for lane in self.lanes)

    @property
    def held(self) -> int:
        return sum(lane.held for lane in self.lanes)

    @property
    def next_due_ms(self) -> int | None:
        return min((lane.next_due_ms for lane in self.lanes if lane.next_due_ms is not None), default=None)


def waiting_of(counters: Mapping[str, int]) -> int:
    """The rows of ``message`` in a lane: parked + restored = released + cancelled + compacted + held + waiting."""
    out = sum(counters[kind] for kind in ("released", "cancelled", "compacted", "held"))
    return counters["parked"] + counters["restored"] - out


def restored_ms(restore_ahead_ms: int) -> int:
    """RESTORED_MS, or less if daemons begin so late that segments may rightly be there."""
    return min(RESTORED_MS, restore_ahead_ms // 2)


async def overview(url: str, restore_ahead_ms: int = DAY_MS) -> StoreOverview:
    """Query the store at ``url``. An outdated schema is part of the answer. Raises StoreLost, BadStoreUrl."""
    async with (
        connect_for(url, "delayer status", "status") as connection,
        # One snapshot, so that the figures agree while daemons work.
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        found, now_ms = await schema.current_of(connection), await connection.fetchval("SELECT clock_timestamp()")
        if found != schema.HEAD:
            return StoreOverview(found, schema.HEAD, now_ms, (), SegmentTotals(), OverdueSegments())
        late = await catalog.count_late(connection, now_ms + restored_ms(restore_ahead_ms))
        packed = await catalog.count(connection)
        return StoreOverview(found, schema.HEAD, now_ms, await _lanes(connection, now_ms), packed, late)


async def _lanes(connection: Connection, now_ms: int) -> list[LaneOverview]:
    rows = await connection.fetch(statements.read("overview"))
    counters = {
        row["number"]: dict.fromkeys(LANE_KINDS, 0) | dict(zip(row["kinds"], row["numbers"], strict=True))
        for row in rows
    }
    firsts = await _first_rows(connection, [number for number, of in counters.items() if waiting_of(of)], now_ms)
    return [
        LaneOverview(
            number=row["number"],
            owner=row["owner"],
            alive=row["alive"],
            counters=counters[row["number"]],
            next_due_ms=firsts[row["number"]].due_ms if row["number"] in firsts else None,
            next_retry_ms=await connection.fetchval(statements.NEXT_RETRY, row["number"]),
            route=row["route"],
            behind_ms=_too_long(now_ms, firsts.get(row["number"])),
            stuck_ms=_too_long(now_ms, firsts.get(row["number"]), row["advanced_at"] or 0),
        )
        for row in rows
    ]


def _too_long(now_ms: int, first: FirstRow | None, advanced_ms: int = 0) -> int:
    """How long ago all of these were, in milliseconds, if more than STUCK_MS; else 0."""
    waited_ms = 0 if first is None else now_ms - max(*first, advanced_ms)
    return waited_ms if waited_ms > STUCK_MS else 0


_FIRST: Final = """
SELECT number, due_at, parked_at
FROM unnest($1::smallint[]) AS number
CROSS JOIN LATERAL (
    SELECT due_at, parked_at FROM message
    WHERE lane = number AND due_at >= $2 AND due_at < $3 ORDER BY due_at LIMIT 1
) AS first
"""


async def _first_rows(connection: Connection, lanes: Sequence[int], now_ms: int) -> dict[int, FirstRow]:
    """The soonest row of each lane. Looks one day ahead, then two, then four, to open few of hundreds of partitions."""
    found: dict[int, FirstRow] = {}
    low_ms, days = pool.BEGINNING_MS, 1
    while (left := [number for number in lanes if number not in found]) and low_ms < catalog.FOREVER_MS:
        high_ms = now_ms + days * DAY_MS if days < 1000 else catalog.FOREVER_MS
        rows = await connection.fetch(_FIRST, left, low_ms, high_ms)
        found |= {number: FirstRow(due_ms, parked_ms) for number, due_ms, parked_ms in rows}
        low_ms, days = high_ms, 2 * days
    return found


PAGES: Final = 20_000
"""Approximate maximum number of pages (8 KB) read by one census."""
NEAR: Final = 20_000
"""Maximum number of rows per lane, due within the hour, that are counted one by one."""
COMPACTED: Final = b"(compacted)"
"""Replaces the routes of messages in segments, which are not unpacked to be counted."""
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
    "SELECT route, to_exchange, to_key, due_at, 0 AS rows FROM message TABLESAMPLE SYSTEM ({})"
)
# $1 bounds, $2 end of the hour, $3 rows per lane. Starts just before the watermark, to skip dead rows.
NEAR_ROWS: Final = _GROUPED.format("""
SELECT near.*
FROM lane AS l
CROSS JOIN LATERAL (
    SELECT *, count(*) OVER () AS rows
    FROM (
        SELECT route, to_exchange, to_key, due_at FROM message
        WHERE lane = l.number AND due_at >= l.watermark - interval '10 seconds' AND due_at < $2
        ORDER BY due_at
        LIMIT $3
    ) AS soonest
) AS near
""")
_HELD: Final = (
    "SELECT route, to_exchange, to_key, count(*) FROM (SELECT route, to_exchange, to_key FROM held LIMIT 100000)"
    f" AS first GROUP BY GROUPING SETS ((route), (to_exchange, to_key)) ORDER BY count(*) DESC LIMIT {5 * MOST}"
)

DestinationAddress = tuple[bytes, bytes]
"""An exchange and a routing key."""


class DestinationCount(NamedTuple):
    """Messages of one exchange and routing key. ``next_due_ms``: the first of those read. A sample may miss an earlier
    one."""

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


async def counters(connection: Connection) -> dict[str, int]:
    """The sums of all lanes' counters, with every kind. Raises the driver's errors."""
    kinds = dict(await connection.fetch("SELECT kind, sum(n)::bigint FROM counter GROUP BY kind"))
    return dict.fromkeys(LANE_KINDS, 0) | kinds
