"""The lanes of limited routes: they share a few connections, keep their rates, and move between processes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import asyncpg
import pytest

from delayer.core.errors import StoreLost
from delayer.store.lanes.locks import LIMITED_SESSIONS
from tests.integration.lanes_shared import Process, migrated, running
from tests.support.place import eventually
from tests.support.postgres import Postgres
from tests.support.proxy import Proxy
from tests.support.store import ROOM, bodies, claim_when_due, free_lanes, opened, parcel, sql

CONSTANT = 4
"""Connections of a process apart from those of its lanes."""
LANES = 4


def routes(count: int) -> list[bytes]:
    return [b"route %d" % n for n in range(count)]


async def sessions(admin: asyncpg.Connection) -> int:
    """Delayer's connections to this database."""
    count: int = await admin.fetchval(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'delayer%'"
    )
    return count


async def park_each(process: Process, names: list[bytes], messages: int) -> None:
    """Park this many messages for each route, all due now. On a busy machine, a process that does not get its turn for
    ten seconds loses its sessions, and takes its lanes anew."""
    now = process.now_upper_ms()
    parcels = [parcel(now, b"%d" % n, route=name) for name in names for n in range(messages)]
    while True:
        try:
            return await process.backlog.apply(parcels)
        except StoreLost:
            await asyncio.sleep(0.1)


async def test_many_limited_routes_start_in_seconds_on_few_connections(database: str) -> None:
    await migrated(database)
    count = 500
    names = routes(count)
    began = time.monotonic()
    async with sql(database) as admin, running(database, rates=dict.fromkeys(names, 10.0)) as process:
        await eventually(lambda: len(process.backlog.numbers) == LANES + count)
        print(f"{count} limited routes took {time.monotonic() - began:.1f} s")
        await park_each(process, names, 2)
        await eventually(lambda: admin.fetchval("SELECT count(*) FROM message"), lambda left: left == 0)
        assert len(process.publisher.published) >= 2 * count  # more if lanes were lost and taken anew
        assert await sessions(admin) <= CONSTANT + 2 * LANES + LIMITED_SESSIONS
    assert await sessions_left(database) == 0


async def sessions_left(database: str) -> int:
    async with sql(database) as admin:
        return await eventually(lambda: sessions(admin), lambda left: left == 0)


async def test_routes_that_share_connections_keep_their_rates(database: str) -> None:
    """Sixty routes with more than they may send: each sends at its rate, and no more."""
    await migrated(database)
    names, rate, seconds = routes(60), 20.0, 4.0
    async with running(database, rates=dict.fromkeys(names, rate)) as process:
        await eventually(lambda: len(process.backlog.numbers) == LANES + len(names))
        await park_each(process, names, 200)
        await eventually(lambda: len(process.publisher.published) >= len(names))
        before = len(process.publisher.published)
        # If each waited for the turns of the others on its connection, it would take longer than this waits.
        await eventually(lambda: len(process.publisher.published) - before >= rate * len(names) * seconds)
    at = Counter(one.body for _, one in process.publisher.published)
    assert max(at.values()) <= len(names)
    first, last = process.publisher.published[before][0], process.publisher.published[-1][0]
    assert (len(process.publisher.published) - before) / (last - first) <= 1.25 * rate * len(names)


async def test_limited_lanes_are_shared_between_processes_and_taken_over(database: str) -> None:
    await migrated(database)
    names = routes(10)
    rates = dict.fromkeys(names, 1000.0)
    async with running(database, "one", rates) as one:
        async with running(database, "two", rates) as two:
            await eventually(lambda: len(one.backlog.numbers) == len(two.backlog.numbers) == (LANES + len(names)) // 2)
            await park_each(one, names, 5)
            await eventually(lambda: len(one.publisher.published) + len(two.publisher.published) == 50)
            assert one.publisher.published and two.publisher.published
            two.connection.current = None
            await eventually(lambda: len(one.backlog.numbers) == LANES + len(names))
        await park_each(one, names, 5)
        await eventually(lambda: len(one.publisher.published) + len(two.publisher.published) == 100)


@pytest.mark.parametrize("ended", ["delayer presence", "delayer lane limited"])
async def test_lost_connections_of_limited_lanes_do_not_lose_messages(
    postgres: Postgres, database: str, ended: str
) -> None:
    await migrated(database)
    names = routes(10)
    async with sql(database) as admin, running(database, rates=dict.fromkeys(names, 1000.0)) as process:
        await eventually(lambda: len(process.backlog.numbers) == LANES + len(names))
        assert await admin.fetchval(
            "SELECT bool_and(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE $1 || '%'",
            ended,
        )
        await park_each(process, names, 5)
        await eventually(lambda: len(process.publisher.published) >= 50)
        assert len({(one.token) for _, one in process.publisher.published}) == 50
        await eventually(lambda: len(process.backlog.numbers) == LANES + len(names))


async def test_a_limited_message_is_not_early(database: str) -> None:
    await migrated(database)
    async with running(database, rates={b"slow": 1000.0}) as process:
        await eventually(lambda: len(process.backlog.numbers) == LANES + 1)
        due_ms = process.now_upper_ms() + 700
        await process.backlog.apply([parcel(due_ms + 50 * n, b"%d" % n, route=b"slow") for n in range(20)])
        while (sent := len(process.publisher.published)) < 20:
            assert sent == 0 or process.now_upper_ms() >= due_ms + 50 * (sent - 1), sent
            await asyncio.sleep(0.005)


async def test_a_failed_take_gives_up_its_locks(database: str) -> None:
    """Otherwise no process could take these lanes, and their messages would never be released."""
    await migrated(database)
    async with sql(database) as admin, sql(database) as locker:
        async with running(database) as first:
            await first.backlog.limit([b"slow"])
        async with locker.transaction():
            await locker.execute("SELECT FROM lane WHERE route IS NOT NULL FOR UPDATE")
            async with running(database, rates={b"slow": 10.0}) as process:
                waits = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                await eventually(lambda: admin.fetchval(waits))
                await locker.execute("ROLLBACK")
                await eventually(lambda: len(process.backlog.numbers) == LANES + 1)
                await park_each(process, [b"slow"], 1)
                await eventually(lambda: process.publisher.published)
                await locker.execute("BEGIN")


async def test_a_claim_waits_a_moment_for_a_shared_session(database: str) -> None:
    """Then its release feeds the watchdog. A silent destination may keep the session for seconds."""
    async with opened(database) as store:
        await store.locks.add_routes(routes(2 * LIMITED_SESSIONS))
        numbers = (await store.locks.look()).routes.values()
        lanes = await store.locks.take_limited(sorted(numbers))
        first, *others = [lane for lane in lanes if lane.number % LIMITED_SESSIONS == 0]
        now = store.now_upper_ms()
        [own] = await free_lanes(store, 1)
        await store.park(own, [parcel(now, b"x", route=lane.route) for lane in [first, *others]], [])
        rows = await claim_when_due(first)
        assert await others[0].claimers[0].claim(10, ROOM) == []
        await first.claimers[0].settle(rows, [])
        assert bodies(await claim_when_due(others[0])) == [b"x"]
        await others[0].claimers[0].give_up()
        for lane in [own, *lanes]:
            await lane.close()


async def test_lanes_are_taken_over_a_slow_line(postgres: Postgres, database: str) -> None:
    """Taking a lane needs some statements, longer together than the session is left alone."""
    await migrated(database)
    async with Proxy(postgres.port) as proxy:
        url = database.replace(f":{postgres.port}/", f":{proxy.port}/")
        async with opened(url) as store:
            proxy.slow(delay=0.1)
            [lane] = await free_lanes(store, 1)
            await lane.close()
            proxy.resume()
