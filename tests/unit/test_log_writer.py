"""Whoever reads the log may stop: nobody waits for it, memory is bounded, and what is missing is said."""

from __future__ import annotations

import json
import os
import pty
import select
import socket
import subprocess
import sys
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from delayer import log_writer
from delayer.log_writer import LogWriter, sender

MANY = 20_000
LINE = "{:06d} " + "x" * 193
ROOM = 200_000


@dataclass
class Reader:
    """What ``inlet`` is for, read here when somebody says so."""

    inlet: int
    outlet: int
    seen: bytes = b""
    gaps: list[int] = field(default_factory=list)

    def writer(self) -> LogWriter:
        send = sender(self.inlet)
        assert send is not None
        return LogWriter(self.inlet, send, room=ROOM, told=self.gaps.append)

    def read(self, until: Callable[[], bool], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, self.seen[-200:]
            if select.select([self.outlet], [], [], 0.02)[0]:
                self.seen += os.read(self.outlet, 1 << 16)

    @property
    def lines(self) -> list[str]:
        """The whole ones: of a line in pieces the end may come by itself."""
        return self.seen.decode().split("\n")[:-1]

    def close(self) -> None:
        for descriptor in (self.inlet, self.outlet):
            os.close(descriptor)


def a_pipe() -> Reader:
    outlet, inlet = os.pipe()
    return Reader(inlet, outlet)


def a_socket() -> Reader:
    """As systemd gives it to its services."""
    ours, theirs = socket.socketpair()
    return Reader(ours.detach(), theirs.detach())


def a_terminal() -> Reader:
    outlet, inlet = pty.openpty()
    tty.setraw(inlet)
    return Reader(inlet, outlet)


@pytest.fixture(params=["pipe", "socket", "terminal", "pipe of another user"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    if request.param == "pipe of another user":

        def forbidden(path: str, flags: int) -> int:
            raise PermissionError(path)

        monkeypatch.setattr(log_writer.os, "open", forbidden)
    with closing({"socket": a_socket, "terminal": a_terminal}.get(request.param, a_pipe)()) as this:
        yield this


def write_all(writer: LogWriter, count: int) -> None:
    for number in range(count):
        writer.write(LINE.format(number) + "\n")


def test_who_stands_still_holds_nobody_up(reader: Reader) -> None:
    """Everything up to the gap comes, in order and whole; the gap has its number; afterwards all is as before."""
    writer = reader.writer()
    threads = threading.active_count()
    writing = threading.Thread(target=partial(write_all, writer, MANY), daemon=True)
    writing.start()
    writing.join(20)
    assert not writing.is_alive(), "it waits for its reader"
    assert writer._bytes <= ROOM
    assert threading.active_count() == threads + 1
    reader.read(lambda: bool(reader.gaps))
    reader.read(lambda: len(reader.lines) + reader.gaps[0] == MANY)
    assert reader.lines == [LINE.format(number) for number in range(len(reader.lines))]
    assert len(reader.lines) * 201 > ROOM
    writer.write("after\n")
    reader.read(lambda: reader.seen.endswith(b"after\n"))
    reader.read(lambda: threading.active_count() == threads)
    assert len(reader.gaps) == 1


def test_who_is_slow_loses_nothing(reader: Reader) -> None:
    writer = reader.writer()
    for turn in range(20):
        for number in range(200):
            writer.write(LINE.format(turn * 200 + number) + "\n")
        reader.read(lambda turn=turn: len(reader.lines) >= turn * 200)
    reader.read(lambda: len(reader.lines) == 4_000)
    assert reader.lines == [LINE.format(number) for number in range(4_000)]
    assert reader.gaps == []


def test_a_line_longer_than_what_fits_comes_whole(reader: Reader) -> None:
    writer = reader.writer()
    long = ["y" * 3 * ROOM, "z" * 70_000]
    for one in long:
        writer.write(one + "\n")
        reader.read(lambda one=one: reader.seen.endswith(one[-9:].encode() + b"\n"))
    assert reader.lines == long


def test_the_end_waits_for_a_slow_reader_and_not_for_one_that_stands(reader: Reader) -> None:
    writer = reader.writer()
    write_all(writer, MANY)
    began = time.monotonic()
    writer.finish(0.2)
    assert 0.1 < time.monotonic() - began < 5
    reading = threading.Thread(target=partial(reader.read, lambda: bool(reader.gaps)), daemon=True)
    reading.start()
    writer.finish(20)
    assert writer._bytes == 0
    reading.join(20)
    assert reader.gaps


def test_from_many_threads_every_line_is_whole(reader: Reader) -> None:
    writer = reader.writer()
    writing = [threading.Thread(target=partial(write_all, writer, 200), daemon=True) for _ in range(4)]
    for thread in writing:
        thread.start()
    reader.read(lambda: len(reader.lines) == 800)
    assert sorted(reader.lines) == sorted(LINE.format(number) for number in range(200) for _ in range(4))


def test_a_line_that_comes_of_writing_one(reader: Reader) -> None:
    """A warning of what is collected as garbage just then."""
    inner: list[LogWriter] = []
    send = sender(reader.inlet)
    assert send is not None

    def sending(data: bytes) -> int:
        if data == b"outer\n":
            inner[0].write("inner\n")
        return send(data)

    inner.append(LogWriter(reader.inlet, sending, told=reader.gaps.append))
    inner[0].write("outer\n")
    reader.read(lambda: len(reader.lines) == 2)
    assert reader.lines == ["outer", "inner"]


@pytest.mark.parametrize("stuck", [False, True])
def test_a_reader_that_has_gone_is_nobodys_trouble(stuck: bool) -> None:
    reader = a_pipe()
    writer = reader.writer()
    threads = threading.active_count()
    if stuck:
        write_all(writer, MANY)
    os.close(reader.outlet)
    deadline = time.monotonic() + 10
    while threading.active_count() > threads or writer._bytes:
        assert time.monotonic() < deadline
        writer.write("nobody hears it\n")
    began = time.monotonic()
    writer.write("nobody hears it\n")
    writer.finish(10)
    assert time.monotonic() - began < 5
    assert reader.gaps == []
    os.close(reader.inlet)


def test_what_others_have_of_it_stays_as_it_was(reader: Reader) -> None:
    reader.writer().write("one\n")
    assert os.get_blocking(reader.inlet)


def test_a_file_needs_none_of_this(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file, Path(os.devnull).open("w") as nothing:
        assert LogWriter.on(file) is None
        assert LogWriter.on(nothing) is None
    assert LogWriter.on(file) is None, "it is closed"


GAP = """
import sys
from delayer import telemetry
import structlog
telemetry.never_wait()
telemetry.configure("json", "info")
log = structlog.get_logger("delayer.test")
for number in range(40_000):
    log.info("stopped", number=number)
print("written", flush=True)
sys.stdin.read(1)
log.info("ready")
telemetry.configure("json", "error")
log.info("ready")
"""


def test_the_log_says_what_is_missing() -> None:
    """In a process of its own, as the daemon has it configured; what waits at its end is written before it ends."""
    with subprocess.Popen(
        [sys.executable, "-c", GAP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        assert process.stdout.readline() == b"written\n", "it did not wait for us"
        events, size = [], 0
        for line in process.stderr:
            size += len(line)
            events.append(json.loads(line))
            if events[-1]["event"] == "log lines dropped":
                process.stdin.write(b"!")
                process.stdin.close()
        assert process.wait(20) == 0
    names = [one["event"] for one in events]
    kept = names.count("stopped")
    assert names == ["stopped"] * kept + ["log lines dropped", "ready"]
    assert [one["number"] for one in events[:kept]] == list(range(kept))
    assert (events[kept]["lines"], events[kept]["level"]) == (40_000 - kept, "error")
    assert size > log_writer.ROOM
