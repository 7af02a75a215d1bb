"""How the store stands, for `delayer status`: exact and cheap, from the counters and the ends of the indexes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import asyncpg

from delayer.store import days, owners, schema, segments, session, statements
from delayer.store.days import DAY_MS
from delayer.store.errors import translated

KINDS = ("parked", "restored", "released", "cancelled", "compacted", "held")
RESTORED_MS = 3_600_000
"""How long before its first message is due a segment should have been restored: daemons begin a day before, and take
seconds for a million messages."""
NO_SEGMENTS = segments.Counted(segments=0, messages=0, broken=0, broken_messages=0, next_due_ms=None)


# Few, by the index; those that do not read back are counted as such.
_LATE = """
SELECT count(*), coalesce(sum(messages - cancelled), 0)::bigint, min(first_due)
FROM segment WHERE first_due < $1 AND broken_at IS NULL AND messages > cancelled
"""


class Late(NamedTuple):
    """Segments that should have been restored by now, and their live messages."""

    segments: int
    messages: int
    first_due_ms: int | None


NOT_LATE = Late(0, 0, None)


@dataclass(frozen=True, slots=True)
class LaneOverview:
    """One lane. ``next_due_ms`` (epoch ms) is None when nothing waits; it may be in the past."""

    number: int
    owner: str
    alive: bool
    counters: Mapping[str, int]
    next_due_ms: int | None
    next_retry_ms: int | None
    broker: str = ""
    """The mark of the broker that its living owner publishes to (owners.py); "" where it does not say."""

    @property
    def held(self) -> int:
        return self.counters["held"]

    @property
    def waiting(self) -> int:
        return waiting(self.counters)

    def overdue_ms(self, now_ms: int) -> int:
        """How long its first message is due; 0 if none is."""
        return 0 if self.next_due_ms is None else max(now_ms - self.next_due_ms, 0)


@dataclass(frozen=True, slots=True)
class StoreOverview:
    """The whole store. Without a schema of ours (``schema_found`` is None or another) there are no lanes in it."""

    schema_found: str | None
    schema_expected: str
    store_now_ms: int
    lanes: Sequence[LaneOverview]
    segments: segments.Counted
    late: Late

    @property
    def upgrade_pending(self) -> bool:
        return self.schema_found != self.schema_expected

    @property
    def counters(self) -> dict[str, int]:
        """Of all lanes together, every kind present."""
        return {kind: sum(lane.counters[kind] for lane in self.lanes) for kind in KINDS}

    @property
    def waiting(self) -> int:
        return sum(lane.waiting for lane in self.lanes)

    @property
    def held(self) -> int:
        return sum(lane.held for lane in self.lanes)

    @property
    def next_due_ms(self) -> int | None:
        return min((lane.next_due_ms for lane in self.lanes if lane.next_due_ms is not None), default=None)


def waiting(counters: Mapping[str, int]) -> int:
    """How many rows of ``message`` a lane has, by the law of conservation:
    parked + restored = released + cancelled + compacted + held + waiting."""
    out = sum(counters[kind] for kind in ("released", "cancelled", "compacted", "held"))
    return counters["parked"] + counters["restored"] - out


def restored_ms(restore_ahead_ms: int) -> int:
    """RESTORED_MS, or less where daemons begin so late that segments may be there as late by right."""
    return min(RESTORED_MS, restore_ahead_ms // 2)


async def overview(url: str, restore_ahead_ms: int = DAY_MS) -> StoreOverview:
    """Look at the store behind ``url``. Raises StoreLost, BadStoreUrl; an outdated schema is part of the answer."""
    connection = await session.connect(url, "delayer status")
    try:
        with translated("status"):
            # One snapshot, so that the figures fit each other while daemons work.
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                return await _overview(connection, restored_ms(restore_ahead_ms))
    finally:
        await session.close(connection)


async def _overview(connection: asyncpg.Connection, restored_ms: int) -> StoreOverview:
    found, expected = await schema.current_of(connection), schema.HEAD
    now_ms = await connection.fetchval("SELECT clock_timestamp()")
    if found != expected:
        return StoreOverview(found, expected, now_ms, (), NO_SEGMENTS, NOT_LATE)
    rows = await connection.fetch(statements.OVERVIEW)
    counters = {
        row["number"]: dict.fromkeys(KINDS, 0) | dict(zip(row["kinds"], row["numbers"], strict=True)) for row in rows
    }
    brokers = await owners.brokers(connection)
    dues = await _next_dues(connection, [number for number, of in counters.items() if waiting(of)])
    lanes = [
        LaneOverview(
            number=row["number"],
            owner=row["owner"],
            alive=row["alive"],
            counters=counters[row["number"]],
            next_due_ms=dues.get(row["number"]),
            next_retry_ms=await connection.fetchval(statements.NEXT_RETRY, row["number"]),
            broker=brokers.get(row["number"], ""),
        )
        for row in rows
    ]
    late = Late(*await connection.fetchrow(_LATE, now_ms + restored_ms))
    return StoreOverview(found, expected, now_ms, lanes, await segments.count(connection), late)


async def _next_dues(connection: asyncpg.Connection, lanes: Sequence[int]) -> dict[int, int]:
    """The soonest due instant of each lane. Partitions are probed one by one, in the order of their days, and only
    until every lane has its answer: one statement over all of them would open hundreds to read one entry."""
    # The default one may have rows of any time, so it is always probed.
    found = await _probe(connection, "message_default", lanes)
    for day in sorted(await days.existing(connection)):
        later = [number for number in lanes if number not in found or found[number] >= day * DAY_MS]
        if not later:
            break
        for number, due_ms in (await _probe(connection, days.name_of(day), later)).items():
            found[number] = min(due_ms, found.get(number, due_ms))
    return found


async def _probe(connection: asyncpg.Connection, partition: str, lanes: Sequence[int]) -> dict[int, int]:
    rows = await connection.fetch(
        f"SELECT number, (SELECT due_at FROM {partition} WHERE lane = number ORDER BY due_at LIMIT 1)"
        " FROM unnest($1::smallint[]) AS number",
        lanes,
    )
    return {number: due_ms for number, due_ms in rows if due_ms is not None}
