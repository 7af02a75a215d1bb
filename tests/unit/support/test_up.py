"""`make run`: a daemon that dies is started again, within limits, and its log is readable."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from tests.support import up
from tests.support.daemon import DaemonProcess
from tests.support.stack import Stack


class Mortal:
    """A daemon whose every life ends at once, with the next of these exit codes; the last one goes on."""

    pid = 1

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.starts = 0
        self.twice = asyncio.Event()

    async def wait(self, timeout: float) -> int:
        if not self.codes:
            await asyncio.sleep(timeout)
        return self.codes.pop(0)

    async def start(self) -> None:
        self.starts += 1
        if self.starts == 2:
            self.twice.set()


def stack_of(daemon: Mortal) -> Stack:
    stack = Stack("amqp://b", "postgresql://s", Path("/c.toml"))
    stack.daemon = cast(DaemonProcess, daemon)
    return stack


async def test_it_is_started_again_and_says_how_it_died(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(up, "PAUSE", 0.0)
    daemon, told = Mortal(-9, 1), asyncio.Event()
    keeping = asyncio.create_task(up.keep_alive(stack_of(daemon), told))
    async with asyncio.timeout(10):
        await daemon.twice.wait()
    keeping.cancel()
    shown = capsys.readouterr().out
    assert "the daemon was killed by SIGKILL" in shown
    assert "the daemon ended with exit code 1" in shown


async def test_not_for_ever(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(up, "PAUSE", 0.0)
    daemon = Mortal(*[2] * 100)
    async with asyncio.timeout(10):
        await up.keep_alive(stack_of(daemon), asyncio.Event())
    assert daemon.starts == up.STARTS
    assert "The servers stay, until Ctrl-C. To start it yourself: " in capsys.readouterr().out


async def test_not_after_ctrl_c() -> None:
    """Which reaches the daemon too."""
    daemon, told = Mortal(0), asyncio.Event()
    told.set()
    await up.keep_alive(stack_of(daemon), told)
    assert daemon.starts == 0


def test_the_log_is_shown_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    base = {"timestamp": "2026-11-21T11:08:56.7Z", "logger": "delayer.x"}
    up.show(base | {"level": "info", "event": "partition made", "day": 3})
    up.show(base | {"level": "info", "event": "mode switched", "before": "store", "now": "native"})
    up.show(base | {"level": "warning", "event": "message refused", "reason": "[red]x"})
    up.show("Traceback [of] something")
    assert capsys.readouterr().out.splitlines() == [
        "daemon:  11:08:56 info    mode switched   before=store now=native",
        "daemon:  11:08:56 warning message refused   reason=[red]x",
        "daemon:  Traceback [of] something",
    ]
