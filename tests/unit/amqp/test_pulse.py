"""Heartbeats on a clock of our own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest
from pamqp import frame
from pamqp.heartbeat import Heartbeat

from delayer.amqp import handshake
from delayer.amqp.connection import Pulse
from delayer.amqp.framing import Outlet, commands
from delayer.amqp.handshake import Limits


class Clock:
    """The two methods of a loop that a Pulse uses, and a hand to move the time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[tuple[float, Callable[[], None], asyncio.TimerHandle]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        handle = cast(asyncio.TimerHandle, self)
        self.timers.append((when, callback, handle))
        return handle

    def cancel(self) -> None:
        self.timers.clear()

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self.timers and min(self.timers)[0] <= until:
            timer = min(self.timers)
            self.timers.remove(timer)
            self.now = max(self.now, timer[0])
            timer[1]()
        self.now = until


class Ends:
    """A Pulse, and what it did."""

    def __init__(self, heartbeat: float) -> None:
        self.clock = Clock()
        self.beats: list[float] = []
        self.losses: list[float] = []
        loop = cast(asyncio.AbstractEventLoop, self.clock)
        self.outlet = Outlet(loop)
        self.outlet.attach(cast(asyncio.WriteTransport, self))
        self.pulse = Pulse(loop, self.outlet, lambda _: self.losses.append(self.clock.now - 1000))
        self.pulse.start(heartbeat)

    # The transport.

    def set_write_buffer_limits(self, high: int) -> None:
        assert high > 0

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        assert data == frame.marshal(Heartbeat(), 0)
        self.beats.append(self.clock.now - 1000)

    def hear(self, seconds: float, every: float = 1.0) -> None:
        for _ in range(int(seconds / every)):
            self.clock.advance(every)
            self.pulse.read_at = self.clock.now


def test_beats_when_nothing_is_written() -> None:
    ends = Ends(10.0)
    ends.hear(12.0)
    assert ends.beats == [5.0, 10.0]
    ends.outlet.written_at = ends.clock.now
    ends.hear(8.0)
    assert ends.beats == [5.0, 10.0, 17.0]
    assert ends.losses == []


def test_silence_for_twice_the_heartbeat_is_a_loss() -> None:
    ends = Ends(10.0)
    ends.hear(3.0)
    ends.clock.advance(19.9)
    assert ends.losses == []
    ends.clock.advance(100.0)
    assert ends.losses == [24.0]  # once, after one more look
    assert ends.clock.timers == []


def test_silence_while_we_do_not_read_is_none() -> None:
    ends = Ends(10.0)
    ends.pulse.reading = False
    ends.clock.advance(500.0)
    assert ends.losses == []
    assert len(ends.beats) == 100
    ends.pulse.reading = True
    ends.pulse.read_at = ends.clock.now
    ends.clock.advance(25.0)
    assert ends.losses == [521.0]


def test_a_stop_of_the_whole_process_is_no_loss() -> None:
    """The timer may run before the socket is looked at: what waits there counts."""
    ends = Ends(10.0)
    late = ends.clock.timers[0]
    ends.clock.timers.clear()
    ends.clock.now += 300.0
    late[1]()
    assert ends.losses == []
    ends.pulse.read_at = ends.clock.now
    ends.hear(25.0)
    assert ends.losses == []


@pytest.mark.parametrize("stop_first", [False, True])
def test_no_heartbeat(stop_first: bool) -> None:
    ends = Ends(10.0 if stop_first else 0.0)
    ends.pulse.stop()
    ends.pulse.stop()
    ends.clock.advance(1000.0)
    assert (ends.beats, ends.losses) == ([], [])


@pytest.mark.parametrize(
    ("offered", "ours", "agreed"),
    [
        ((2047, 131072, 60), 20.0, (2047, 131072, 20.0)),
        ((0, 0, 60), 20.0, (65535, 131072, 20.0)),
        ((5, 8192, 5), 20.0, (5, 8192, 5.0)),
        ((5, 4096, 0), 20.0, (5, 4096, 20.0)),
        ((5, 4096, 60), 0.0, (5, 4096, 0.0)),
        ((5, 4096, 0), 0.0, (5, 4096, 0.0)),
        ((5, 10, 0), 0.0, (5, 4096, 0.0)),
    ],
)
def test_limits(offered: tuple[int, int, int], ours: float, agreed: tuple[int, int, float]) -> None:
    limits = handshake.agree(commands.Connection.Tune(*offered), ours)
    assert limits == agreed


def test_a_part_of_a_second_is_promised_as_a_whole_one() -> None:
    assert handshake.tune_ok(Limits(1, 4096, 0.2)).heartbeat == 1
    assert handshake.tune_ok(Limits(1, 4096, 0.0)).heartbeat == 0
