"""Compact and restore from end to end, over Spark and a real store; and who dies or meets whom meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql import SparkSession

from delayer.audit import compact, restore, tasks
from delayer.audit.errors import JobFailed
from delayer.store import cancelling, segments
from delayer.store.partitions import DAY_MS, name_of
from delayer.store.postgres import PostgresStore
from delayer.store.quiet import quiet_lane
from delayer.store.segments import Fence
from tests.audit.backlog import everything, fill, lawful, letters, segments_of
from tests.conformance.store_contract import owned, parcel, release_all
from tests.integration.test_store_lane import opened, sql

WEEK_MS = 7 * DAY_MS
ROWS = 250
COUNT = 5_000
FEW = 2_000
"""For those who die: every worker that is started again takes seconds."""
pytestmark = pytest.mark.deadline(300)


def quiet(_what: str, _done: int, _of: int) -> None:
    """Nobody watches."""


async def pack(spark: SparkSession, database: str, rows: int = ROWS, after_ms: int = WEEK_MS) -> compact.Done:
    planned = await compact.plan(database, after_ms, rows)
    return await asyncio.to_thread(compact.run, spark, database, planned, rows, quiet)


async def bring_back(spark: SparkSession, database: str, within_ms: int | None = None) -> restore.Done:
    planned = await restore.plan(database, within_ms)
    return await asyncio.to_thread(restore.run, spark, database, planned, quiet)


@asynccontextmanager
async def filled(database: str, count: int = COUNT) -> AsyncIterator[PostgresStore]:
    """A store with a backlog in two lanes that nobody owns."""
    async with opened(database) as store:
        await fill(store, count, days=6.0 if count == COUNT else 2.0)
        yield store


@contextmanager
def fault(spark: SparkSession, point: str) -> Iterator[None]:
    """Python workers that are started meanwhile have this fault; each one by itself counts how often it is there."""
    environment = spark.sparkContext.environment
    environment["DELAYER_FAULT"] = point
    try:
        yield
    finally:
        del environment["DELAYER_FAULT"]


# ---- from end to end


async def test_everything_goes_into_segments_and_comes_back_as_it_was(spark: SparkSession, database: str) -> None:
    async with filled(database) as store, sql(database) as admin:
        now = store.now_ms()
        async with owned(store) as [lane]:
            near = [parcel(now + n * DAY_MS, b"near") for n in range(1, 7)]
            await store.park(lane, [*near, parcel(now + 12 * DAY_MS, b"keyed", key=b"k")], [])
        before = await everything(database)
        days = await admin.fetchval("SELECT count(*) FROM pg_inherits WHERE inhparent = 'message'::regclass")
        done = await pack(spark, database)
        assert not done.lost and not done.broken
        assert (done.total("messages"), await everything(database)) == (COUNT, before)
        counters = await lawful(database)
        assert (counters["compacted"], counters["restored"]) == (COUNT, 0)
        assert sorted(row["body"] for row in await admin.fetch("SELECT body FROM message")) == [b"keyed"] + 6 * [
            b"near"
        ]
        found = await segments_of(database)
        assert done.total("segments") == len(found) >= COUNT / ROWS
        assert all(row["messages"] <= ROWS for row in found)
        # The keyed row keeps its day; the other days of the far future are gone.
        assert name_of((now + 12 * DAY_MS) // DAY_MS) in done.shrunk.vacuumed
        assert len(done.shrunk.dropped) >= 5
        left = await admin.fetchval("SELECT count(*) FROM pg_inherits WHERE inhparent = 'message'::regclass")
        assert left == days - len(done.shrunk.dropped)
        assert done.shrunk.bytes_after < done.shrunk.bytes_before / 3

        again = await pack(spark, database)
        assert (again.total("messages"), again.shrunk.dropped) == (0, ())

        back = await bring_back(spark, database)
        assert (back.messages, back.segments, back.gone, back.lost, back.broken) == (COUNT, len(found), 0, [], [])
        assert await everything(database) == before
        assert await segments_of(database) == []
        counters = await lawful(database)
        assert (counters["compacted"], counters["restored"]) == (COUNT, COUNT)
        in_default = await admin.fetchval("SELECT count(*) FROM message_default")
        assert in_default == 0, "partitions are made before the rows come back"


async def test_a_part_of_the_segments_is_restored(spark: SparkSession, database: str) -> None:
    async with filled(database):
        before = await everything(database)
        await pack(spark, database)
        back = await bring_back(spark, database, within_ms=13 * DAY_MS)
        assert 0.3 * COUNT < back.messages < 0.8 * COUNT
        rest = await segments_of(database)
        assert sum(row["messages"] for row in rest) == COUNT - back.messages
        assert await everything(database) == before
        await lawful(database)


async def test_a_broken_segment_is_told_and_the_others_come_back(spark: SparkSession, database: str) -> None:
    async with filled(database, FEW), sql(database) as admin:
        await pack(spark, database)
        count = len(await segments_of(database))
        await admin.execute(
            "UPDATE segment SET packed = set_byte(packed, 100, get_byte(packed, 100) # 255)"
            " WHERE id = (SELECT min(id) FROM segment)"
        )
        back = await bring_back(spark, database)
        assert back.segments == count - 1
        assert len(back.broken) == 1
        [left] = await segments_of(database)
        assert left["broken"]
        await lawful(database)


async def test_cancelled_messages_do_not_come_back(spark: SparkSession, database: str) -> None:
    async with filled(database, FEW), sql(database) as admin:
        before = await everything(database)
        await pack(spark, database)
        chosen = sorted(before)[::7]
        outcome = await cancelling.cancel(admin, chosen)
        assert set(outcome) == set(chosen)
        await lawful(database)
        await bring_back(spark, database)
        assert set(await everything(database)) == set(before) - set(chosen)
        counters = await lawful(database)
        assert counters["cancelled"] == len(chosen)


# ---- somebody dies


@pytest.mark.parametrize("step", ["locked", "written", "verified", "deleted", "committed"])
async def test_the_worker_is_killed_while_it_packs(spark: SparkSession, database: str, step: str) -> None:
    """Until Spark gives up: every message is a row or in one segment, and the same command again finishes the work."""
    async with filled(database, FEW):
        before = await everything(database)
        with fault(spark, f"compact.{step}"), pytest.raises(JobFailed, match="packing"):
            await pack(spark, database)
        assert await everything(database) == before
        counters = await lawful(database)
        assert (counters["compacted"] > 0) == (step == "committed")
        done = await pack(spark, database)
        assert not done.lost
        assert await everything(database) == before
        assert (await lawful(database))["compacted"] == FEW


@pytest.mark.parametrize("step", ["locked", "copied", "deleted", "committed"])
async def test_the_worker_is_killed_while_it_restores(spark: SparkSession, database: str, step: str) -> None:
    async with filled(database, FEW):
        before = await everything(database)
        await pack(spark, database)
        with fault(spark, f"restore.{step}"), pytest.raises(JobFailed, match="restoring"):
            await bring_back(spark, database)
        assert await everything(database) == before
        counters = await lawful(database)
        assert (counters["restored"] > 0) == (step == "committed")
        done = await bring_back(spark, database)
        assert not done.lost
        assert await everything(database) == before
        assert (await lawful(database))["restored"] == FEW


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


def failed_tasks(spark: SparkSession, name: str) -> int:
    """Of the last job of that name."""
    tracker = spark.sparkContext.statusTracker()
    job = tracker.getJobInfo(max(tracker.getJobIdsForGroup(name)))
    assert job is not None
    stages = [tracker.getStageInfo(stage) for stage in job.stageIds]
    return sum(stage.numFailedTasks for stage in stages if stage is not None)


@asynccontextmanager
async def command(database: str, *arguments: str, fault: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`delayer …` in a process group of its own, with that fault in its workers."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("DELAYER_")}
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("delayer")), *arguments,
        env=ours | {"DELAYER_CONFIG": os.devnull, "DELAYER_STORE__URL": database, "DELAYER_FAULT": fault},
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
    """The driver, its JVM, and all workers at once, as when a machine goes down."""
    for process in tree(pid):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def stopped(pid: int) -> list[psutil.Process]:
    """The workers that stand at their fault point."""
    found = []
    for process in tree(pid):
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                found.append(process)
    return found


async def until_stopped(pid: int) -> None:
    """Until a worker stands at its fault point."""
    async with asyncio.timeout(120):
        while not stopped(pid):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)


async def until_quiet(database: str, application: str) -> None:
    """Until the server has noticed that those sessions are gone."""
    async with sql(database) as admin, asyncio.timeout(30):
        while await admin.fetchval("SELECT count(*) FROM pg_stat_activity WHERE application_name = $1", application):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


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
        assert done.lost
        assert await everything(database) == before
        assert 0 < (await lawful(database))["compacted"] == done.total("messages") < COUNT
        assert not (await pack(spark, database)).lost
        assert await everything(database) == before
        assert (await lawful(database))["compacted"] == COUNT


# ---- several at once


async def test_two_jobs_at_once_share_the_rows(spark: SparkSession, database: str) -> None:
    async with filled(database):
        before = await everything(database)
        one, two = await asyncio.gather(pack(spark, database), pack(spark, database))
        assert not one.lost and not two.lost
        assert one.total("messages") + two.total("messages") == COUNT
        assert await everything(database) == before
        await lawful(database)
        back = await asyncio.gather(bring_back(spark, database), bring_back(spark, database))
        assert sum(one.messages for one in back) == COUNT
        assert not any(one.lost for one in back)
        assert await everything(database) == before
        await lawful(database)


async def test_packing_and_restoring_at_once(spark: SparkSession, database: str) -> None:
    """A restorer undoes what a packer does, as with a limit below restore_ahead; nothing is lost on the way."""
    async with filled(database):
        before = await everything(database)
        packing = asyncio.create_task(pack(spark, database, rows=200))
        while not packing.done():
            await bring_back(spark, database)
        await packing
        assert await everything(database) == before
        await lawful(database)


async def test_a_lane_that_changed_its_owner_takes_nothing_more(database: str) -> None:
    """The driver of a restore is gone and somebody owns its lane: its executors are refused."""
    async with filled(database, FEW) as store, sql(database) as admin:
        before = await everything(database)
        planned = await compact.plan(database, WEEK_MS, ROWS)
        for window in planned.windows:
            await compact.pack_window(admin, window, ROWS)
        [first, *_] = await segments_of(database)
        async with quiet_lane(database, "test") as lane:
            fence = Fence(lane.number, lane.epoch)
        async with quiet_lane(database, "another") as lane:
            assert lane.number == fence.number, "the lane that was given up is taken again"
            found = await restore.restore_segment(admin, fence, first["id"])
        assert found.lost is not None
        assert re.search("owner", found.lost)
        assert await everything(database) == before
        await lawful(database)
        async with owned(store) as [lane]:
            assert await release_all(lane) == []


# ---- the edge


async def test_a_quiet_lane_is_none_that_somebody_waits_for(database: str) -> None:
    async with opened(database) as store:
        async with owned(store, 3) as [soon, later, empty]:
            await store.park(soon, [parcel(store.now_ms() + 5_000)], [])
            await store.park(later, letters(1, 1, store.now_ms()), [])
            numbers = soon.number, later.number, empty.number
        async with quiet_lane(database, "a") as one, quiet_lane(database, "b") as two, quiet_lane(database, "c") as new:
            assert (one.number, two.number) == (numbers[2], numbers[1])
            assert new.number not in numbers


def test_rounds_are_short_for_what_is_due_soon() -> None:
    now = 1_000_000_000

    def listed(due_ms: int) -> segments.Listed:
        return segments.Listed(0, 1, due_ms, due_ms, 1, 0, 1, 1, now, None)

    soon = [listed(now + n) for n in range(20)]
    later = [listed(now + restore.SOON_MS + n) for n in range(restore.ROUND + 1)]
    found = restore.rounds(restore.Plan(now, [*soon, *later]))
    assert [len(part) for part in found] == [8, 8, 4, restore.ROUND, 1]
    assert [one for part in found for one in part] == [*soon, *later]
    assert restore.rounds(restore.Plan(now, [])) == []


def test_masters_that_try_again() -> None:
    assert tasks.with_retries(None) == "local[*,4]"
    assert tasks.with_retries("local") == "local[1,4]"
    assert tasks.with_retries("local[2]") == "local[2,4]"
    assert tasks.with_retries("local[*]") == "local[*,4]"
    assert tasks.with_retries("local[2,7]") == "local[2,7]"
    assert tasks.with_retries("spark://host:7077") == "spark://host:7077"


async def run_delayer(database: str, *arguments: str) -> tuple[int, str, str]:
    async with command(database, *arguments, fault="") as process:
        stdout, stderr = await process.communicate()
        assert process.returncode is not None
        return process.returncode, stdout.decode(), stderr.decode()


async def test_the_commands(database: str) -> None:
    async with filled(database, FEW):
        before = await everything(database)
        code, told, _ = await run_delayer(database, "compact", "--dry-run", "--json")
        planned = json.loads(told)
        assert (code, planned["messages"], planned["keyed"], planned["segments"]) == (0, FEW, 0, 1)
        assert planned["raw_bytes"] > FEW * 200
        code, told, wrong = await run_delayer(database, "compact", "--rows", "250", "--master", "local[2]", "--json")
        assert code == 0, wrong
        done = json.loads(told)
        assert done["messages"] == FEW
        assert done["disk_bytes"]["after"] < done["disk_bytes"]["before"]
        assert done["partitions"]["dropped"]
        code, told, wrong = await run_delayer(database, "compact")
        assert (code, "Nothing to pack." in told, wrong) == (0, True, ""), "and no Java is started for that"
        code, told, _ = await run_delayer(database, "restore", "--all", "--dry-run")
        assert code == 0
        assert told.startswith("2,000 messages in ")
        code, told, wrong = await run_delayer(database, "restore", "--all", "--master", "local[2]")
        assert code == 0, wrong
        assert "2,000 messages of" in told
        assert "Traceback" not in wrong
        assert await everything(database) == before
        await lawful(database)


async def test_a_store_out_of_reach(database: str) -> None:
    nowhere = re.sub(r":\d+/", ":1/", database)
    for arguments in (["compact"], ["restore", "--all"]):
        code, told, wrong = await run_delayer(nowhere, *arguments)
        assert (code, told) == (3, "")
        assert wrong.startswith("delayer: the store is out of reach")
    code, told, wrong = await run_delayer(database, "compact")
    assert code == 1
    assert "delayer db upgrade" in wrong


async def test_java_is_missing(database: str, tmp_path: Path) -> None:
    async with filled(database, FEW):
        before = os.environ.get("JAVA_HOME")
        os.environ["JAVA_HOME"] = str(tmp_path)
        try:
            code, told, wrong = await run_delayer(database, "compact")
        finally:
            if before is None:
                del os.environ["JAVA_HOME"]
            else:
                os.environ["JAVA_HOME"] = before
        assert (code, told) == (3, "")
        assert "Java is missing" in wrong
