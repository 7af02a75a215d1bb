"""Compacting and restoring die at every step, at random moments and with the database server. Each message is a row or
in exactly one segment, and is delivered once, on time and unchanged; another run finishes the work."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from delayer.audit import compact as compact_job
from delayer.audit import restore as restore_job
from delayer.core.units import DAY_MS
from delayer.store.segments import catalog
from delayer.store.segments import compact as compacting
from tests.faults.scenes import Scenes, check, work_off
from tests.faults.tables import PACKED, RESTORE, cases
from tests.integration.segments_store import START_MS
from tests.integration.segments_store import store as store_of
from tests.support.fakes import NOW
from tests.support.place import Place, eventually, stopped
from tests.support.postgres import Postgres
from tests.support.rows import compact, conserved, everything, packed, put, rows, waiting, without_lanes
from tests.support.store import sql

SEED = 30_000
MESSAGES = 6_000
OF_A_SEGMENT = 50
KILLS = 6
LONGEST_LIFE = 0.5
COUNT, AT_MOST = 300, 100
"""The number of compacted messages, and of those in a segment."""
KEPT = 4_000
LANE = 9

COMPACT = f"""
import asyncio, sys
from delayer.store import pool
from tests.support.rows import compact
async def main():
    connection = await pool.connect(sys.argv[1], "victim")
    await compact(connection, rows={AT_MOST})
asyncio.run(main())
"""


async def victim(url: str, fault: str) -> None:
    """Compact until it kills itself, and wait until the server has noticed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", COMPACT, url, env={**os.environ, "DELAYER_FAULT": fault}
    )
    assert await process.wait() == -signal.SIGKILL
    async with sql(url) as admin:
        while await admin.fetchval("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'victim'"):
            pass


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("step", ["locked", "written", "verified", "deleted", "committed"])
async def test_compacting(database: str, step: str, nth: int) -> None:
    async with store_of(database, 3) as admin:
        before = {one.id: one for one in rows(COUNT, START_MS, span_ms=3 * DAY_MS)}
        await put(admin, before.values())
        await victim(database, f"compact.{step}:{nth}")
        assert await everything(admin) == before
        done = nth if step == "committed" else nth - 1
        assert (await catalog.count(admin)).segments == done
        assert (await conserved(admin))["compacted"] == COUNT - len(await waiting(admin))
        await compact(admin, rows=AT_MOST)
        assert await packed(admin) == before
        assert (await conserved(admin))["compacted"] == COUNT


@pytest.mark.parametrize(("name", "death"), cases(RESTORE))
def test_restoring(restore_scenes: Scenes, name: str, death: str) -> None:
    row, outcome = restore_scenes.outcome(death, name)
    check(row, outcome, row.copies[death])
    assert outcome.counters["compacted"] == outcome.counters["restored"] == PACKED, "restored once after every death"


@pytest.mark.deadline(150)
async def test_killed_at_random_moments_while_it_restores(vhost: str, store: str) -> None:
    """Each process finds segments, rows restored earlier, and new messages, and dies with some of each."""
    place = await Place("store", vhost, store).declare()
    chance = random.Random(SEED)
    async with place.ledger(SEED) as ledger:
        async with place.working():
            await ledger.publish(MESSAGES, delay_ms=15_000, absolute=True)
            await eventually(place.rows, lambda rows: rows == MESSAGES)
        made = await place.compact(OF_A_SEGMENT)
        assert made >= MESSAGES // OF_A_SEGMENT
        for life in range(KILLS):
            await ledger.publish(200, longest_ms=1_000)
            async with place.daemon() as daemon:
                begun = "segment restored" if life % 2 and await place.segments() else "lane taken"
                await daemon.event(begun)
                moment = chance.uniform(0, LONGEST_LIFE)
                print(f"seed {SEED}, life {life}: killed {moment:.3f} s after {begun}")
                await asyncio.sleep(moment)  # not to wait for anything: this is the random moment
                daemon.signal(signal.SIGKILL)
                await daemon.wait()
            print(f"in segments: {await place.segments()}, rows: {await place.rows()}, out: {ledger.total()}")
        async with place.daemon() as daemon:
            await ledger.all_back()
            await work_off(place, daemon)
        await place.ended(ledger, repeats=True)
    counters = await place.conserved()
    assert counters["compacted"] == counters["restored"] == MESSAGES


async def test_another_daemon_restores_the_segment_of_a_hung_one(vhost: str, store: str) -> None:
    """The store ends the transaction of the hung daemon after some seconds; the other polls again soon after."""
    place = await Place("store", vhost, store).declare()
    async with place.ledger(SEED + 1) as ledger:
        async with place.daemon(STORE__LANES="1") as daemon:  # one lane, one segment
            await daemon.ready()
            await ledger.publish(PACKED, delay_ms=15_000, absolute=True)  # It must be stopped by then.
            await eventually(place.rows, lambda rows: rows == PACKED)
            assert await daemon.stop() == 0, daemon.tail()
        assert await place.compact() == 1
        async with AsyncExitStack() as stack:
            hung = await stack.enter_async_context(place.daemon("restore.copied:1:stop"))
            await stopped(hung)
            other = await stack.enter_async_context(place.daemon())
            restored = await other.event("segment restored")
            assert restored["messages"] == PACKED
            await ledger.all_back()
            hung.signal(signal.SIGCONT)
            await hung.event("restoring interrupted")
            await place.ended(ledger)
    assert (await place.conserved())["restored"] == PACKED


@pytest.fixture
def server() -> Iterator[Postgres]:
    """A server that a test may kill."""
    with Postgres() as started:
        yield started


async def killed(server: Postgres, url: str, work: Callable[[], Any], done: Callable[[int], bool]) -> Any:
    """Kill the server during ``work`` as soon as this many segments are ``done``, and restart it."""
    working = asyncio.create_task(asyncio.to_thread(work))
    async with sql(url) as admin:

        async def count() -> int:
            return (await catalog.count(admin)).segments

        await eventually(count, lambda n: done(n) or working.done())
        assert not working.done()
        await asyncio.to_thread(server.kill)
    found = await working
    await asyncio.to_thread(server.start)
    return found


async def looked(url: str, look: Callable[[Any], Awaitable[Any]]) -> Any:
    async with sql(url) as admin:
        return await look(admin)


@pytest.mark.deadline(120)
async def test_each_message_is_a_row_or_in_one_segment(server: Postgres) -> None:
    url = server.url(server.add_store())
    async with sql(url) as admin:
        await put(admin, rows(KEPT, NOW + 10 * DAY_MS))
        await admin.execute(f"INSERT INTO lane VALUES ({LANE}, 0, 'gone') ON CONFLICT DO NOTHING")
        before = await everything(admin)
        windows = await compacting.windows(admin, 0, OF_A_SEGMENT)
    packed = await killed(server, url, lambda: compact_job.work(url, OF_A_SEGMENT, 1, windows), lambda n: n >= 5)
    assert any(one.lost for one in packed)
    assert await looked(url, everything) == before
    await looked(url, conserved)
    assert not any(one.lost for one in await asyncio.to_thread(compact_job.work, url, OF_A_SEGMENT, 1, windows))
    assert await looked(url, everything) == before
    assert await looked(url, waiting) == {}

    planned = await restore_job.plan(url, None)

    def restore() -> restore_job.RestoreResult:
        return asyncio.run(restore_job.run(url, planned, lambda *_: None))

    assert (await killed(server, url, restore, lambda n: n <= len(planned.segments) - 5)).lost
    assert without_lanes(await looked(url, everything)) == without_lanes(before)
    await looked(url, conserved)
    assert not (await asyncio.to_thread(restore)).lost
    assert without_lanes(await looked(url, waiting)) == without_lanes(before)
    await looked(url, conserved)
