"""A process that freezes in any work (SIGSTOP: a paused machine, an overcommitted host) loses its lanes. It also loses
the upkeep's lock and the locks of its parks.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from delayer.store.clock import StoreClock
from delayer.store.lanes.locks import LaneLocks
from delayer.store.rows.partitions import Days, run_upkeep
from tests.support.place import eventually
from tests.support.store import blocked, opened, owned, parcel, release_all, sql, taken

CLAIMING = """
import asyncio, sys
from delayer.store.postgres import PostgresStore

async def main(url):
    store = await PostgresStore.connect(lambda: url)
    lane = await store.locks.take(1)
    print("ready", flush=True)
    sys.stdin.readline()
    await lane.claimers[0].claim(1000, 16 << 20)

asyncio.run(main(*sys.argv[1:]))
"""
COPYING = """
import asyncio, sys
from delayer.store import pool
from delayer.store.lanes.locks import application_of

async def silent():
    yield b""
    print("ready", flush=True)
    await asyncio.Event().wait()

async def main(url, doing):
    if doing == "park":
        connection = await pool.connect(url, "delayer park", plain=True)
    else:
        connection = await pool.connect(url, application_of(1), {"idle_session_timeout": "1s"})
        assert await connection.fetchval("SELECT pg_try_advisory_lock('lane'::regclass::oid::int, 1)")
    await connection.copy_to_table("counter", source=silent(), timeout=300)

asyncio.run(main(*sys.argv[1:]))
"""
TIMEOUT = "SHOW idle_session_timeout"
TAKES_SECONDS = 8.0
"""Seconds from the freeze to the new owner: the timeout, the kernel's timer granularity, and a busy machine."""


@asynccontextmanager
async def child(program: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that is ready."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, *arguments, stdin=pipe, stdout=pipe)
    try:
        await said(process, b"ready")
        yield process
    finally:
        process.kill()
        await process.wait()


async def said(process: asyncio.subprocess.Process, word: bytes) -> None:
    assert process.stdout is not None
    while word not in (line := await process.stdout.readline()):
        assert line, "it ended"


async def state(admin: asyncpg.Connection) -> tuple[str, str] | None:
    found = await admin.fetchrow(
        "SELECT state, wait_event FROM pg_stat_activity"
        " WHERE application_name LIKE 'delayer lane %' AND datname = current_database() AND state <> 'idle'"
    )
    return None if found is None else tuple(found)


async def test_a_process_that_freezes_while_it_is_sent_a_claim_loses_its_lane(database: str) -> None:
    """Postgres sends more than sockets hold, and waits for the reader: timeouts of idle sessions do not act then."""
    async with (
        opened(database) as store,
        sql(database) as admin,
        sql(database) as blocker,
        child(CLAIMING, database) as process,
    ):
        async with owned(store) as [other]:
            await store.park(other, [parcel(store.now_upper_ms() - n, b"x" * 60_000) for n in range(200)], [])
            await admin.execute("UPDATE message SET lane = 1")
        assert process.stdin is not None
        # Frozen while its statement waits, so that no process reads the answer.
        async with blocker.transaction():
            await blocker.execute("SELECT FROM message FOR UPDATE")
            process.stdin.write(b"\n")
            await blocked(admin, "%")
            os.kill(process.pid, signal.SIGSTOP)
        frozen = time.monotonic()
        await eventually(lambda: state(admin), lambda found: found == ("active", "ClientWrite"))
        lane = await asyncio.wait_for(taken(store, 1), 30.0)
        assert time.monotonic() - frozen < TAKES_SECONDS
        assert len(await release_all(lane)) == 200
        await lane.close()


async def test_a_process_that_freezes_in_the_middle_of_a_statement_loses_its_lane(database: str) -> None:
    """No timeout of the server acts while it waits for the rest of a statement, here a COPY."""
    async with opened(database, idle_timeout=1.0) as store, child(COPYING, database, "lane") as process:
        process.send_signal(signal.SIGSTOP)
        assert await store.locks.take(1) is None
        while (await store.locks.look()).lanes[0].owned:  # noqa: ASYNC110 - the session sets no event
            await asyncio.sleep(0.05)
        lane = await taken(store, 1)
        await lane.close()


class Asking(Days):
    """Reads the timeout, and does not create a partition."""

    seen: str | None = None

    async def ensure(self, connection: asyncpg.Connection, *_: Any, **__: Any) -> None:
        self.seen = await connection.fetchval(TIMEOUT)


async def test_a_silent_session_of_the_upkeep_ends(database: str) -> None:
    """The upkeep holds its lock between statements."""
    async with sql(database) as one, sql(database) as other:
        await run_upkeep(one, StoreClock(), days := Asking(()))
        assert days.seen == "15s"
        assert await one.fetchval(TIMEOUT) == "0", "a park may come after an hour"
        await other.execute("SELECT pg_advisory_lock('message'::regclass::oid::int, 2)")
        await run_upkeep(one, StoreClock(), days := Asking(()))
        assert days.seen is None
        assert await one.fetchval(TIMEOUT) == "0"


async def test_a_park_that_froze_in_its_copy_is_ended(database: str) -> None:
    copies = (
        "SELECT wait_event FROM pg_stat_activity"
        " WHERE datname = current_database() AND query LIKE 'COPY%' AND state = 'active'"
    )
    locks = LaneLocks(lambda: database, None, StoreClock(), owner="test", idle=4.0, releasing=10.0)
    async with sql(database) as admin, child(COPYING, database, "park") as parking:
        await eventually(lambda: admin.fetchval(copies), lambda found: found == "ClientRead")
        os.kill(parking.pid, signal.SIGSTOP)
        await locks.look()
        assert await admin.fetchval(copies) == "ClientRead", "it may be slow"
        await locks.look(frozen_seconds=0.0)
        await eventually(lambda: admin.fetchval(copies), lambda found: found is None)
    locks.leave()
