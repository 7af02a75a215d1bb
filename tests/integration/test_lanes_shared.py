"""Processes share the lanes of one store: evenly, each lane with one live owner, and nothing lost or early."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Collection
from contextlib import AsyncExitStack

import asyncpg
import pytest

from delayer.store.admin.setup import raise_lanes
from tests.integration.lanes_shared import Process, migrated, running
from tests.support.daemon import DaemonProcess
from tests.support.flow import flowing
from tests.support.place import Place, eventually
from tests.support.store import parcel, sql

BALANCED_SECONDS = 10.0
LANES = 12
CONSTANT = 4
"""A process's connections other than its lanes': presence, and the pool for parks."""
_OWNERS = """
SELECT l.number, l.owner, EXISTS (
    SELECT FROM pg_locks AS k JOIN pg_database AS d ON d.oid = k.database AND d.datname = current_database()
    WHERE k.locktype = 'advisory' AND k.granted AND k.classid = 'lane'::regclass AND k.objid = l.number
) AS owned FROM lane AS l ORDER BY l.number
"""
_SESSIONS = """
SELECT count(*) FILTER (WHERE application_name LIKE 'delayer lane %'), count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'delayer %'
"""


async def balanced(admin: asyncpg.Connection, live: Collection[DaemonProcess]) -> float:
    """Seconds until every lane has a live owner, and shares differ by at most one."""
    began, wanted = time.monotonic(), {str(daemon.pid) for daemon in live}

    async def shares() -> Counter[str]:
        rows = await admin.fetch(_OWNERS)
        return Counter(row["owner"].rpartition(":")[2] if row["owned"] else "" for row in rows)

    def even(found: Counter[str]) -> bool:
        return found.keys() == wanted and max(found.values()) - min(found.values()) <= 1

    await eventually(shares, even)
    return time.monotonic() - began


@pytest.mark.deadline(300)
async def test_eight_daemons_that_die_hang_and_return(vhost: str, database: str) -> None:
    place = await Place("store", vhost, database, lanes=LANES).declare()
    await raise_lanes(database, LANES)
    took: dict[str, float] = {}
    async with place.ledger() as ledger, sql(database) as admin, AsyncExitStack() as started:

        async def start(count: int) -> list[DaemonProcess]:
            """Start this many more, and wait for them: on a busy machine, starting eight takes half a minute."""
            fresh = [await started.enter_async_context(place.daemon()) for _ in range(count)]
            for daemon in fresh:
                await daemon.event("store connected", timeout=120.0)
            return fresh

        daemons = await start(8)
        await balanced(admin, daemons)
        async with flowing(ledger, 200, longest_ms=3_000):
            dying, hanging, daemons = daemons[:3], daemons[3:5], daemons[5:]
            for daemon in dying:
                daemon.signal(signal.SIGKILL)
            took["killed"] = await balanced(admin, [*hanging, *daemons])
            for daemon in hanging:
                daemon.signal(signal.SIGSTOP)
            took["hanging"] = await balanced(admin, daemons)
            for daemon in hanging:
                daemon.signal(signal.SIGCONT)
            took["returned"] = await balanced(admin, [*hanging, *daemons])
            daemons += hanging + await start(3)
            took["new"] = await balanced(admin, daemons)
            _, connections = await eventually(lambda: admin.fetchrow(_SESSIONS), lambda found: found[0] == 2 * LANES)
            assert connections <= 2 * LANES + CONSTANT * len(daemons)
        await place.ended(ledger, repeats=True)
    print({fault: round(seconds, 1) for fault, seconds in took.items()})
    assert all(seconds <= BALANCED_SECONDS for seconds in took.values()), took


async def test_more_processes_than_lanes(database: str) -> None:
    """One waits, and takes over from the first to exit; more lanes are taken without a restart."""
    await migrated(database)
    async with sql(database) as admin:
        await admin.execute("DELETE FROM lane WHERE number > 1")
    async with running(database, "one") as one:
        spare = Process(database, "spare", {})
        stopping = asyncio.Event()
        task = asyncio.create_task(spare.run(stopping))
        try:
            await eventually(lambda: len(one.backlog.numbers) + len(spare.backlog.numbers) == 1)
            await eventually(lambda: one.backlog.spare.is_set() or spare.backlog.spare.is_set())
            assert await raise_lanes(database, 2) == 2
            await eventually(lambda: len(one.backlog.numbers) == len(spare.backlog.numbers) == 1)
            assert not spare.backlog.spare.is_set()
        finally:
            stopping.set()
            await task
    assert await raise_lanes(database, 1) == 2, "the number never shrinks"


async def test_a_process_without_its_broker_drops_its_lanes_for_others(database: str) -> None:
    await migrated(database)
    async with running(database, "one") as one, running(database, "two") as two:
        await eventually(lambda: len(one.backlog.numbers) == len(two.backlog.numbers) == 2)
        one.connection.current = None
        await eventually(lambda: len(two.backlog.numbers) == 4)
        assert not one.backlog.usable
        one.connection.current = True
        await eventually(lambda: len(one.backlog.numbers) == len(two.backlog.numbers) == 2)


async def test_a_route_whose_limit_is_taken_away_keeps_its_lane(database: str) -> None:
    await migrated(database)
    async with running(database, "one", {b"slow": 1.0}) as one, sql(database) as admin:
        await eventually(lambda: len(one.backlog.numbers) == 5)
        now = one.now_upper_ms()
        await one.backlog.apply([parcel(now, b"%d" % n, route=b"slow") for n in range(50)])
        assert await admin.fetchval("SELECT route FROM lane WHERE number = 5") == b"slow"
        assert await admin.fetchval("SELECT count(DISTINCT lane) FROM counter") == 1
        one.live.rates = {}
        await eventually(lambda: len(one.publisher.published) == 50)


DUE_MS = 5_000
"""Long enough to lock the row before it is due, on a busy machine too."""


async def test_a_claim_that_waits_for_a_lock_delays_only_earlier_parks(database: str) -> None:
    await migrated(database)
    async with running(database) as daemon, sql(database) as locker:
        await daemon.backlog.apply([parcel(daemon.now_upper_ms() + DUE_MS, b"locked")])
        async with locker.transaction():
            assert len(await locker.fetch("SELECT id FROM message FOR UPDATE")) == 1
            await eventually(lambda: any(lane.behind for lane in daemon.backlog._ownership._lanes))
            for body in (b"one", b"two", b"three"):
                await daemon.backlog.apply([parcel(daemon.now_upper_ms(), body)])
            await eventually(lambda: len(daemon.publisher.published) == 3)
            assert {one.body for _, one in daemon.publisher.published} == {b"one", b"two", b"three"}
        await eventually(lambda: len(daemon.publisher.published) == 4)
