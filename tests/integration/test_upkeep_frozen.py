"""A process that freezes keeps neither the upkeep's lock nor what a park of it has locked."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import asyncpg
import pytest

from delayer.store import pool
from delayer.store.rows import partitions
from tests.faults.place import eventually
from tests.integration.test_store_lane import opened, sql


async def test_the_upkeep_s_session_ends_when_it_says_nothing(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is held between statements."""
    seen, make_ahead = [], partitions.make_ahead

    async def noted(connection: asyncpg.Connection, *more: Any) -> None:
        seen.append(await connection.fetchval("SHOW idle_session_timeout"))
        await make_ahead(connection, *more)

    monkeypatch.setattr(partitions, "make_ahead", noted)
    async with opened(database, parkers=1) as store:
        await store.maintain()
        assert seen == ["15s"]
        async with pool.borrowed(store._pool) as connection:
            assert await connection.fetchval("SHOW idle_session_timeout") == "0", "a park may come after an hour"
        async with sql(database) as other:
            await other.execute("SELECT pg_advisory_lock('message'::regclass::oid::int, 2)")
            await store.maintain()
            assert seen == ["15s"]
            async with pool.borrowed(store._pool) as connection:
                assert await connection.fetchval("SHOW idle_session_timeout") == "0"


COPYING = """
import asyncio, sys
from delayer.store import pool

async def silent():
    yield b""
    await asyncio.Event().wait()

async def main(url):
    connection = await pool.connect_plain(url, "delayer park")
    await connection.copy_to_table("counter", source=silent(), timeout=300)

asyncio.run(main(sys.argv[1]))
"""


async def test_a_park_that_froze_in_its_copy_is_ended(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(database) as store, sql(database) as admin:
        copies = (
            "SELECT wait_event FROM pg_stat_activity"
            " WHERE datname = current_database() AND query LIKE 'COPY%' AND state = 'active'"
        )
        parking = await asyncio.create_subprocess_exec(sys.executable, "-c", COPYING, database)
        try:
            await eventually(lambda: admin.fetchval(copies), lambda found: found == "ClientRead")
            os.kill(parking.pid, signal.SIGSTOP)
            await store.maintain()
            assert await admin.fetchval(copies) == "ClientRead", "it may be slow"
            monkeypatch.setattr(partitions, "FROZEN_SECONDS", 0.0)
            await store.maintain()
            await eventually(lambda: admin.fetchval(copies), lambda found: found is None)
        finally:
            parking.kill()
            await parking.wait()
