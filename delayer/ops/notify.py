"""Telling systemd how we are (``Type=notify``), and the decision whether its watchdog may be fed.

The protocol is a datagram of ``KEY=value`` lines to the socket that ``NOTIFY_SOCKET`` names; without that variable
nothing is sent. See sd_notify(3) and sd_watchdog_enabled(3).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog

log = structlog.get_logger(__name__)

FEEDS: Final = 3
"""How often the watchdog is fed in the time that it allows: a word that is lost, or late, does no harm."""


class Notifier:
    """The line to systemd. Never raises: a daemon that works must not fall over a socket that does not."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        path = environ.get("NOTIFY_SOCKET", "")
        if path and path[0] not in "/@":
            # "vsock:…" is how virtual machines report to their host; a service is never given it.
            log.warning("notify socket unusable", path=path, reason="expected an absolute path or @abstract")
            path = ""
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self._watchdog = _watchdog_seconds(environ)
        self._status = ""
        self._trouble = ""
        self._ready = False
        self._reloading = False

    @property
    def active(self) -> bool:
        return bool(self._address)

    @property
    def watchdog_interval(self) -> float | None:
        """Seconds between feedings, a third of what systemd allows; None when it does not watch this process."""
        return self._watchdog / FEEDS if self.active and self._watchdog is not None else None

    def ready(self, status: str = "") -> None:
        """Start, or a reload, is complete."""
        self._status = status
        early = self._early
        # The end of a reload says nothing about a start that is not over.
        self._ready, self._reloading = self._ready or not self._reloading, False
        self._send("" if early else "READY=1", self._words)

    def reloading(self) -> None:
        """A reload begins. systemd wants its monotonic time too, to tell this reload from an earlier one."""
        self._reloading = True
        if self._early:
            return
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send(f"RELOADING=1\nMONOTONIC_USEC={now_us}")

    @property
    def _early(self) -> bool:
        """A reload in the middle of a start: systemd would take its end for that of the start."""
        return self._reloading and not self._ready

    def stopping(self, status: str = "") -> None:
        self._ready = False
        self._send("STOPPING=1", status)

    def status(self, text: str) -> None:
        """One line for ``systemctl status``."""
        self._status = text
        self._send("", self._words)

    def trouble(self, text: str) -> None:
        """What keeps us from our work, for the end of that line; nothing once it is over."""
        if text != self._trouble:
            self._trouble = text
            self._send("", self._words)

    @property
    def _words(self) -> str:
        return "; ".join(text for text in (self._status, self._trouble) if text)

    def feed_watchdog(self) -> None:
        """With the state that we are in, if it is one that lasts: the word for it may have been lost, and a start that
        is never known to be over is waited for without end."""
        if self._ready and not self._reloading:
            self._send("WATCHDOG=1\nREADY=1", self._words)
        else:
            self._send("WATCHDOG=1")

    def _send(self, state: str, status: str = "") -> None:
        lines = [state] if state else []
        if status:
            lines.append(f"STATUS={' '.join(status.split())}")  # a line end would begin a new key
        if not self._address or not lines:
            return
        try:
            with self._connected() as line:
                line.send("\n".join(lines).encode(), socket.MSG_DONTWAIT)
        except OSError as error:
            log.warning("notify failed", state=state.partition("\n")[0], reason=error.strerror or str(error))

    def _connected(self) -> socket.socket:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            line.setblocking(False)
            line.connect(self._address)
        except OSError:
            line.close()
            raise
        return line


def _watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    try:
        microseconds = int(environ.get("WATCHDOG_USEC", "0"))
        watched = int(environ.get("WATCHDOG_PID") or os.getpid())
    except ValueError:
        return None
    return microseconds / 1e6 if microseconds > 0 and watched == os.getpid() else None


@dataclass(slots=True)
class Watchdog:
    """Which loops made progress lately. Pure: the time, in seconds of any steady clock, is passed in.

    One loop that stands still is enough to stop the feeding; systemd then kills and restarts the daemon, and the
    guarantees hold as after any crash.
    """

    _limits: dict[str, float] = field(default_factory=dict)
    _seen: dict[str, float] = field(default_factory=dict)

    def register(self, loop: str, limit: float, now: float) -> None:
        """Expect progress of ``loop`` at least every ``limit`` seconds, from ``now`` on."""
        self._limits[loop] = limit
        self._seen[loop] = now

    def forget(self, loop: str) -> None:
        """``loop`` ended because it was meant to."""
        self._limits.pop(loop, None)
        self._seen.pop(loop, None)

    def progress(self, loop: str, now: float) -> None:
        """``loop`` went round. An unregistered one is nobody's concern: it may have ended a moment ago."""
        if loop in self._limits:
            self._seen[loop] = max(now, self._seen[loop])

    def stalled(self, now: float) -> list[str]:
        """The loops that are behind their limit, by name. Feed only if there is none."""
        return sorted(loop for loop, limit in self._limits.items() if now - self._seen[loop] > limit)

    def may_feed(self, now: float) -> bool:
        return not self.stalled(now)
