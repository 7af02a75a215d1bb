"""An audit that ends in the middle of its work leaves no files."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.audit.test_reading import fill
from tests.support.daemon import EXECUTABLE
from tests.support.place import eventually

pytestmark = pytest.mark.deadline(300)


@pytest.fixture
def filled(database: str) -> str:
    fill(database)
    return database


def names(work: Path) -> list[str]:
    return [path.name for path in work.iterdir()]


def extracts(work: Path) -> list[str]:
    """The directories of runs below ``work``, once the runs are reading."""
    return names(work) if list(work.glob("delayer-audit-*/*")) else []


def extracted(work: Path) -> bool:
    """Whether a run has written its extract."""
    return bool(list(work.glob("delayer-audit-*/message_key/_SUCCESS")))


async def begun(url: str, work: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        str(EXECUTABLE), "--store-url", url, "audit", "--deep", "--no-broker", "--work", str(work),
        "--conf", "spark.driver.memory=768m",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


async def midway(url: str, work: Path) -> asyncio.subprocess.Process:
    """An audit in the middle of its work."""
    process = await begun(url, work)

    async def look() -> list[str]:
        assert process.returncode is None, "it ended before the test stopped it"
        return extracts(work)

    await eventually(look, bool, timeout=240.0)
    return process


@pytest.mark.parametrize(
    ("end", "number", "code"),
    [(os.kill, signal.SIGTERM, 143), (os.killpg, signal.SIGTERM, 143), (os.killpg, signal.SIGINT, 130)],
    ids=["alone", "with the JVM", "Ctrl-C"],
)
async def test_a_termination_leaves_nothing(
    filled: str, tmp_path: Path, end: Callable[[int, int], None], number: int, code: int
) -> None:
    """A stop by systemd, which also signals the JVM and the workers; a kill; and Ctrl-C."""
    process = await midway(filled, tmp_path)
    end(process.pid, number)
    _, told = await process.communicate()
    assert b"Traceback" not in told, told.decode()
    assert told.splitlines()[-1].startswith(b"delayer: ")
    assert names(tmp_path) == []
    assert process.returncode == code


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_a_stop_ends_a_jvm_that_starts(filled: str, tmp_path: Path, number: int, code: int) -> None:
    process = await begun(filled, tmp_path)
    await eventually(lambda: names(tmp_path) and psutil.Process(process.pid).children(), timeout=60.0)
    process.send_signal(number)
    async with asyncio.timeout(30):
        await process.communicate()  # stderr ends with the JVM
    assert (process.returncode, names(tmp_path)) == (code, [])


async def test_a_stop_ends_the_judging(filled: str, tmp_path: Path) -> None:
    """Spark runs the rules for many seconds, and the command ends while its tasks work."""
    process = await begun(filled, tmp_path)

    async def judging() -> bool:
        assert process.returncode is None, "it ended before the test stopped it"
        return extracted(tmp_path)

    await eventually(judging, bool, timeout=240.0)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGTERM)
    _, told = await process.communicate()
    print(f"ended after {time.monotonic() - began:.1f} s")
    assert (process.returncode, names(tmp_path)) == (143, []), told.decode()
    assert b"Traceback" not in told


async def test_a_lost_jvm_is_one_sentence(filled: str, tmp_path: Path) -> None:
    process = await midway(filled, tmp_path)
    [jvm] = psutil.Process(process.pid).children()
    jvm.kill()
    _, told = await process.communicate()
    assert (process.returncode, b"Traceback" in told) == (3, False), told.decode()
    assert told.endswith(b"the Java virtual machine of the job has ended\n")
    assert names(tmp_path) == []
