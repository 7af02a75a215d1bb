"""Compact over Spark, and restore, while the process, a worker, a machine or the store dies."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from pyspark.sql import SparkSession

from delayer.audit.errors import JobFailed
from tests.audit.compacting import (
    COUNT,
    FEW,
    ROWS,
    bring_back,
    command,
    everything,
    failed_tasks,
    fault,
    filled,
    kill_tree,
    lawful,
    pack,
    stopped,
    until_quiet,
    until_stopped,
)
from tests.support.place import compact_all, eventually
from tests.support.store import sql

pytestmark = pytest.mark.deadline(300)

COMPACT = ["compact", "--rows", "250", "--master", "local[2]"]


@pytest.mark.parametrize("step", ["restore.locked", "restore.copied", "restore.deleted", "restore.committed"])
async def test_restore_is_killed(database: str, step: str) -> None:
    async with filled(database, FEW), sql(database) as admin:
        before = await everything(database)
        await compact_all(admin, ROWS)
        async with command(database, "restore", "--all", fault=step) as process:
            assert await process.wait() == -signal.SIGKILL
        await until_quiet(database, "delayer restore")
        assert await everything(database) == before
        assert ((await lawful(database))["restored"] > 0) == (step == "restore.committed")
        assert not (await bring_back(database)).lost
        assert await everything(database) == before
        assert (await lawful(database))["restored"] == FEW


@pytest.mark.parametrize("step", ["compact.written", "compact.committed"])
async def test_the_worker_is_killed(spark: SparkSession, database: str, step: str) -> None:
    """Workers die until Spark gives up: every message is a row or in one segment, and another run finishes the work.
    The other steps are those of tests/faults/test_crash_segments.py."""
    async with filled(database, FEW):
        before = await everything(database)
        with fault(spark, step), pytest.raises(JobFailed, match="packing"):
            await pack(spark, database)
        await until_quiet(database, "delayer compact")
        assert await everything(database) == before
        assert ((await lawful(database))["compacted"] > 0) == (step == "compact.committed")
        assert not (await pack(spark, database)).lost
        assert await everything(database) == before
        assert (await lawful(database))["compacted"] == FEW


@pytest.mark.parametrize("step", ["compact.written", "compact.committed"])
async def test_spark_starts_a_task_again(spark: SparkSession, database: str, step: str) -> None:
    """Every worker dies at its third segment, and the job still finishes."""
    async with filled(database, FEW):
        before = await everything(database)
        with fault(spark, f"{step}:3"):
            done = await pack(spark, database)
        assert failed_tasks(spark, "packing") > 0
        assert not done.lost
        assert await everything(database) == before
        assert (await lawful(database))["compacted"] == FEW


async def test_the_machine_of_the_job_goes_down(spark: SparkSession, database: str) -> None:
    """Driver, JVM and workers die together, in the middle of a transaction."""
    async with filled(database, FEW):
        before = await everything(database)
        async with command(database, *COMPACT, fault="compact.deleted:2:stop") as process:
            await until_stopped(process.pid)
            kill_tree(process.pid)
            await process.wait()
        await until_quiet(database, "delayer compact")
        assert await everything(database) == before
        assert 0 < (await lawful(database))["compacted"] < FEW
        assert not (await pack(spark, database)).lost
        assert await everything(database) == before
        assert (await lawful(database))["compacted"] == FEW


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_the_command_is_stopped_in_the_middle_of_its_work(database: str, number: int, code: int) -> None:
    """Restore, which has no JVM, is in tests/integration/test_stops.py."""
    async with filled(database, FEW), sql(database) as admin, sql(database) as other:
        before = await everything(database)
        await other.execute("BEGIN; LOCK TABLE counter IN EXCLUSIVE MODE")
        async with command(database, *COMPACT, fault="") as process, asyncio.timeout(120):
            await eventually(lambda: admin.fetchval(COUNTING), timeout=120)
            os.killpg(process.pid, number)
            _, told = await process.communicate()
        assert (process.returncode, b"Traceback" in told) == (code, False), told.decode()
        assert b"\ndelayer: " in b"\n" + told  # The JVM is stopped as well, and may print last.
        await other.execute("ROLLBACK")
        await until_quiet(database, "delayer compact")
        assert await everything(database) == before
        await lawful(database)


COUNTING = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%INSERT INTO counter%'
"""


async def test_the_store_is_lost_meanwhile(spark: SparkSession, database: str) -> None:
    """Sessions are cut in the middle of a transaction: the job reports the lost work, and committed work stays."""
    async with filled(database), sql(database) as admin:
        before = await everything(database)
        with fault(spark, "compact.deleted:2:stop"):
            working = asyncio.create_task(pack(spark, database))
            await until_stopped(os.getpid())
            await admin.fetch(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = $1",
                "delayer compact",
            )
            while not working.done():
                for process in stopped(os.getpid()):
                    process.resume()
                await asyncio.wait([working], timeout=0.1)
        done = await working
        await until_quiet(database, "delayer compact")
        assert done.lost
        assert await everything(database) == before
        # A commit whose answer was lost is in no total.
        assert 0 < done.totals["messages"] <= (await lawful(database))["compacted"] < COUNT
        assert not (await pack(spark, database)).lost
        assert await everything(database) == before
        assert (await lawful(database))["compacted"] == COUNT
