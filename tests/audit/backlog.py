"""A backlog for compaction, everything that a store has by id, wherever it stands, and the two laws of its counters."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg

from delayer.core.message import Parcel
from delayer.store.admin.stats import overview
from delayer.store.postgres import PostgresStore
from delayer.store.rows.partitions import DAY_MS
from delayer.store.segments import codec
from tests.support.store import owned, parcel, sql

FIRST_DAY = 10
"""From now; compaction takes what is due later than in 7 days."""
ROW = "id, due_at, parked_at, checksum, format, route, exchange, routing_key, to_exchange, to_key, properties, body"


def letters(seed: int, count: int, now_ms: int, days: float = 6.0) -> list[Parcel]:
    """``count`` messages of some hundred bytes, due over ``days`` days from FIRST_DAY on, in any order."""
    chance = random.Random(seed)
    return [
        parcel(
            now_ms + int((FIRST_DAY + days * chance.random()) * DAY_MS),
            b'{"order": %d, "total": %d, "text": "%s"}' % (number, chance.randrange(10**6), b"reminder " * 20),
            properties=b"\x10\x00\x02",
        )
        for number in range(count)
    ]


async def fill(store: PostgresStore, count: int, lanes: int = 2, batch: int = 500, **more: Any) -> None:
    """Park ``count`` letters into ``lanes`` lanes, as daemons do."""
    async with owned(store, lanes) as taken:
        waiting = letters(7, count, store.now_upper_ms(), **more)
        for turn, start in enumerate(range(0, count, batch)):
            await store.park(taken[turn % lanes], waiting[start : start + batch], [])


async def everything(database: str) -> dict[int, tuple[Any, ...]]:
    """Every message of the store by its id: what it is, without its place. Fails if one is there twice.

    Instants are epoch microseconds.
    """
    connection = await asyncpg.connect(database)
    found: dict[int, tuple[Any, ...]] = {}
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            rows = [tuple(row) for row in await connection.fetch(f"SELECT {ROW} FROM message")]
            rows += [tuple(row) for row in await connection.fetch(f"SELECT {ROW} FROM held")]
            for segment in await connection.fetch("SELECT * FROM segment"):
                rows += await _unpacked(connection, segment)
    finally:
        await connection.close()
    for id, due_at, parked_at, *rest in rows:
        assert id not in found, f"message {id} is there twice"
        found[id] = (round(due_at.timestamp() * 1e6), round(parked_at.timestamp() * 1e6), *rest)
    return found


async def _unpacked(connection: asyncpg.Connection, segment: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    table = codec.unpack(segment["packed"], segment["format"], segment["messages"], segment["digest"])
    return [tuple(row.values()) for row in table.to_pylist()]


async def lawful(database: str) -> dict[str, int]:
    """The counters, after comparing them with rows and segments: conservation lane by lane, and the segments' law."""
    seen = await overview(database)
    async with sql(database) as connection:
        for lane in seen.lanes:
            waiting = await connection.fetchval("SELECT count(*) FROM message WHERE lane = $1", lane.number)
            held = await connection.fetchval("SELECT count(*) FROM held WHERE lane = $1", lane.number)
            assert (lane.waiting, lane.held) == (waiting, held), f"lane {lane.number}: {lane.counters}"
        packed = await connection.fetchval("SELECT coalesce(sum(messages), 0)::bigint FROM segment")
        assert seen.counters["compacted"] - seen.counters["restored"] == packed, seen.counters
    return seen.counters


async def segments_of(database: str) -> Sequence[Mapping[str, Any]]:
    async with sql(database) as connection:
        found: Sequence[Mapping[str, Any]] = await connection.fetch(
            "SELECT id, lane, first_due, last_due, messages, broken FROM segment ORDER BY first_due, id"
        )
        return found
