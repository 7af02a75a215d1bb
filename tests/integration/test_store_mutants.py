"""Single words and lines that the store's promises depend on: without any of them, one of these tests fails.

Each was a mutant that survived all other tests (make mutants).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from delayer.core.message import WINDOW_MS
from delayer.core.units import DAY_MS
from delayer.store import postgres
from delayer.store.clock import StoreClock
from delayer.store.lanes.locks import LaneLocks
from delayer.store.postgres import Placement
from delayer.store.rows import keys, partitions
from tests.support.rows import put, row
from tests.support.store import blocked, opened, parcel, release_all, sql


@asynccontextmanager
async def open_transaction(url: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection whose transaction is committed at the end."""
    async with sql(url) as connection, connection.transaction():
        yield connection


async def test_a_row_that_comes_in_while_its_partition_is_dropped_stays(database: str) -> None:
    """The row arrives between the first check and the lock, so only the second check preserves it."""
    async with sql(database) as admin, sql(database) as dropper:
        day = await admin.fetchval("SELECT now()") // DAY_MS + 3
        assert await partitions.make(admin, day, day - 3) is partitions.PartitionResult.DONE
        async with open_transaction(database) as slow:
            await put(slow, [row(1, day * DAY_MS)])
            dropping_it = asyncio.create_task(partitions.drop_empty(dropper, partitions.name_of(day), lock_ms=10_000))
            await blocked(admin, "%")
        assert not await dropping_it
        assert await admin.fetchval("SELECT count(*) FROM message") == 1


async def test_a_park_locks_the_epoch_until_its_commit(database: str) -> None:
    """The next owner begins at the watermark that it reads then: it must see a park of the last owner."""
    async with sql(database) as admin, sql(database) as taker:
        await put(admin, [row(1, 4_000_000_000_000)])
        await taker.execute("SET lock_timeout = '200ms'")
        take = "UPDATE lane SET epoch = epoch + 1 WHERE number = 1"
        async with open_transaction(database) as parker:
            await postgres.park_plain(parker, Placement(1, {}, 0), [parcel(4_000_000_000_000)])
            with pytest.raises(asyncpg.LockNotAvailableError):
                await taker.execute(take)
        await taker.execute(take)


async def test_a_released_message_does_not_take_the_key_of_a_newer_one(database: str) -> None:
    async with sql(database) as admin:
        await put(admin, [row(2, 4_000_000_000_000, key=b"k")])
        await keys.forget(admin, [(b"k", 1)])
        assert await admin.fetchval("SELECT count(*) FROM message_key") == 1
        await keys.forget(admin, [(b"k", 2)])
        assert await admin.fetchval("SELECT count(*) FROM message_key") == 0


class RoughClock(StoreClock):
    """An estimate of the store's time that is accurate to two seconds."""

    def observe(self, before: float, server_ms: float, after: float) -> None:
        super().observe(before - 2.0, server_ms, after)


async def test_the_next_owner_begins_no_later_than_the_stores_clock(database: str) -> None:
    """A cursor at the later bound of the store's time would hide rows due until then."""
    locks = LaneLocks(lambda: database, None, RoughClock(), owner="test", idle=4.0, releasing=10.0)
    async with opened(database) as store, sql(database) as admin:
        lane = await locks.take(1)
        assert lane is not None
        await store.park(lane, [parcel(round(time.time() * 1000) + WINDOW_MS - 5)], [])
        assert len(await release_all(lane)) == 1
        await lane.close()
        watermark, now = await admin.fetchrow("SELECT watermark, now() FROM lane WHERE number = 1")
        assert now - 60_000 < watermark <= now
