"""An audit interrupted in the middle of its work leaves no files behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.audit import compacting
from tests.audit.compacting import kill_tree, tree
from tests.audit.test_reading import fill
from tests.support.daemon import EXECUTABLE
from tests.support.place import eventually
from tests.support.store import blocked, sql

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


async def begun(url: str, work: Path, *more: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        str(EXECUTABLE), "--store-url", url, *more, "audit", "--deep", "--work", str(work),
        "--conf", "spark.driver.memory=768m", "--conf", "spark.sql.shuffle.partitions=4",
        *([] if more else ["--no-broker"]),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def hurry(pid: int) -> None:
    """Give the audit and its JVM the priority of this test, on a machine with other work."""
    for one in tree(pid):
        with suppress(psutil.NoSuchProcess):
            for thread in one.threads():
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, thread.id, os.getpriority(os.PRIO_PROCESS, 0))


async def reached(process: asyncio.subprocess.Process, there: Callable[[], object]) -> None:
    """Wait until the audit has got this far."""

    last = 0.0

    async def look() -> object:
        nonlocal last
        assert process.returncode is None, "it ended before the test stopped it"
        if time.monotonic() > last + 1.0:  # Not on each poll, because it takes time.
            hurry(process.pid)
            last = time.monotonic()
        return there()

    await eventually(look, bool, timeout=240.0)


async def midway(url: str, work: Path) -> asyncio.subprocess.Process:
    """An audit in the middle of its work."""
    process = await begun(url, work)
    await reached(process, lambda: extracts(work))
    return process


def launched(pid: int) -> bool:
    """Whether a child of this process is the JVM, or the script that starts it has a child. A child between fork and
    exec is still Python, and prints a traceback at Ctrl-C; so may its parent in that moment."""
    return any(child.name() == "java" or child.children() for child in psutil.Process(pid).children())


SIGNALS = {"SIGTERM": (os.killpg, signal.SIGTERM, 143), "Ctrl-C": (os.killpg, signal.SIGINT, 130)}
STOPS = [
    ("starting the JVM", "SIGTERM"),
    ("starting the JVM", "Ctrl-C"),
    ("starting the JVM", "SIGTERM alone"),
    ("waiting for the store", "Ctrl-C"),
    ("reading", "SIGTERM"),
    ("reading", "SIGTERM alone"),
    ("judging", "Ctrl-C"),
    ("asking the broker", "Ctrl-C"),
]
"""The command takes SIGTERM as Ctrl-C. Only a JVM that gets it too, and works, makes a difference."""
SECONDS = 20.0
"""A stop takes less than 3 s on an idle machine."""


@pytest.mark.parametrize(("phase", "how"), STOPS)
async def test_a_stop_leaves_nothing(filled: str, tmp_path: Path, phase: str, how: str) -> None:
    """A stop by systemd, which also signals the JVM and the workers; Ctrl-C; and a kill of the command alone. The
    broker accepts a connection and never answers."""
    end, number, code = SIGNALS.get(how, (os.kill, signal.SIGTERM, 143))
    asked: list[asyncio.StreamWriter] = []
    async with sql(filled) as admin, sql(filled) as other:
        server = await asyncio.start_server(lambda _, writer: asked.append(writer), "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        if phase == "waiting for the store":
            await other.execute("BEGIN; LOCK TABLE counter")
        process = await begun(filled, tmp_path, "--broker-url", f"amqp://{host}:{port}")
        match phase:
            case "starting the JVM":
                await reached(process, lambda: names(tmp_path) and launched(process.pid))
            case "waiting for the store":
                await reached(process, lambda: list(tmp_path.glob("delayer-audit-*")))
                await blocked(admin, "LOCK TABLE message%")
            case "reading":
                await reached(process, lambda: extracts(tmp_path))
            case "judging":
                await reached(process, lambda: extracted(tmp_path))
            case "asking the broker":
                await reached(process, lambda: asked)
        began = time.monotonic()
        end(process.pid, number)
        try:
            async with asyncio.timeout(SECONDS):
                _, told = await process.communicate()  # stderr ends with the JVM
        finally:
            kill_tree(process.pid)
            await process.communicate()
            for writer in asked:
                writer.transport.abort()
            server.close()
            await server.wait_closed()
        print(f"{phase}, {how}: ended after {time.monotonic() - began:.1f} s")
    assert (process.returncode, names(tmp_path)) == (code, []), told.decode()
    assert b"Traceback" not in told, told.decode()
    assert told.splitlines()[-1].startswith(b"delayer: ")


@pytest.mark.parametrize("how", [*SIGNALS, "SIGTERM alone"])
async def test_a_stop_of_compact_that_starts_the_jvm(database: str, tmp_path: Path, how: str) -> None:
    end, number, code = SIGNALS.get(how, (os.kill, signal.SIGTERM, 143))
    async with compacting.filled(database, compacting.FEW):
        before = await compacting.everything(database)
        async with compacting.command(database, "compact", fault="", TMPDIR=str(tmp_path)) as process:
            await reached(process, lambda: names(tmp_path) and launched(process.pid))
            end(process.pid, number)
            async with asyncio.timeout(SECONDS):
                _, told = await process.communicate()  # stderr ends with the JVM
        assert (process.returncode, names(tmp_path)) == (code, []), told.decode()
        assert b"Traceback" not in told, told.decode()
        assert told.splitlines()[-1].startswith(b"delayer: ")
        assert await compacting.everything(database) == before
        assert (await compacting.lawful(database))["compacted"] == 0


async def test_a_lost_jvm_is_one_sentence(filled: str, tmp_path: Path) -> None:
    process = await midway(filled, tmp_path)
    [jvm] = psutil.Process(process.pid).children()
    jvm.kill()
    _, told = await process.communicate()
    assert (process.returncode, b"Traceback" in told) == (3, False), told.decode()
    assert told.endswith(b"the Java virtual machine of the job has ended\n")
    assert names(tmp_path) == []
