"""Compact and restore over Spark, and who dies meanwhile: a worker, a machine, the store."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from pyspark.sql import SparkSession

from delayer.audit.errors import JobFailed
from tests.audit.compacting import (
    COUNT,
    FEW,
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
from tests.support.store import owned, sql

pytestmark = pytest.mark.deadline(300)


@pytest.mark.parametrize("step", ["compact.written", "compact.committed", "restore.copied", "restore.committed"])
async def test_the_worker_is_killed(spark: SparkSession, database: str, step: str) -> None:
    """Until Spark gives up: every message is a row or in one segment, and the same command again finishes the work.
    The other steps are those of tests/faults/test_crash_segments.py."""
    verb, _, step_of_it = step.partition(".")
    job, kind, words = (pack, "compacted", "packing") if verb == "compact" else (bring_back, "restored", "restoring")
    async with filled(database, FEW):
        before = await everything(database)
        if verb == "restore":
            await pack(spark, database)
        with fault(spark, step), pytest.raises(JobFailed, match=words):
            await job(spark, database)
        await until_quiet(database, f"delayer {verb}")
        assert await everything(database) == before
        assert ((await lawful(database))[kind] > 0) == (step_of_it == "committed")
        assert not (await job(spark, database)).lost
        assert await everything(database) == before
        assert (await lawful(database))[kind] == FEW


@pytest.mark.parametrize("step", ["compact.written", "compact.committed"])
async def test_spark_starts_a_task_again(spark: SparkSession, database: str, step: str) -> None:
    """Every worker dies at its third segment, and the job is done all the same."""
    async with filled(database, FEW):
        before = await everything(database)
        with fault(spark, f"{step}:3"):
            done = await pack(spark, database)
        assert failed_tasks(spark, "packing") > 0
        assert not done.lost
        assert await everything(database) == before
        assert (await lawful(database))["compacted"] == FEW


@pytest.mark.parametrize(
    ("point", "arguments"),
    [
        ("compact.deleted:2:stop", ["compact", "--rows", "250", "--master", "local[2]"]),
        ("restore.copied:2:stop", ["restore", "--all", "--master", "local[2]"]),
    ],
    ids=["compact", "restore"],
)
async def test_the_machine_of_the_job_goes_down(
    spark: SparkSession, database: str, point: str, arguments: list[str]
) -> None:
    """Driver, JVM and workers are gone at once, in the middle of a transaction."""
    async with filled(database, FEW) as store:
        before = await everything(database)
        if arguments[0] == "restore":
            await pack(spark, database)
        async with command(database, *arguments, fault=point) as process:
            await until_stopped(process.pid)
            kill_tree(process.pid)
            await process.wait()
        await until_quiet(database, f"delayer {arguments[0]}")
        assert await everything(database) == before
        counters = await lawful(database)
        if arguments[0] == "compact":
            assert 0 < counters["compacted"] < FEW
            done: Any = await pack(spark, database)
        else:
            assert 0 < counters["restored"] < FEW
            async with owned(store, 2):  # the lane of the dead is free
                pass
            done = await bring_back(spark, database)
        assert not done.lost
        assert await everything(database) == before
        counters = await lawful(database)
        assert counters["compacted"] == FEW


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_the_command_is_stopped_in_the_middle_of_its_work(database: str, number: int, code: int) -> None:
    arguments = ["compact", "--rows", "250", "--master", "local[2]"]
    async with filled(database, FEW), sql(database) as admin, sql(database) as other:
        before = await everything(database)
        await other.execute("BEGIN; LOCK TABLE counter IN EXCLUSIVE MODE")
        async with command(database, *arguments, fault="") as process, asyncio.timeout(120):
            while not await admin.fetchval(COUNTING):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)
            os.killpg(process.pid, number)
            _, told = await process.communicate()
        assert (process.returncode, b"Traceback" in told) == (code, False), told.decode()
        assert b"\ndelayer: " in b"\n" + told  # The JVM, which is stopped too, may have the last word.
        await other.execute("ROLLBACK")
        await until_quiet(database, "delayer compact")
        assert await everything(database) == before
        await lawful(database)


COUNTING = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%INSERT INTO counter%'
"""


async def test_the_store_is_lost_meanwhile(spark: SparkSession, database: str) -> None:
    """Sessions are cut in the middle of a transaction: what is lost is told, what was committed stays."""
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
        # What was committed and not flushed when its session was cut is told as perhaps, and is in no total.
        assert 0 < done.total("messages") <= (await lawful(database))["compacted"] < COUNT
        assert not (await pack(spark, database)).lost
        assert await everything(database) == before
        assert (await lawful(database))["compacted"] == COUNT
