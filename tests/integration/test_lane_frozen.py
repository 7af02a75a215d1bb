"""A process that freezes (SIGSTOP: a paused machine, an overcommitted host) loses its lanes, whatever it was doing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from delayer.store.postgres import PostgresStore
from tests.conformance.store_contract import owned, parcel, release_all, taken
from tests.faults.place import eventually
from tests.integration.test_store_lane import opened, sql

PROGRAM = """
import asyncio, sys
from delayer.store.postgres import PostgresStore

async def main(url, doing):
    store = await PostgresStore.connect(url)
    lane = await store.take(1)
    print("owned", flush=True)
    sys.stdin.readline()
    if doing == "claim":
        await lane.claim(1000, 16 << 20)
        print("claimed", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""
TAKES_SECONDS = 8.0
"""From the freezing to the taking: the timeout, the granularity of the kernel's timer, and a machine that is busy."""


@asynccontextmanager
async def child(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, *arguments, stdin=pipe, stdout=pipe)
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def said(process: asyncio.subprocess.Process, word: bytes) -> None:
    assert process.stdout is not None
    while word not in (line := await process.stdout.readline()):
        assert line, "it ended"


async def go_on(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    await process.stdin.drain()


async def state(admin: asyncpg.Connection) -> tuple[str, str] | None:
    found = await admin.fetchrow(
        "SELECT state, wait_event FROM pg_stat_activity"
        " WHERE application_name LIKE 'delayer lane %' AND datname = current_database()"
    )
    return None if found is None else tuple(found)


async def taken_after(store: PostgresStore, frozen: float) -> float:
    """Seconds since ``frozen`` until its lane could be taken, with all that was in it."""
    lane = await asyncio.wait_for(taken(store, 1), 30.0)
    after = time.monotonic() - frozen
    assert len(await release_all(lane)) == 200
    await lane.release()
    return after


@pytest.mark.parametrize("doing", ["nothing", "sending a claim", "releasing"])
async def test_a_frozen_process_loses_its_lane(database: str, doing: str) -> None:
    """While Postgres sends it more than sockets hold it does not wait for the client's next word, but for it to read:
    what ends sessions that are idle does not end that one."""
    size = 60_000 if doing == "sending a claim" else 60
    async with (
        opened(database) as store,
        sql(database) as admin,
        sql(database) as blocker,
        child(database, "nothing" if doing == "nothing" else "claim") as process,
    ):
        await said(process, b"owned")
        number = 1
        async with owned(store) as [other]:
            await store.park(other, [parcel(store.now_upper_ms() - n, b"x" * size) for n in range(200)], [])
            await admin.execute("UPDATE message SET lane = $1", number)
        if doing == "sending a claim":
            # Frozen while its statement waits, so that the answer finds nobody.
            async with blocker.transaction():
                await blocker.execute("SELECT FROM message FOR UPDATE")
                await go_on(process)
                await eventually(
                    lambda: admin.fetchval(
                        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                        " AND datname = current_database()"
                    ),
                    bool,
                )
                os.kill(process.pid, signal.SIGSTOP)
            frozen = time.monotonic()
            await eventually(lambda: state(admin), lambda found: found == ("active", "ClientWrite"), timeout=5.0)
        else:
            if doing == "releasing":
                await go_on(process)
                await said(process, b"claimed")
            os.kill(process.pid, signal.SIGSTOP)
            frozen = time.monotonic()
        assert await taken_after(store, frozen) < TAKES_SECONDS
