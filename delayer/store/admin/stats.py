"""The overview of the store: its lanes and counters, exact and cheap, from the counters and the ends of the indexes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from asyncpg import Connection, QueryCanceledError

from delayer.core.heartbeat import STUCK_SECONDS
from delayer.core.units import DAY_MS, HOUR_MS
from delayer.store import foreign_locks, pool, schema, statements
from delayer.store.foreign_locks import ForeignLocks
from delayer.store.lanes.notify import INBOX_READER
from delayer.store.segments import catalog
from delayer.store.segments.catalog import OverdueSegments, SegmentTotals
from delayer.store.session import connect_for

LANE_KINDS = ("parked", "restored", "released", "cancelled", "compacted", "held")
RESTORED_MS = HOUR_MS
"""Minimum time from a segment's restore to its first due instant. Daemons begin a day before, and take seconds for a
million messages."""
_OVERVIEW: Final = f"""
SELECT l.number, l.owner, l.route,
       {statements.IS_OWNED} AS alive,
       array(SELECT c.kind FROM counter AS c WHERE c.lane = l.number ORDER BY c.kind) AS kinds,
       array(SELECT c.n FROM counter AS c WHERE c.lane = l.number ORDER BY c.kind) AS numbers,
       (SELECT max(c.at) FROM counter AS c WHERE c.lane = l.number AND c.kind IN ('released', 'held')) AS advanced_at,
       (SELECT min(h.retry_at) FROM held AS h WHERE h.lane = l.number) AS next_retry
FROM lane AS l
ORDER BY l.number
"""
"""Every lane with its owner, whether the owner is alive, its counters and the next retry of its held rows. Reads a few
rows, and no messages."""


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
    """How long its first message has been due and in the store; 0 unless that is more than STUCK_SECONDS."""
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


class InboxCount(NamedTuple):
    """The SQL inbox. ``messages``: at most INBOX_MOST. ``age_ms``: since the oldest of its first messages was sent, but
    its transaction may have committed just now. ``read``: whether a daemon reads."""

    messages: int = 0
    age_ms: int = 0
    read: bool = True

    @property
    def unread_ms(self) -> int:
        """How long its messages wait for a daemon that reads; 0 unless that is too long (STUCK_SECONDS)."""
        return self.age_ms if not self.read and self.age_ms > STUCK_SECONDS * 1000 else 0


INBOX_MOST: Final = 100_000
INBOX_SECONDS: Final = 2
"""How long to count. A count passes all dead rows, which an old transaction of any program may keep in the table."""
# A daemon that is alive asks something every second. Postgres hides the time from other roles.
_INBOX: Final = f"""
SELECT (SELECT count(*) FROM (SELECT FROM delayer_inbox LIMIT {INBOX_MOST}) AS counted),
       coalesce((SELECT extract(epoch FROM clock_timestamp() - min(sent_at)) * 1000
                 FROM (SELECT sent_at FROM delayer_inbox ORDER BY id LIMIT 100) AS first), 0)::bigint,
       EXISTS (SELECT FROM pg_locks AS k JOIN pg_stat_activity AS a USING (pid)
               WHERE {statements.OURS} AND k.classid = 'delayer_inbox'::regclass AND k.objid = 0 AND k.granted
                     AND {statements.TRUSTED} AND a.application_name = '{INBOX_READER}'
                     AND a.query_start > clock_timestamp() - interval '{STUCK_SECONDS} s' IS NOT FALSE)
"""


@dataclass(frozen=True, slots=True)
class StoreOverview:
    """The whole store. Without our schema (``schema_found`` is None or another) ``lanes`` is empty."""

    schema_found: str | None
    schema_expected: str
    store_now_ms: int
    lanes: Sequence[LaneOverview]
    segments: SegmentTotals
    late: OverdueSegments
    inbox: InboxCount | None = field(default_factory=InboxCount)
    """None if it takes too long to count."""
    foreign: Sequence[ForeignLocks] = ()

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
    async with connect_for(url, "delayer status", "status") as connection:
        # One snapshot, so that the figures agree while daemons work.
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            found, now_ms = await schema.current_of(connection), await connection.fetchval("SELECT clock_timestamp()")
            if found != schema.HEAD:
                return StoreOverview(found, schema.HEAD, now_ms, (), SegmentTotals(), OverdueSegments())
            late = await catalog.count_late(connection, now_ms + restored_ms(restore_ahead_ms))
            packed = await catalog.count(connection)
            lanes = await _lanes(connection, now_ms)
        inbox, foreign = await count_inbox(connection), await foreign_locks.find(connection)
        return StoreOverview(found, schema.HEAD, now_ms, lanes, packed, late, inbox, foreign)


async def count_inbox(connection: Connection) -> InboxCount | None:
    """Count the SQL inbox; None if that takes too long. Raises the driver's other errors."""
    try:
        async with connection.transaction(readonly=True):
            await connection.execute(f"SET LOCAL statement_timeout = '{INBOX_SECONDS}s'")
            return InboxCount(*await connection.fetchrow(_INBOX))
    except QueryCanceledError:
        return None


async def _lanes(connection: Connection, now_ms: int) -> list[LaneOverview]:
    rows = await connection.fetch(_OVERVIEW)
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
            next_retry_ms=row["next_retry"],
            route=row["route"],
            behind_ms=_too_long(now_ms, firsts.get(row["number"])),
            stuck_ms=_too_long(now_ms, firsts.get(row["number"]), row["advanced_at"] or 0),
        )
        for row in rows
    ]


def _too_long(now_ms: int, first: FirstRow | None, advanced_ms: int = 0) -> int:
    """Return the milliseconds since the latest of these, if more than STUCK_SECONDS; else 0."""
    waited_ms = 0 if first is None else now_ms - max(*first, advanced_ms)
    return waited_ms if waited_ms > STUCK_SECONDS * 1000 else 0


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


async def counters(connection: Connection) -> dict[str, int]:
    """The sums of all lanes' counters, with every kind. Raises the driver's errors."""
    kinds = dict(await connection.fetch("SELECT kind, sum(n)::bigint FROM counter GROUP BY kind"))
    return dict.fromkeys(LANE_KINDS, 0) | kinds
