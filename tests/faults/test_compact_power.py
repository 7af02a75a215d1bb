"""The database server dies under compaction and bulk restore, which do not wait for each commit to be on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from delayer.audit import compact, restore
from delayer.store import pool, upgrades
from delayer.store.rows.partitions import DAY_MS
from delayer.store.segments import catalog
from delayer.store.segments import compact as compacting
from tests.faults.place import eventually
from tests.integration.test_store_lane import sql
from tests.support.fakes import NOW
from tests.support.postgres import Postgres
from tests.support.rows import conserved, everything, put, rows, waiting, without_lanes

COUNT = 4_000
OF_A_SEGMENT = 50
LANE = 9


@pytest.fixture
def server() -> Iterator[Postgres]:
    """One of our own, to be killed; its log is written late, so that there is something to lose."""
    with Postgres(settings={"wal_writer_delay": "5s"}) as started:
        yield started


async def killed(server: Postgres, url: str, work: Callable[[], Any], done: Callable[[int], bool]) -> list[Any]:
    """Kill the server under ``work`` as soon as so many segments are ``done``, and start it again. What came of it."""
    working = asyncio.create_task(asyncio.to_thread(work))
    async with sql(url) as admin:

        async def count() -> int:
            return (await catalog.count(admin)).segments

        await eventually(count, lambda n: done(n) or working.done())
        assert not working.done()
        await asyncio.to_thread(server.kill)
    found: list[Any] = await working
    await asyncio.to_thread(server.start)
    return found


async def looked(url: str, look: Callable[[Any], Awaitable[Any]]) -> Any:
    async with sql(url) as admin:
        return await look(admin)


@pytest.mark.deadline(120)
async def test_each_message_is_a_row_or_in_one_segment(server: Postgres) -> None:
    url = server.url(server.add_database())
    await upgrades.upgrade(url)
    async with sql(url) as admin:
        await put(admin, rows(COUNT, NOW + 10 * DAY_MS))
        await admin.execute(f"INSERT INTO lane VALUES ({LANE}, 0, 'gone') ON CONFLICT DO NOTHING")
        before = await everything(admin)
        windows = await compacting.windows(admin, 0, OF_A_SEGMENT)
    packed = await killed(server, url, lambda: compact.work(url, OF_A_SEGMENT, windows), lambda n: n >= 5)
    assert any(one.lost for one in packed)
    assert await looked(url, everything) == before
    await looked(url, conserved)
    assert not any(one.lost for one in await asyncio.to_thread(compact.work, url, OF_A_SEGMENT, windows))
    assert await looked(url, everything) == before
    assert await looked(url, waiting) == {}

    async with sql(url) as admin:
        ids = [(one.id, one.first_due_ms) for one in await catalog.listed(admin)]
    back = await killed(server, url, lambda: restore.work(url, ids), lambda n: n <= len(ids) - 5)
    assert any(one.lost for one in back)
    assert without_lanes(await looked(url, everything)) == without_lanes(before)
    await looked(url, conserved)
    assert not any(one.lost for one in await asyncio.to_thread(restore.work, url, ids))
    assert without_lanes(await looked(url, waiting)) == without_lanes(before)
    await looked(url, conserved)


async def test_reported_segments_are_on_disk(server: Postgres) -> None:
    url = server.url(server.add_database())
    await upgrades.upgrade(url)
    lazy = await pool.connect(url, "lazy", pool.LAZY)
    try:
        await lazy.execute("INSERT INTO lane (number, epoch, owner) VALUES (99, 0, 'somebody')")
        written = await lazy.fetchval("SELECT pg_current_wal_insert_lsn()")
        await pool.flush(lazy)
    finally:
        await pool.close(lazy)
    async with sql(url) as admin:
        assert await admin.fetchval("SELECT pg_current_wal_flush_lsn() >= $1", written)
    server.kill()
    server.start()
    async with sql(url) as admin:
        assert await admin.fetchval("SELECT count(*) FROM lane WHERE number = 99") == 1
