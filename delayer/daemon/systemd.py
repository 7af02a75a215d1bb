"""systemd: state reports (``Type=notify``), the watchdog, and the status line.

The protocol is a datagram of ``KEY=value`` lines to the socket that ``NOTIFY_SOCKET`` names. Without that variable,
nothing is sent. See sd_notify(3) and sd_watchdog_enabled(3).
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from delayer.retry import first_set

log = structlog.get_logger(__name__)

FEEDS: Final = 3
"""Feedings per watchdog timeout, so that one lost or late datagram does no harm."""
LONGEST_ROUND: Final = 120.0
"""Seconds that a round of a loop may take, such as a park tried three times, each stopped by the statement timeout."""


class Notifier:
    """The socket to systemd. Never raises, because the daemon must not stop over this socket."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        path = environ.get("NOTIFY_SOCKET", "")
        if path and path[0] not in "/@":
            # "vsock:…" is for virtual machines reporting to their host; a service never gets it.
            log.warning("notify socket unusable", path=path, reason="expected an absolute path or @abstract")
            path = ""
        self._address = "\0" + path[1:] if path.startswith("@") else path
        watched = _watchdog_seconds(environ) if self._address else None
        self.watchdog_interval = None if watched is None else watched / FEEDS
        """Seconds between feedings, a third of systemd's timeout; None if it does not watch this process."""
        self._status = ""
        self._condition = ""
        self._ready = False
        self._reloading = False

    def ready(self, status: str = "") -> None:
        self._ready = True
        self.report(status)

    def reloading(self) -> None:
        """Report that a reload begins, with the monotonic time by which systemd distinguishes it from earlier reloads.
        Reports nothing during a start, because systemd would mistake the end of the reload for the end of the start."""
        if self._ready:
            self._reloading = True
            now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            self._send(f"RELOADING=1\nMONOTONIC_USEC={now_us}")

    def report(self, status: str = "") -> None:
        """Report the line for ``systemctl status``, and READY=1 once ready, which also ends a reload."""
        self._status, self._reloading = status, False
        self._send("READY=1" if self._ready else "", self._words)

    def stopping(self, status: str = "") -> None:
        self._ready = False
        self._send("STOPPING=1", status)

    def condition(self, text: str) -> None:
        """Report the daemon's condition, for the end of that line."""
        if text != self._condition:
            self._condition = text
            self._send("", self._words)

    async def watch(self, look: Callable[[], str], stopping: asyncio.Event, every: float = 1.0) -> None:
        """Report the daemon's condition whenever it changes, until ``stopping`` is set; check ``every`` seconds."""
        while not stopping.is_set():
            self.condition(look())
            await first_set(stopping, seconds=every)

    @property
    def _words(self) -> str:
        return "; ".join(text for text in (self._status, self._condition) if text)

    def feed_watchdog(self) -> None:
        """Feed, and repeat READY=1, because the first may have been lost, and systemd would wait forever."""
        if self._ready and not self._reloading:
            self._send("WATCHDOG=1\nREADY=1", self._words)
        else:
            self._send("WATCHDOG=1")

    def _send(self, state: str, status: str = "") -> None:
        lines = [state] if state else []
        if status:
            lines.append(f"STATUS={' '.join(status.split())}")  # A line end would start a new key.
        if not self._address or not lines:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
                line.setblocking(False)
                line.connect(self._address)
                line.send("\n".join(lines).encode(), socket.MSG_DONTWAIT)
        except OSError as error:
            log.warning("notify failed", state=state.partition("\n")[0], reason=error.strerror or str(error))


def _watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    try:
        seconds = int(environ.get("WATCHDOG_USEC", "0")) / 1e6
        watched = int(environ.get("WATCHDOG_PID") or os.getpid())
    except (ValueError, OverflowError):
        return None
    return seconds if seconds > 0 and watched == os.getpid() else None


class Watchdog:
    """Feeds the watchdog while every loop makes progress. Satisfies ports.Heartbeat. A stalled loop stops the feeding;
    systemd then kills and restarts the daemon, and the guarantees hold as after any crash."""

    def __init__(self, notifier: Notifier, clock: Callable[[], float] = time.monotonic) -> None:
        self._notifier, self._clock = notifier, clock
        self._last: dict[str, float] = {}

    def beat(self, loop: str) -> None:
        self._last[loop] = self._clock()

    def forget(self, loop: str) -> None:
        self._last.pop(loop, None)

    def stalled(self) -> list[str]:
        """List the loops past their limit."""
        now = self._clock()
        return sorted(loop for loop, last in self._last.items() if now - last > LONGEST_ROUND)

    async def feed(self, stopping: asyncio.Event) -> None:
        """Feed until ``stopping`` is set; return at once if no watchdog is active."""
        interval = self._notifier.watchdog_interval
        while interval is not None and not stopping.is_set():
            stalled = self.stalled()
            if stalled:
                log.error("loops stalled", loops=stalled, limit_seconds=LONGEST_ROUND)
            else:
                self._notifier.feed_watchdog()
            await first_set(stopping, seconds=interval)


def condition(
    *, connected: bool, blocked: bool, no_lane: str, stuck: Sequence[str], intake: str, topology: str = ""
) -> str:
    """Describe the daemon's role at the intake queue (``intake``: "active", "standby" or ""), and why it cannot work:
    ``blocked`` by a resource alarm, without a lane or the topology (the reasons, or ""), lanes and queues ``stuck``."""
    broker = "the broker is out of reach"
    if connected:
        broker = "the broker accepts no publishes (a resource alarm)" if blocked else ""
    found = [intake and f"intake {intake}", broker, no_lane, topology, *(f"{one} does not advance" for one in stuck)]
    return "; ".join(filter(None, found)) or "nothing is consumed yet"
