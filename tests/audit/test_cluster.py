"""Audit and compact on a cluster with separate JVMs as executors; one of them is killed in the middle of its work."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from delayer.cli import submit
from tests.audit.cluster import Cluster
from tests.audit.compacting import FEW, command, everything, filled, lawful, stopped, until_quiet
from tests.audit.test_job import ODD
from tests.audit.test_reading import execute, fill, pack
from tests.support.daemon import EXECUTABLE
from tests.support.place import eventually
from tests.support.postgres import Postgres
from tests.support.proxy import Proxy

pytestmark = [pytest.mark.long, pytest.mark.deadline(400)]

COUNT = 3_000
SLOW = 40_000
"""Bytes a second; the store has about a megabyte."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as started:
        yield started


@pytest.fixture
def backlog(database: str) -> str:
    fill(database, COUNT)
    # A cluster takes long, and held messages would be overdue by then.
    execute(database, "UPDATE held SET retry_at = now() + interval '1 day'")
    pack(database)
    return database


async def begun(
    cluster: Cluster, url: str, work: Path, program: Sequence[str] = (str(EXECUTABLE),), **environ: str
) -> asyncio.subprocess.Process:
    ours = {
        name: value for name, value in os.environ.items() if not name.startswith(("DELAYER_", "PYSPARK_", "SPARK_"))
    }
    master = ["--master", cluster.url] if len(program) == 1 else []
    return await asyncio.create_subprocess_exec(
        *program, "--store-url", url, "audit", "--deep", "--no-broker", "--json", *master, "--work", str(work),
        env=ours | cluster.environment | environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def exact(process: asyncio.subprocess.Process, work: Path) -> str:
    """Check that the job succeeds, its figures match the store, and it leaves no files. Return its stderr."""
    told, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    *_, last = told.decode().splitlines()  # spark-submit sends stderr there too
    report = json.loads(last)
    assert [run["rule"] for run in report["rules"] if run["violations"]] == []
    totals = report["totals"]
    assert totals["waiting"] + totals["packed"] == COUNT
    assert totals["packed"] > 500
    assert totals["held"] == 2
    assert sum(bar["messages"] for bar in report["calendar"]["days"]) == COUNT
    assert sum(share["messages"] for share in report["calendar"]["destinations"]) == COUNT
    assert names(work) == []
    return said.decode()


def names(work: Path, pattern: str = "*") -> list[str]:
    return [path.name for path in work.glob(pattern)]


async def test_the_audit_by_spark_submit(cluster: Cluster, backlog: str, tmp_path: Path) -> None:
    """An administrator of the cluster starts it so: with the entry script and a chosen interpreter."""
    starter = str(Path(sys.executable).parent / "spark-submit")
    program = [starter, "--master", cluster.url, "--conf", f"spark.pyspark.python={sys.executable}", submit.__file__]
    await exact(await begun(cluster, backlog, tmp_path, program, PYSPARK_DRIVER_PYTHON=sys.executable), tmp_path)


async def test_an_executor_is_killed_while_it_reads(
    cluster: Cluster, postgres: Postgres, backlog: str, tmp_path: Path
) -> None:
    """Spark restarts its task on another executor, so nothing is missing or duplicated."""
    async with Proxy(postgres.port) as proxy:
        proxy.slow(bytes_per_second=SLOW)
        process = await begun(cluster, backlog.replace(f":{postgres.port}/", f":{proxy.port}/"), tmp_path)

        async def reading() -> list[int]:
            return cluster.connected_to(proxy.port)

        [victim, *_] = await eventually(reading, bool, timeout=180.0)
        cluster.kill_executor(victim)
        proxy.resume()
        await exact(process, tmp_path)


async def test_an_executor_is_killed_while_it_judges(cluster: Cluster, backlog: str, tmp_path: Path) -> None:
    """Its shuffle output is lost, and Spark computes it again."""
    work = tmp_path / ODD
    process = await begun(cluster, backlog, work)

    async def extracted() -> list[str]:
        return names(work, "delayer-audit-*/message_key/_SUCCESS")

    await eventually(extracted, bool, timeout=180.0)
    cluster.kill_executor()
    assert "WARN WindowExec" not in await exact(process, work)


@pytest.mark.parametrize("step", ["compact.written", "compact.committed"])
async def test_an_executor_is_killed_in_the_middle_of_a_segment(
    cluster: Cluster, database: str, step: str, tmp_path: Path
) -> None:
    """JVM and worker die together while all workers are stopped at this step; then the rest continue."""
    arguments = ["compact", "--rows", "250", "--json", "--master", cluster.url]
    more = cluster.with_fault(f"{step}:1:stop", tmp_path)

    async def standing() -> list[int]:
        return [one.pid for one in cluster.executors() if stopped(one.pid)]

    async with filled(database, FEW):
        before = await everything(database)
        async with command(database, *arguments, fault="", **more) as process:
            ended = asyncio.create_task(process.communicate())
            [victim, *_] = await eventually(standing, bool, timeout=120.0)
            cluster.kill_executor(victim)
            while not ended.done():
                for one in (one for pid in await standing() for one in stopped(pid)):
                    one.resume()
                await asyncio.wait([ended], timeout=0.1)
            told, said = await ended
        assert process.returncode == 0, said.decode()
        await until_quiet(database, "delayer compact")
        assert await everything(database) == before
        assert (await lawful(database))["compacted"] == FEW
        # The dead executor could not report all of its commits.
        assert FEW - 500 <= json.loads(told[told.index(b"{") :])["messages"] <= FEW
