"""Log lines for a reader that may stop reading, or read slowly: nobody waits for it.

A pipe or a socket that nobody reads takes some 64 KiB, and whoever writes the next line waits, as long as it takes: the
event loop, and with it every message, the watchdog and an order to stop. So what does not go at once waits here, in
bounded memory, and a thread hands it on when there is room. When the bound is reached lines are dropped and counted,
until everything before them is out: one gap, and a line behind it that says how many.

Only the daemon writes like this; the answer of a command may wait for who reads it.
"""

from __future__ import annotations

import os
import select
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TextIO

import structlog

__all__ = ["LogWriter", "sender"]

log = structlog.get_logger(__name__)

ROOM: Final = 4 << 20
"""Bytes that wait here at most: some ten thousand lines."""
PAUSE: Final = 0.05
"""Seconds until the next attempt where there was room for nothing although it was said that there is."""
LAST: Final = 0.3
"""Seconds for what still waits at the end of the process. Ten are promised for a stop, of which everything else takes
8.5 at most."""

Send = Callable[[bytes], int]
"""Hands over what there is room for now, and says how many bytes that was. Raises BlockingIOError where there is none,
another OSError where nobody reads any more."""


def sender(descriptor: int) -> Send | None:
    """How to write there without ever waiting; None where nobody reads who could stop (a file, /dev/null).

    The descriptor itself stays as it is. To make it non-blocking would make it so for everybody who has it too: the
    shell that started us, say.
    """
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(mode) or os.isatty(descriptor):
        try:
            ours = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:  # it is another user's, or there is no /proc here
            return lambda data: _send_if_there_is_room(descriptor, data)
        return lambda data: os.write(ours, data)
    if stat.S_ISSOCK(mode):  # cannot be opened again; has room for much more than this if it says that there is some
        return lambda data: _send_if_there_is_room(descriptor, data)
    return None


def _send_if_there_is_room(descriptor: int, data: bytes) -> int:
    """A pipe that says so has room for this much, unless another process is faster, which is the best to be had."""
    if not _room(descriptor, 0):
        raise BlockingIOError
    return os.write(descriptor, data[: select.PIPE_BUF])


def _room(descriptor: int, seconds: float | None) -> bool:
    """Whether it can be written to, or has nobody who reads, within so many seconds (None: whenever that may be)."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


def _say(lines: int) -> None:
    log.error("log lines dropped", lines=lines)


class LogWriter:
    """A stream for logging.StreamHandler. ``send`` is what :func:`sender` has for this descriptor; ``told`` hears of
    dropped lines, in some thread. Every method may be called from any thread."""

    encoding: Final = "utf-8"

    def __init__(self, descriptor: int, send: Send, *, room: int = ROOM, told: Callable[[int], None] = _say) -> None:
        self._descriptor = descriptor
        self._send = send
        self._room = room
        self._told = told
        # Not held while anything is waited for. Whoever collects garbage in here may log a warning, so: reentrant.
        self._lock = threading.RLock()
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._dropped = 0
        self._sending = False
        self._helper: threading.Thread | None = None

    @classmethod
    def on(cls, stream: TextIO) -> LogWriter | None:
        """In place of this stream; None where it may stay what it is."""
        try:
            descriptor = stream.fileno()
        except (OSError, ValueError):  # something in memory, or closed
            return None
        send = sender(descriptor)
        return cls(descriptor, send) if send else None

    def write(self, text: str) -> int:
        """Written now, or soon, or dropped; never waits."""
        line = text.encode(self.encoding, "backslashreplace")
        with self._lock:
            if self._dropped or (self._waiting and self._bytes + len(line) > self._room):
                self._dropped += 1
            else:
                first = not self._waiting
                self._waiting.append(line)
                self._bytes += len(line)
                if first:
                    self._hand_over()
            if self._waiting and self._helper is None:
                self._call_helper()
        return len(text)

    def flush(self) -> None:
        """Nothing: it is called for each line."""

    def finish(self, seconds: float = LAST) -> None:
        """For the end of the process: what waits, if it goes within these seconds."""
        until = time.monotonic() + seconds
        while not self._out() and (left := until - time.monotonic()) > 0:
            _room(self._descriptor, left)

    def _out(self) -> bool:
        """Hand over what there is room for, and say what was dropped when nothing is left; whether that is so."""
        with self._lock:
            self._hand_over()
            if self._waiting:
                return False
            dropped, self._dropped = self._dropped, 0
        if dropped:
            self._told(dropped)
        return not dropped

    def _hand_over(self) -> None:
        if self._sending:
            return  # a line that came of sending: it is sent after the one that it came of
        self._sending = True
        try:
            while self._waiting:
                line = self._waiting[0]
                sent = self._send(line)
                self._bytes -= sent
                if sent < len(line):
                    self._waiting[0] = line[sent:]
                else:
                    self._waiting.popleft()
        except BlockingIOError:
            return
        except OSError:  # whoever read it has gone: there is nobody to tell, and the daemon goes on
            self._waiting.clear()
            self._bytes = self._dropped = 0
        finally:
            self._sending = False

    def _call_helper(self) -> None:
        helper = threading.Thread(target=self._help, name="log lines", daemon=True)
        self._helper = helper
        try:
            helper.start()
        except RuntimeError:  # no further thread is to be had just now: the next line tries again
            self._helper = None

    def _help(self) -> None:
        """Until nothing waits any more."""
        while True:
            _room(self._descriptor, None)
            before = self._bytes
            if not self._out():
                if self._bytes >= before:
                    time.sleep(PAUSE)
                continue
            with self._lock:
                if not self._waiting:
                    self._helper = None
                    return
