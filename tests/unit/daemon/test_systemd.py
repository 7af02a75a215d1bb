"""Messages to systemd, over a real socket; the watchdog's decision, with a clock of the test."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from delayer.daemon.systemd import LONGEST_ROUND, Notifier, Watchdog, condition
from tests.support.fakes import until


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """systemd's side: the value of NOTIFY_SOCKET, and the socket that receives the messages."""
    name = str(tmp_path / "s") if request.param == "path" else f"@delayer-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(name.replace("@", "\0", 1))
        server.settimeout(5)
        yield name, server


def test_messages_to_systemd(systemd: tuple[str, socket.socket]) -> None:
    name, server = systemd
    notifier = Notifier({"NOTIFY_SOCKET": name})

    def heard() -> list[str]:
        return server.recv(4096).decode().split("\n")

    notifier.ready("store mode, 2 lanes")
    assert heard() == ["READY=1", "STATUS=store mode, 2 lanes"]
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier.reloading()
    state, stamp = heard()
    assert state == "RELOADING=1"
    assert before <= int(stamp.removeprefix("MONOTONIC_USEC=")) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier.report()
    assert heard() == ["READY=1"]
    notifier.report("broker unreachable:\nREADY=1\n  forged")
    assert heard() == ["READY=1", "STATUS=broker unreachable: READY=1 forged"]
    notifier.feed_watchdog()
    assert heard() == ["WATCHDOG=1", "READY=1", "STATUS=broker unreachable: READY=1 forged"], "systemd may have lost it"
    notifier.stopping("settling")
    assert heard() == ["STOPPING=1", "STATUS=settling"]
    notifier.feed_watchdog()
    assert heard() == ["WATCHDOG=1"]


def test_a_reload_in_the_middle_of_a_start_does_not_end_it(systemd: tuple[str, socket.socket]) -> None:
    name, server = systemd
    notifier = Notifier({"NOTIFY_SOCKET": name})
    notifier.reloading()
    notifier.report("mode store; the last reload was refused: no broker")
    assert server.recv(4096) == b"STATUS=mode store; the last reload was refused: no broker"
    notifier.ready("mode store")
    assert server.recv(4096) == b"READY=1\nSTATUS=mode store"
    notifier.reloading()
    assert server.recv(4096).startswith(b"RELOADING=1\n")
    notifier.feed_watchdog()
    assert server.recv(4096) == b"WATCHDOG=1", "the state would end the reload"


def test_the_notifier_does_nothing_without_systemd() -> None:
    notifier = Notifier({"WATCHDOG_USEC": "30000000"})
    assert notifier.watchdog_interval is None
    notifier.ready("no socket takes this")
    notifier.stopping()


@pytest.mark.parametrize("address", ["/nowhere/at/all", "@no-listener-here"])
def test_a_dead_socket_is_only_logged(address: str) -> None:
    with structlog.testing.capture_logs() as logs:
        Notifier({"NOTIFY_SOCKET": address}).ready()
    assert [(one["event"], one["state"]) for one in logs] == [("notify failed", "READY=1")]


@pytest.mark.parametrize("address", ["vsock:2:1234", "fd:", "fd:x"])
def test_an_address_of_another_family_is_not_used(address: str) -> None:
    with structlog.testing.capture_logs() as logs:
        notifier = Notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "30000000"})
    assert notifier.watchdog_interval is None
    assert [one["event"] for one in logs] == ["notify socket unusable"]


@pytest.mark.parametrize(
    ("environ", "interval"),
    [
        ({}, None), ({"WATCHDOG_USEC": "30000000"}, 10.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 10.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None), ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None), ({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "me"}, None),
    ],
)  # fmt: skip
def test_watchdog_interval(environ: dict[str, str], interval: float | None) -> None:
    assert Notifier({"NOTIFY_SOCKET": "@x", **environ}).watchdog_interval == interval


def test_the_condition_follows_the_status_and_is_sent_once(systemd: tuple[str, socket.socket]) -> None:
    name, server = systemd
    notifier = Notifier({"NOTIFY_SOCKET": name})
    notifier.ready("mode store")
    for text in ("no broker", "no broker", ""):
        notifier.condition(text)
    notifier.condition("no store")
    notifier.ready("mode native")
    said = [server.recv(4096).decode().split("\n")[-1] for _ in range(5)]
    expected = ["mode store", "mode store; no broker", "mode store", "mode store; no store", "mode native; no store"]
    assert said == [f"STATUS={words}" for words in expected]


WELL: dict[str, Any] = {"connected": True, "blocked": False, "no_lane": "", "stuck": [], "intake": "active"}


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (WELL, "intake active"),
        (WELL | {"intake": "standby"}, "intake standby"),
        (WELL | {"connected": False, "intake": ""}, "the broker is out of reach"),
        (WELL | {"connected": False, "blocked": True, "intake": ""}, "the broker is out of reach"),
        (WELL | {"blocked": True}, "intake active; the broker accepts no publishes (a resource alarm)"),
        (
            WELL | {"stuck": ["lane 3", "queue 'delays'"]},
            "intake active; lane 3 does not advance; queue 'delays' does not advance",
        ),
        (WELL | {"no_lane": "no free lane in the store", "intake": ""}, "no free lane in the store"),
        (WELL | {"intake": ""}, "nothing is consumed yet"),
    ],
)
def test_words(seen: dict[str, Any], words: str) -> None:
    assert condition(**seen) == words


# The watchdog is fed only while every loop moves.


class Line(Notifier):
    """A notifier with this watchdog interval; counts the feeds."""

    def __init__(self, interval: float | None) -> None:
        super().__init__({})
        self.watchdog_interval = interval
        self.fed = 0

    def feed_watchdog(self) -> None:
        self.fed += 1


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


async def test_no_watchdog_is_fed_without_an_interval() -> None:
    line = Line(None)
    await Watchdog(line).feed(asyncio.Event())
    assert line.fed == 0


async def test_the_watchdog_is_fed_while_every_loop_makes_progress() -> None:
    line, clock, stopping = Line(0.0001), Clock(), asyncio.Event()
    watched = Watchdog(line, clock.monotonic)
    watched.beat("delays")
    watched.beat("lane 1")
    task = asyncio.create_task(watched.feed(stopping))
    await until(lambda: line.fed >= 2)
    clock.now += LONGEST_ROUND
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
    watched.beat("lane 1")  # it moved again
    await until(lambda: line.fed > fed)
    stopping.set()
    await task


async def test_an_ended_loop_does_not_stop_the_feeding() -> None:
    line, clock, stopping = Line(0.0001), Clock(), asyncio.Event()
    watched = Watchdog(line, clock.monotonic)
    watched.beat("lane 1")
    watched.forget("lane 1")
    watched.forget("lane 2")
    clock.now += 10 * LONGEST_ROUND
    task = asyncio.create_task(watched.feed(stopping))
    await until(lambda: line.fed >= 2)
    watched.beat("lane 1")  # a loop of that name may begin again
    clock.now += LONGEST_ROUND + 1
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
