"""What a job sees of the traffic in the store, and that executors take turns beside it, and only beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from delayer.audit.tasks import Turns
from delayer.core.giving_way import Pace
from delayer.services.ports import Lane
from delayer.store import traffic
from delayer.store.postgres import PostgresStore
from tests.conformance.store_contract import owned, parcel, release_all
from tests.integration.test_store_lane import opened, sql

PIECES = 5


@asynccontextmanager
async def daemon(database: str) -> AsyncIterator[tuple[PostgresStore, Lane]]:
    """Who owns a lane, and does with it what the test says."""
    async with opened(database) as store, owned(store) as [lane]:
        yield store, lane


async def test_nobody_is_at_work(database: str) -> None:
    async with opened(database), sql(database) as admin:
        seen = await traffic.look(admin)
        assert (seen.owners, seen.passed, seen.late_ms) == (0, 0, 0.0)


async def test_what_a_daemon_parks_and_releases_passes(database: str) -> None:
    async with daemon(database) as (store, lane), sql(database) as admin:
        await store.park(lane, [parcel(store.now_ms() - 200), parcel(store.now_ms() + 60_000)], [])
        seen = await traffic.look(admin)
        assert (seen.owners, seen.passed) == (1, 2)
        assert 200 <= seen.late_ms < traffic.SINCE_MS
        await release_all(lane)
        seen = await traffic.look(admin)
        assert (seen.passed, seen.late_ms) == (3, 0.0)


async def test_what_is_claimed_is_late_until_it_is_released(database: str) -> None:
    async with daemon(database) as (store, lane), sql(database) as admin:
        await store.park(lane, [parcel(store.now_ms() - 100)], [])
        rows = list(await lane.claim(10, 1 << 20))
        assert len(rows) == 1
        assert (await traffic.look(admin)).late_ms >= 100
        await lane.settle(rows, [])
        assert (await traffic.look(admin)).late_ms == 0.0


async def test_a_turn_goes_with_its_session(database: str) -> None:
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
    """Executors, and how many of them were at work at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def executor(self, connection: asyncpg.Connection, meet: int) -> None:
        """Some pieces of work; in the first one it waits until ``meet`` of them are there."""
        ours = Turns(connection, Pace())
        for piece in range(PIECES):
            async with ours.turn():
                self.now += 1
                self.most = max(self.most, self.now)
                async with asyncio.timeout(20):
                    while not piece and self.most < meet:  # noqa: ASYNC110 - as many as there are sessions
                        await asyncio.sleep(0.001)
                for _ in range(5):
                    await connection.fetchval("SELECT 1")
                self.now -= 1


async def test_beside_traffic_one_works_at_a_time(database: str) -> None:
    working = Working()
    over = asyncio.Event()

    async def passing(store: PostgresStore, lane: Lane) -> None:
        while not over.is_set():
            await store.park(lane, [parcel(store.now_ms() + 60_000)] * 100, [])

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


async def test_where_nobody_is_they_work_all_at_once(database: str) -> None:
    working = Working()
    async with opened(database), sql(database) as one, sql(database) as two:
        await asyncio.gather(*(working.executor(connection, 2) for connection in (one, two)))
    assert working.most == 2


async def test_work_that_fails_ends_its_turn(database: str) -> None:
    async with daemon(database), sql(database) as one, sql(database) as two:
        ours = Turns(one, Pace())
        with pytest.raises(asyncpg.DivisionByZeroError):
            async with ours.turn(), one.transaction():
                await one.fetchval("SELECT 1 / 0")
        assert await traffic.take_turn(two)
