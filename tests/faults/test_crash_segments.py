"""Compacting and restoring are killed at every step: each message is a row or in exactly one segment, nothing is lost
or counted twice, and doing it again finishes the work."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from delayer.store.rows.partitions import DAY_MS
from delayer.store.segments import catalog
from tests.integration.segments_store import START_MS, restore_all, store
from tests.integration.test_store_lane import sql
from tests.support.rows import compact, conserved, everything, packed, put, rows, waiting, without_lanes

COUNT = 300
AT_MOST = 100

COMPACT = f"""
import asyncio, sys
from delayer.store import pool
from tests.support.rows import compact
async def main():
    connection = await pool.connect(sys.argv[1], "victim")
    await compact(connection, rows={AT_MOST})
asyncio.run(main())
"""
RESTORE = """
import asyncio, sys
from delayer.store import pool
from delayer.store.segments import catalog
async def main():
    connection = await pool.connect(sys.argv[1], "victim")
    while await catalog.restore_one(connection, catalog.FOREVER_MS):
        pass
asyncio.run(main())
"""


async def killed(url: str, code: str, fault: str) -> None:
    """Run ``code`` until it kills itself, and wait until the server has noticed."""
    victim = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, url, env={**os.environ, "DELAYER_FAULT": fault}
    )
    assert await victim.wait() == -signal.SIGKILL
    async with sql(url) as admin:
        while await admin.fetchval("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'victim'"):
            pass


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("step", ["locked", "written", "verified", "deleted", "committed"])
async def test_compacting(database: str, step: str, nth: int) -> None:
    async with store(database, 3) as admin:
        before = {one.id: one for one in rows(COUNT, START_MS, span_ms=3 * DAY_MS)}
        await put(admin, before.values())
        await killed(database, COMPACT, f"compact.{step}:{nth}")
        assert await everything(admin) == before
        done = nth if step == "committed" else nth - 1
        assert (await catalog.count(admin)).segments == done
        assert (await conserved(admin))["compacted"] == COUNT - len(await waiting(admin))
        await compact(admin, rows=AT_MOST)
        assert await packed(admin) == before
        assert (await conserved(admin))["compacted"] == COUNT


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("step", ["locked", "copied", "deleted", "committed"])
async def test_restoring(database: str, step: str, nth: int) -> None:
    async with store(database, 3) as admin:
        before = {one.id: one for one in rows(COUNT, START_MS, span_ms=3 * DAY_MS)}
        await put(admin, before.values())
        made = len(await compact(admin, rows=AT_MOST))
        await killed(database, RESTORE, f"restore.{step}:{nth}")
        assert without_lanes(await everything(admin)) == without_lanes(before)
        done = nth if step == "committed" else nth - 1
        assert (await catalog.count(admin)).segments == made - done
        assert (await conserved(admin))["restored"] == len(await waiting(admin))
        await restore_all(admin)
        assert without_lanes(await waiting(admin)) == without_lanes(before)
        assert (await conserved(admin))["restored"] == COUNT
