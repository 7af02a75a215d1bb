"""The audit on a cluster, its executors JVMs of their own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from delayer.audit.findings import Report
from tests.audit.cluster import Cluster
from tests.audit.test_job import violated
from tests.audit.test_reading import fill, pack
from tests.rig.daemon import EXECUTABLE

pytestmark = [pytest.mark.long, pytest.mark.deadline(400)]

COUNT = 3_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as started:
        yield started


@pytest.fixture
def filled(database: str) -> str:
    fill(database, COUNT)
    pack(database)
    return database


async def begun(cluster: Cluster, url: str, work: Path) -> asyncio.subprocess.Process:
    ours = {
        name: value for name, value in os.environ.items() if not name.startswith(("DELAYER_", "PYSPARK_", "SPARK_"))
    }
    return await asyncio.create_subprocess_exec(
        str(EXECUTABLE), "audit", "--url", url, "--no-broker", "--json", "--master", cluster.url, "--work", str(work),
        env=ours | cluster.environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def exact(process: asyncio.subprocess.Process, work: Path) -> None:
    """It ends well, its figures are those of the store, and it leaves nothing."""
    told, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    report = Report.from_json(told.decode())
    assert violated(report) == {}
    assert report.totals.waiting + report.totals.packed == COUNT
    assert report.totals.packed > 500
    assert report.totals.held == 2
    assert sum(bar.messages for bar in report.calendar.days) == COUNT
    assert sum(share.messages for share in report.calendar.destinations) == COUNT
    assert names(work) == []


def names(work: Path, pattern: str = "*") -> list[str]:
    return [path.name for path in work.glob(pattern)]


async def test_the_audit_on_a_cluster(cluster: Cluster, filled: str, tmp_path: Path) -> None:
    await exact(await begun(cluster, filled, tmp_path), tmp_path)
