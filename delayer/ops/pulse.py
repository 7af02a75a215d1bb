"""Feeding systemd's watchdog while every loop of the daemon moves."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import structlog

from delayer.ops.notify import Notifier, Watchdog

log = structlog.get_logger(__name__)

LIMIT: Final = 120.0
"""Seconds that a loop may take for one round: more than it can be waiting for by right (a park that is tried three
times, each ended by the statement timeout). A loop that hangs is a bug; one that waits for a slow store is not."""


class WatchedPulse:
    """Satisfies services.ports.Pulse."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._watchdog = Watchdog()
        self._known: set[str] = set()

    def beat(self, loop: str) -> None:
        """See services.ports.Pulse."""
        now = time.monotonic()
        if loop not in self._known:
            self._known.add(loop)
            self._watchdog.register(loop, LIMIT, now)
        self._watchdog.progress(loop, now)

    def forget(self, loop: str) -> None:
        """See services.ports.Pulse."""
        self._known.discard(loop)
        self._watchdog.forget(loop)

    def stalled(self) -> list[str]:
        """The loops that are behind their limit."""
        return self._watchdog.stalled(time.monotonic())

    async def feed(self, stopping: asyncio.Event) -> None:
        """Feed until stopping is set; returns at once where no watchdog watches."""
        interval = self._notifier.watchdog_interval
        while interval is not None and not stopping.is_set():
            stalled = self._watchdog.stalled(time.monotonic())
            if stalled:
                log.error("loops stalled", loops=stalled, limit_seconds=LIMIT)
            else:
                self._notifier.feed_watchdog()
            try:
                await asyncio.wait_for(stopping.wait(), interval)
            except TimeoutError:
                continue
