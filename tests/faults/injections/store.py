"""Faults of Postgres."""

from __future__ import annotations

import asyncio
import os
import pwd
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import asyncpg
import psutil

from tests.faults.fault import Fault, Missed, Untouched
from tests.faults.fleet import Fleet
from tests.support.servers import Postgres

OURS = "datname = current_database() AND application_name LIKE 'delayer%'"
LOCKS = "datname = current_database() AND application_name LIKE 'delayer lane%'"
PATIENCE = 30.0
"""Seconds for a daemon to reach the point that a fault waits for."""


async def killed(fleet: Fleet, fault: Fault) -> None:
    """Kill all its processes at once, and restart it after ``seconds``: crash recovery."""
    await asyncio.to_thread(fleet.postgres.kill)
    await asyncio.sleep(fault.seconds)
    await asyncio.to_thread(fleet.postgres.start)


async def stopped(fleet: Fleet, fault: Fault) -> None:
    await fleet.paused(fleet.postgres, fault.seconds)


async def connections_ended(fleet: Fleet, fault: Fault) -> None:
    """Terminate all connections of the daemons one by one, spread over ``seconds``."""
    await _end(fleet, OURS, fault.seconds)


async def locks_ended(fleet: Fleet, fault: Fault) -> None:
    """Terminate the connections that hold the lanes' locks, one by one."""
    await _end(fleet, LOCKS, fault.seconds)


async def _end(fleet: Fleet, which: str, seconds: float) -> None:
    async with fleet.connected() as connection:
        pids = [row[0] for row in await connection.fetch(f"SELECT pid FROM pg_stat_activity WHERE {which}")]
        ended = 0
        for pid in pids:
            ended += await connection.fetchval("SELECT pg_terminate_backend($1)", pid)
            await asyncio.sleep(seconds / len(pids))
    if not ended:
        raise Untouched("the daemons had no such connection")


async def statements_cancelled(fleet: Fleet, fault: Fault) -> None:
    """Cancel every running statement, as a statement timeout does, ten times a second for ``seconds``. Cancel more
    often until the first hit: most statements end within a millisecond."""
    async with fleet.connected() as connection:
        cancelled = 0
        until = time.monotonic() + fault.seconds
        while time.monotonic() < until:
            cancelled += await connection.fetchval(
                f"SELECT count(*) FILTER (WHERE pg_cancel_backend(pid)) FROM pg_stat_activity"
                f" WHERE {OURS} AND state = 'active'"
            )
            await asyncio.sleep(0.1 if cancelled else 0.002)  # not to wait for anything: this is the fault's pace
    if not cancelled:
        raise Untouched("no statement of the daemons ran at any of these moments")


async def disk_full(fleet: Fleet, fault: Fault) -> None:
    """No table can grow beyond ``detail`` bytes for ``seconds``. The limit must exceed the size of a WAL file."""
    before = await _refusals(fleet)
    limit_files(fleet.postgres, int(fault.detail))
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        limit_files(fleet.postgres, None)
    if await _refusals(fleet) == before:
        raise Missed("nothing wanted to grow beyond that")


async def _refusals(fleet: Fleet) -> int:
    """The number of failed file extensions in the server's log."""
    return (await asyncio.to_thread(fleet.postgres.log)).count("File too large")


def limit_files(postgres: Postgres, limit: int | None) -> None:
    """Limit the size of every file written by the server's sessions, present and future; no limit if None. Raises
    CalledProcessError if that cannot be done.

    The server's own writers have no limit: they write pages that are in its memory already.
    """
    pids = []
    for pid in postgres.pids():
        with suppress(psutil.NoSuchProcess):
            if not set(" ".join(psutil.Process(pid).cmdline()).split()) & {"checkpointer", "writer", "walwriter"}:
                pids.append(str(pid))
    soft = "unlimited" if limit is None else str(limit)
    script = f'for pid; do prlimit --fsize={soft}: --pid "$pid" || ! kill -0 "$pid" || exit 1; done'
    # Run as the server's own user: some roots may not set limits of other users' processes.
    owner = psutil.Process(int(pids[0])).username()
    other = {"user": owner, "group": pwd.getpwnam(owner).pw_gid, "extra_groups": ()} if os.geteuid() == 0 else {}
    subprocess.run(["/bin/sh", "-c", script, "sh", *pids], check=True, capture_output=True, **other)


async def long_transaction(fleet: Fleet, fault: Fault) -> None:
    """Another session keeps a snapshot open for ``seconds``, so vacuum cannot remove rows deleted since."""
    async with _transaction(fleet) as say:
        await say("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        await say("SELECT count(*) FROM message")
        await asyncio.sleep(fault.seconds)


async def partition_locked(fleet: Fleet, fault: Fault) -> None:
    """Another session reads a passed partition for ``seconds``, while a daemon starts and tries to drop it."""
    async with _transaction(fleet) as say:
        day = await fleet.sql("SELECT to_char(now() - interval '4 days', 'YYYYMMDD')")
        with suppress(asyncpg.DuplicateTableError):
            await fleet.sql(
                f"CREATE TABLE message_p{day} PARTITION OF message FOR VALUES FROM"
                f" (date '{day}'::timestamptz) TO ((date '{day}' + 1)::timestamptz)"
            )
        await say(f"LOCK TABLE message_p{day} IN ACCESS SHARE MODE")
        daemon = fleet.daemons[fault.target]
        async with daemon.meant():
            await daemon.kill()
            await daemon.start()
        await asyncio.sleep(fault.seconds)
        try:
            await daemon.process.event("partition not dropped", timeout=PATIENCE)
        except AssertionError as error:
            raise Missed(f"daemon {daemon.number} did not want to drop it meanwhile") from error
    await daemon.ready()


@asynccontextmanager
async def _transaction(fleet: Fleet) -> AsyncIterator[Callable[[str], Awaitable[str]]]:
    async with fleet.connected() as connection, connection.transaction():
        yield connection.execute
