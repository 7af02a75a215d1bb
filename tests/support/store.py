"""Stores as daemons open them, their lanes, and the messages that tests park there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import asyncpg

from delayer.core.message import Due, Parcel, Target
from delayer.core.operations import Cancel, fold
from delayer.release.ports import Lane
from delayer.store import pool, schema, upgrades
from delayer.store.admin import setup
from delayer.store.lanes.lane import PostgresLane
from delayer.store.postgres import PostgresStore


class Store(PostgresStore):
    """A store whose tests choose the lane of each park."""

    async def park(self, lane: PostgresLane, parcels: Sequence[Parcel], cancels: Sequence[bytes]) -> frozenset[bytes]:
        """Cancel, and park afterwards. Returns the keys of the cancels that met a message."""
        applied = await self.apply(lane, fold([*map(Cancel, cancels), *parcels]), lane.number, None)
        return frozenset(cancels[at] for at in applied.cancelled)


MANY = 1_000_000
ROOM = 1 << 30


def parcel(due_ms: int, body: bytes = b"body", **more: Any) -> Parcel:
    """An ordinary message."""
    values: dict[str, Any] = {
        "route": b"delayer.in",
        "exchange": b"delayer.in",
        "routing_key": b"orders.eu",
        "target": Target(b"delayer.out", b"orders.eu"),
        "properties": b"\x10\x00\x02",
    }
    return Parcel(due_ms=due_ms, body=body, **(values | more))


async def free_lanes(store: PostgresStore, count: int = MANY) -> list[PostgresLane]:
    """Take up to ``count`` free lanes without a route."""
    taken: list[PostgresLane] = []
    for seen in (await store.locks.look()).lanes:
        if seen.route is None and not seen.owned and len(taken) < count:
            lane = await store.locks.take(seen.number)
            if lane is not None:
                taken.append(lane)
    return taken


async def taken(store: PostgresStore, number: int) -> PostgresLane:
    """Take this lane as soon as it is free."""
    while (lane := await store.locks.take(number)) is None:
        pass
    return lane


@asynccontextmanager
async def owned(store: PostgresStore, count: int = 1) -> AsyncIterator[list[PostgresLane]]:
    """Lanes of ``store``, released in the end."""
    async with AsyncExitStack() as stack:
        lanes = await free_lanes(store, count)
        for lane in lanes:
            stack.push_async_callback(lane.close)
        yield lanes


async def claim_when_due(lane: Lane, limit: int = MANY, max_bytes: int = ROOM) -> list[Due]:
    """Sleep as a release loop does, until a claim returns rows."""
    while True:
        await lane.wait(lane.sleep_hint())
        rows = await lane.claimers[0].claim(limit, max_bytes)
        if rows:
            return rows


async def release_all(lane: Lane) -> list[Due]:
    """Release every due row."""
    released: list[Due] = []
    while rows := await lane.claimers[0].claim(MANY, ROOM):
        await lane.claimers[0].settle(rows, [])
        released += rows
    return released


async def release_from(store: PostgresStore, number: int) -> list[Due]:
    """Take this lane as soon as it is free, release every due row, and drop the lane."""
    lane = await taken(store, number)
    released = await release_all(lane)
    await lane.close()
    return released


def bodies(rows: Sequence[Due]) -> list[bytes]:
    return [due.parcel.body for due in rows]


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[Store]:
    if await setup.schema_of(url) != schema.HEAD:
        await upgrades.upgrade(url)
    store = await Store.connect(lambda: url, **options)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def sql(url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await pool.connect(url, "test")
    try:
        yield connection
    finally:
        await pool.close(connection)


async def cut(url: str, application: str) -> None:
    """Terminate the server processes of ``application`` and wait until they are gone."""
    async with sql(url) as admin:
        of = "FROM pg_stat_activity WHERE application_name = $1"
        assert await admin.fetchval(f"SELECT bool_and(pg_terminate_backend(pid, 5000)) {of}", application)


async def blocked(admin: asyncpg.Connection, query: str) -> None:
    """Wait until a session waits for a lock in such a statement. ``admin`` is in no transaction."""
    waits = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE $1"
        " AND datname = current_database()"
    )
    async with asyncio.timeout(60):
        while not await admin.fetchval(waits, query):
            pass
