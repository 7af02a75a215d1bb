"""A job notices traffic in the store; its executors take turns while there is traffic, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from delayer.audit.tasks import turn
from delayer.release.ports import Lane
from delayer.store.admin import traffic
from delayer.store.admin.traffic import Traffic
from tests.support.store import Store, opened, owned, parcel, sql

PIECES = 5


@asynccontextmanager
async def daemon(database: str) -> AsyncIterator[tuple[Store, Lane]]:
    """A store with an owned lane; the test uses it like a daemon."""
    async with opened(database) as store, owned(store) as [lane]:
        yield store, lane


async def test_an_idle_store_has_no_traffic(database: str) -> None:
    async with opened(database), sql(database) as admin:
        assert Traffic().busy
        assert not await Traffic().look(admin)


async def test_a_daemon_with_nothing_to_do_is_no_traffic(database: str) -> None:
    async with daemon(database) as (store, lane), sql(database) as admin:
        times = iter([0.0, 2.0, 2.5, 3.0, 6.0])
        seen = Traffic(times.__next__)
        assert await seen.look(admin), "the first look knows no rate"
        assert not await seen.look(admin)
        await store.park(lane, [parcel(store.now_upper_ms() + 60_000) for _ in range(100)], [])
        assert not await seen.look(admin), "looked at once a second"
        assert await seen.look(admin)
        assert not await seen.look(admin)


async def test_a_work_lock_ends_with_its_session(database: str) -> None:
    async with opened(database), sql(database) as other:
        async with sql(database) as admin:
            assert await traffic.take_turn(admin)
            assert not await traffic.take_turn(other)
            await traffic.end_turn(admin)
            assert await traffic.take_turn(other)
            await traffic.end_turn(other)
            assert await traffic.take_turn(admin)
        assert await traffic.take_turn(other)


class Working:
    """Executors, and the largest number at work at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def executor(self, connection: asyncpg.Connection, meet: int) -> None:
        """Do some pieces of work; in the first, wait until ``meet`` executors have arrived."""
        seen = Traffic()
        for piece in range(PIECES):
            async with turn(connection, seen):
                self.now += 1
                self.most = max(self.most, self.now)
                async with asyncio.timeout(60):
                    while not piece and self.most < meet:  # noqa: ASYNC110 - as many as there are sessions
                        await asyncio.sleep(0.001)
                for _ in range(5):
                    await connection.fetchval("SELECT 1")
                self.now -= 1


async def test_one_executor_at_a_time_works_under_load(database: str) -> None:
    working = Working()
    over = asyncio.Event()

    async def passing(store: Store, lane: Lane) -> None:
        while not over.is_set():
            await store.park(lane, [parcel(store.now_upper_ms() + 60_000)] * 100, [])

    async with (
        daemon(database) as (store, lane),
        sql(database) as one,
        sql(database) as two,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(passing(store, lane))
        await asyncio.gather(*(working.executor(connection, 1) for connection in (one, two)))
        over.set()
    assert working.most == 1


async def test_without_traffic_all_executors_work(database: str) -> None:
    working = Working()
    async with opened(database), sql(database) as one, sql(database) as two:
        await asyncio.gather(*(working.executor(connection, 2) for connection in (one, two)))
    assert working.most == 2


async def test_work_that_fails_releases_its_lock(database: str) -> None:
    async with daemon(database), sql(database) as one, sql(database) as two:
        with pytest.raises(asyncpg.DivisionByZeroError):
            async with turn(one, Traffic()), one.transaction():
                await one.fetchval("SELECT 1 / 0")
        assert await traffic.take_turn(two)
