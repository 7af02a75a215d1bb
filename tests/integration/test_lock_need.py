"""Locks of Postgres's lock table: few for each park, also with many keys, and the report of `check` on the table."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import asyncpg
import pytest

from delayer.cli.check_store import CheckReport, _locks
from delayer.core.operations import fold
from delayer.schedule.record import key_of
from delayer.store import pool, postgres
from delayer.store.admin.needs import LockNeed, lock_need
from delayer.store.postgres import Placement
from delayer.store.rows import history, keys
from tests.support.postgres import Postgres
from tests.support.store import parcel, sql

LANE = Placement(1, {}, 0)
FAR_MS = 4_000_000_000_000
_ADVISORY = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"


async def park(connection: asyncpg.Connection, first: int, last: int) -> int:
    """Park messages under this many keys. Return the transaction's number of advisory locks."""
    async with pool.transaction(connection):
        some = [parcel(FAR_MS + n, b"", key=b"order %d" % n) for n in range(first, last)]
        await postgres.apply_batch(connection, LANE, fold(some))
        locks: int = await connection.fetchval(_ADVISORY)
    return locks


async def test_a_park_takes_few_locks_for_many_keys(database: str) -> None:
    async with sql(database) as connection:
        assert await park(connection, 0, 3) <= 3
        assert await park(connection, 0, 2_000) == keys.LOCKS == 64
        assert await connection.fetchval("SELECT count(*) FROM message_key") == 2_000


async def test_a_change_of_many_schedules_keeps_no_park_waiting(database: str) -> None:
    async with sql(database) as changing, sql(database) as parking:
        await parking.execute("SET lock_timeout = '5s'")
        async with changing.transaction():
            await keys.lock_keys(changing, [key_of(f"schedule-{n}") for n in range(2_000)])
            assert await changing.fetchval(_ADVISORY) == 1
            assert await park(parking, 0, 2_000) == keys.LOCKS


@pytest.fixture
def small_server() -> Iterator[Postgres]:
    """A server with the default max_locks_per_transaction and few connections: a lock table of some thousand."""
    with Postgres(settings={"max_connections": 20}) as server:
        yield server


@pytest.mark.slow
@pytest.mark.deadline(300)
async def test_many_processes_that_replace_many_keys_do_not_fill_the_lock_table(small_server: Postgres) -> None:
    url, total, batch = small_server.url(small_server.add_store()), 100_000, 2_000
    left = [*range(0, total, batch)] * 2
    left.sort(reverse=True)

    async def process() -> None:
        async with sql(url) as connection:
            while left:
                first = left.pop()
                await park(connection, first, first + batch)

    await asyncio.gather(*(process() for _ in range(8)))
    async with sql(url) as admin:
        assert await admin.fetchval("SELECT count(*) FROM message") == total
        counted = dict(map(tuple, await admin.fetch("SELECT kind, n FROM counter")))
        assert counted == {"parked": 2 * total, "cancelled": total}


async def test_the_size_of_the_lock_table(database: str) -> None:
    async with sql(database) as connection:
        found = await lock_need(connection)
    assert (found.allowed, found.lanes, found.enough) == (64, 4, True)
    assert 200 < found.connections < 300
    year = found._replace(partitions=370, lanes=4, connections=122)
    assert 64 < year.needed < 256
    assert not year.enough
    report = CheckReport()
    _locks(report, year)
    _locks(report, found)
    small, large = report
    assert (small.result, f"max_locks_per_transaction = {year.needed}" in small.advice) == ("note", True)
    assert large.result == "ok"


async def test_the_partitions_of_a_history_count_before_they_exist(database: str) -> None:
    async with sql(database) as connection:
        of_history = (await lock_need(connection, history_days=5)).of_history
        for today in range(20):
            await history.run_upkeep(connection, today, days=5)
        there = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'history'::regclass"
        assert await connection.fetchval(there) == of_history
    year = LockNeed(64, 122, 140, 4, history_days=365)
    report = CheckReport()
    _locks(report, year)
    [small] = report
    assert small.result == "note"
    assert f"and {year.partitions + year.of_history} partitions may need" in small.found
    assert year._replace(history_days=0).enough


@pytest.mark.parametrize("lanes", [1, 4, 40])
def test_more_lanes_or_partitions_never_need_fewer_locks(lanes: int) -> None:
    base = LockNeed(64, 122, 100, lanes)
    for more in (
        base._replace(partitions=300),
        base._replace(lanes=lanes + 1),
        base._replace(connections=60),
        base._replace(history_days=400),
    ):
        assert more.needed >= base.needed
