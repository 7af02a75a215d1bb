"""Compact and restore on a cluster; an executor is killed in the middle of a segment, JVM and worker at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.audit.backlog import everything, lawful, segments_of
from tests.audit.cluster import Cluster
from tests.audit.compacting import FEW, command, filled, stopped, until_quiet
from tests.faults.place import eventually

pytestmark = [pytest.mark.long, pytest.mark.deadline(400)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as started:
        yield started


@pytest.mark.parametrize("step", ["compact.locked", "compact.written", "compact.deleted", "compact.committed"])
async def test_an_executor_is_killed_while_it_packs(cluster: Cluster, database: str, step: str, tmp_path: Path) -> None:
    async with filled(database, FEW):
        before = await everything(database)
        told = await killed(cluster, database, step, tmp_path, "compact", "--rows", "250")
        assert await everything(database) == before
        assert (await lawful(database))["compacted"] == FEW
        # What the dead executor had committed and could not tell is in segments, and not among what it told.
        assert FEW - 500 <= told["messages"] <= FEW


@pytest.mark.parametrize("step", ["restore.locked", "restore.copied", "restore.deleted", "restore.committed"])
async def test_an_executor_is_killed_while_it_restores(
    cluster: Cluster, database: str, step: str, tmp_path: Path
) -> None:
    async with filled(database, FEW):
        before = await everything(database)
        async with command(database, "compact", "--rows", "250", "--master", "local[1]", fault="") as process:
            await process.communicate()
        assert len(await segments_of(database)) >= 8
        told = await killed(cluster, database, step, tmp_path, "restore", "--all")
        assert await everything(database) == before
        assert await segments_of(database) == []
        assert (await lawful(database))["restored"] == FEW
        assert FEW - 500 <= told["messages"] <= FEW


def with_fault(cluster: Cluster, fault: str, settings: Path) -> dict[str, str]:
    """The environment of a job whose executors have this fault."""
    given = Path(cluster.environment["SPARK_CONF_DIR"], "spark-defaults.conf").read_text()
    (settings / "spark-defaults.conf").write_text(f"{given}spark.executorEnv.DELAYER_FAULT {fault}\n")
    return cluster.environment | {"SPARK_CONF_DIR": str(settings)}


async def killed(cluster: Cluster, database: str, step: str, settings: Path, *arguments: str) -> dict[str, int]:
    """Run the job on ``cluster`` with workers that stand still at their first ``step``; kill an executor that one of
    them belongs to, and let the others go on. What the command told, which ends well."""
    more = with_fault(cluster, f"{step}:1:stop", settings)

    async def standing() -> list[int]:
        return [one.pid for one in cluster.executors() if stopped(one.pid)]

    async with command(database, *arguments, "--json", "--master", cluster.url, fault="", **more) as process:
        ended = asyncio.create_task(process.communicate())
        [victim, *_] = await eventually(standing, bool, timeout=120.0)
        cluster.kill_executor(victim)
        while not ended.done():
            for one in (one for pid in await standing() for one in stopped(pid)):
                one.resume()
            await asyncio.wait([ended], timeout=0.1)
        told, said = await ended
    assert process.returncode == 0, said.decode()
    await until_quiet(database, f"delayer {arguments[0]}")
    found: dict[str, int] = json.loads(told[told.index(b"{") :])
    return found
