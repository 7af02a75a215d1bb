"""Compaction and bulk restore for tests: in this process, or as the command, with faults in it and its workers."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import SparkSession

from delayer.audit import compact, restore
from delayer.core.units import DAY_MS
from tests.support import rows
from tests.support.place import eventually
from tests.support.store import Store, opened, owned, parcel, sql

WEEK_MS = 7 * DAY_MS
FIRST_DAY = 10
"""Days from now; compaction packs messages due in more than 7 days."""
ROWS = 250
COUNT = 5_000
FEW = 2_000
"""For tests in which workers die: each restart of a worker takes seconds."""


def quiet(_what: str, _done: int, _of: int) -> None:
    """Report no progress."""


async def pack(
    spark: SparkSession, database: str, at_most: int = ROWS, after_ms: int = WEEK_MS
) -> compact.CompactionResult:
    planned = await compact.plan(database, after_ms, at_most)
    return await asyncio.to_thread(compact.run, spark, database, planned, at_most, quiet)


async def bring_back(database: str, within_ms: int | None = None) -> restore.RestoreResult:
    return await restore.run(database, await restore.plan(database, within_ms), quiet)


async def fill(store: Store, count: int, days: float = 6.0) -> None:
    """Park messages of a few hundred bytes in two lanes, due over this many days from FIRST_DAY on, in random order.
    Every fourth has a key."""
    chance, now = random.Random(7), store.now_upper_ms()
    letters = [
        parcel(
            now + int((FIRST_DAY + days * chance.random()) * DAY_MS),
            b'{"order": %d, "total": %d, "text": "%s"}' % (number, chance.randrange(10**6), b"reminder " * 20),
            properties=b"\x10\x00\x02",
            key=None if number % 4 else b"order-%d" % number,
        )
        for number in range(count)
    ]
    async with owned(store, 2) as lanes:
        for turn, lane in enumerate(lanes):
            await store.park(lane, letters[turn::2], [])


@asynccontextmanager
async def filled(database: str, count: int = COUNT) -> AsyncIterator[Store]:
    """A store with a backlog in two lanes without an owner."""
    async with opened(database) as store:
        await fill(store, count, days=6.0 if count == COUNT else 2.0)
        yield store


async def everything(database: str) -> dict[int, tuple[Any, ...]]:
    """All waiting messages by id, without their lanes. Checks that each exists once, as a row or in a segment."""
    async with sql(database) as admin, admin.transaction(isolation="repeatable_read", readonly=True):
        return rows.without_lanes(await rows.everything(admin))


async def lawful(database: str) -> dict[str, int]:
    """The counters, after checking lane by lane that they match the rows and the segments."""
    async with sql(database) as admin:
        return await rows.conserved(admin)


@contextmanager
def fault(spark: SparkSession, point: str) -> Iterator[None]:
    """Set this fault for Python workers started in the block; each counts its own passes of the point. The block exits
    when no worker is busy."""
    environment = spark.sparkContext.environment
    environment["DELAYER_FAULT"] = point
    try:
        yield
    finally:
        del environment["DELAYER_FAULT"]
        until_idle(spark)


def until_idle(spark: SparkSession) -> None:
    """Wait until every task has left its executor. When a task fails permanently, Spark ends the job first and then the
    remaining tasks, whose Python processes it kills after two seconds. A lingering session of such a task would lock
    rows, and the next job would skip them."""
    context = spark.sparkContext._jsc.sc()
    context.listenerBus().waitUntilEmpty()  # count also tasks that began a moment ago
    tracker = context.statusTracker()
    until = time.monotonic() + 60
    while running := sum(executor.numRunningTasks() for executor in tracker.getExecutorInfos()):
        assert time.monotonic() < until, f"{running} tasks are still at work"
        time.sleep(0.02)  # Spark announces the end of a task only to listeners inside the JVM.


def failed_tasks(spark: SparkSession, name: str) -> int:
    """The number of failed tasks in the last job of that name."""
    tracker = spark.sparkContext.statusTracker()
    job = tracker.getJobInfo(max(tracker.getJobIdsForGroup(name)))
    assert job is not None
    stages = [tracker.getStageInfo(stage) for stage in job.stageIds]
    return sum(stage.numFailedTasks for stage in stages if stage is not None)


@asynccontextmanager
async def command(
    database: str, *arguments: str, fault: str, program: Sequence[str] = (), **environ: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start `delayer …` in its own process group, with that fault in its workers; by ``program``, if any."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("DELAYER_")}
    process = await asyncio.create_subprocess_exec(
        *program, str(Path(sys.executable).with_name("delayer")), *arguments,
        env=ours | {"DELAYER_CONFIG": os.devnull, "DELAYER_STORE__URL": database, "DELAYER_FAULT": fault} | environ,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        kill_tree(process.pid)
        await process.wait()


def tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_tree(pid: int) -> None:
    """Kill the driver, its JVM, and all workers at once, as when a machine goes down."""
    for process in tree(pid):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def stopped(pid: int) -> list[psutil.Process]:
    """The workers stopped at their fault point."""
    found = []
    for process in tree(pid):
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                found.append(process)
    return found


async def until_stopped(pid: int) -> None:
    """Wait until a worker is stopped at its fault point."""
    await eventually(lambda: stopped(pid), timeout=120)


async def until_quiet(database: str, application: str) -> None:
    """Wait until the server has noticed that those sessions are gone."""
    count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1"
    async with sql(database) as admin:
        await eventually(lambda: admin.fetchval(count, application), lambda sessions: sessions == 0)


async def run_delayer(database: str, *arguments: str) -> tuple[int, str, str]:
    async with command(database, *arguments, fault="") as process:
        stdout, stderr = await process.communicate()
        assert process.returncode is not None
        return process.returncode, stdout.decode(), stderr.decode()
