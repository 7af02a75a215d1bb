"""The watchdog is fed while every loop moves, and only then."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from delayer.daemon import systemd as module
from delayer.daemon.systemd import Notifier, Watchdog
from tests.support.fakes import until

LIMIT_SECONDS = 120.0


class Line(Notifier):
    """A line to a systemd that watches, or does not."""

    def __init__(self, interval: float | None) -> None:
        super().__init__({})
        self._interval = interval
        self.fed = 0

    @property
    def watchdog_interval(self) -> float | None:
        return self._interval

    def feed_watchdog(self) -> None:
        self.fed += 1


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


async def test_no_watchdog() -> None:
    line = Line(None)
    await Watchdog(line).feed(asyncio.Event())
    assert line.fed == 0


async def test_fed_while_every_loop_moves(clock: Clock) -> None:
    line, stopping = Line(0.0001), asyncio.Event()
    watched = Watchdog(line)
    watched.beat("delays")
    watched.beat("lane 1")
    task = asyncio.create_task(watched.feed(stopping))
    await until(lambda: line.fed >= 2)
    clock.now += LIMIT_SECONDS
    watched.beat("delays")
    await until(lambda: line.fed >= 4)
    with capture_logs() as logs:
        clock.now += 0.1
        await until(lambda: bool(logs))
        fed = line.fed
        await until(lambda: len(logs) >= 3)
    assert line.fed == fed
    assert logs[0]["event"] == "loops stalled"
    assert logs[0]["loops"] == ["lane 1"]
    watched.beat("lane 1")  # it went on after all
    await until(lambda: line.fed > fed)
    stopping.set()
    await task


async def test_a_loop_that_ended_is_not_missed(clock: Clock) -> None:
    line, stopping = Line(0.0001), asyncio.Event()
    watched = Watchdog(line)
    watched.beat("lane 1")
    watched.forget("lane 1")
    watched.forget("lane 2")
    clock.now += 10 * LIMIT_SECONDS
    task = asyncio.create_task(watched.feed(stopping))
    await until(lambda: line.fed >= 2)
    watched.beat("lane 1")  # and may begin again
    clock.now += LIMIT_SECONDS + 1
    with capture_logs() as logs:
        await until(lambda: bool(logs))
    stopping.set()
    await task


async def test_stopping_ends_the_feeding_at_once() -> None:
    line, stopping = Line(3600.0), asyncio.Event()
    task = asyncio.create_task(Watchdog(line).feed(stopping))
    await until(lambda: line.fed == 1)
    stopping.set()
    await task
