"""A daemon that is still loading: a stop ends it immediately, and a reload waits. No server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon import DaemonProcess
from tests.support.place import eventually

NOWHERE = 'mode = "native"\nbroker.url = "amqp://127.0.0.1:1/"\n'


async def reading(file: Path, daemon: DaemonProcess) -> int:
    """Wait until the daemon reads from this named pipe; return its write end. A signal between its last instruction and
    the read would wait for the read's end: only a pipe takes that long."""
    pipe = await asyncio.to_thread(os.open, file, os.O_WRONLY)
    await eventually(Path(f"/proc/{daemon.pid}/wchan").read_text, lambda place: place.endswith("pipe_read"))
    return pipe


@pytest.fixture
def slow_file(tmp_path: Path) -> Path:
    """A configuration file (a named pipe) that the daemon reads when the test lets it."""
    file = tmp_path / "delayer.toml"
    os.mkfifo(file)
    return file


@pytest.mark.parametrize("order", [signal.SIGTERM, signal.SIGINT], ids=str)
async def test_a_loading_daemon_obeys_a_stop(slow_file: Path, order: signal.Signals) -> None:
    async with DaemonProcess({}, config=slow_file) as daemon:
        pipe = await reading(slow_file, daemon)
        daemon.signal(order)
        assert await daemon.wait() == 0
        assert daemon.events == [] and daemon.stray_lines == []
        os.close(pipe)


async def test_a_loading_daemon_reloads_later(slow_file: Path) -> None:
    """The log says there is no broker, so the daemon itself received the signal."""
    async with DaemonProcess({}, config=slow_file) as daemon:
        pipe = await reading(slow_file, daemon)
        daemon.reload()
        later = slow_file.with_name("later.toml")
        later.write_text(NOWHERE)
        later.replace(slow_file)
        os.write(pipe, NOWHERE.encode())
        os.close(pipe)
        await daemon.event("reloaded", where=lambda event: "127.0.0.1:1" in event["out_of_reach"][0])
        assert await daemon.stop() == 0


BUG = """
from delayer.daemon import app
from delayer.config.model import Settings
async def bug(*_):
    for number in range(2_000):
        app.log.info("ready", number=number)
    raise KeyError("a bug")
app._serve = bug
app.run_daemon(lambda: Settings.model_validate({}))
"""


@pytest.mark.parametrize("read", [True, False])
def test_a_bug_ends_the_process(read: bool) -> None:
    """The log contains the traceback, and the exit does not wait for a reader of stderr."""
    with subprocess.Popen([sys.executable, "-c", BUG], stderr=subprocess.PIPE) as process:
        assert process.stderr
        if not read:
            assert process.wait(20) == 1
        last = process.stderr.readlines()[-1]
        assert process.wait(20) == 1
    if read:
        event = json.loads(last)
        assert (event["event"], event["level"]) == ("failed", "critical")
        assert "KeyError: 'a bug'" in event["exception"]
