"""Waiting between attempts without missing the order to stop."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable

from delayer.core.backoff import pause


class Retry:
    """Counts failures in a row and sleeps accordingly, feeding the watchdog's ``beat`` meanwhile."""

    def __init__(
        self, stopping: asyncio.Event, beat: Callable[[], None], leaving: Callable[[], bool] = lambda: False
    ) -> None:
        """``leaving``: asked once a second whether this one is told to end, where the others go on."""
        self._leaving = leaving
        self._stopping = stopping
        self._beat = beat
        self._failures = 0

    def succeeded(self) -> None:
        """The next pause is the first one again."""
        self._failures = 0

    async def pause(self) -> None:
        """Sleep for the pause that is due after this many failures in a row; return at once when told to stop.

        The failure must not be at hand any more (call this behind the ``except``): what it held on to, whole batches,
        is freed here if it stands in rings of references. Failures are rare, and nothing is urgent after one.
        """
        gc.collect()
        seconds = pause(self._failures, random.random())
        self._failures += 1
        await self.wait(seconds)

    async def wait(self, seconds: float) -> None:
        """Sleep for ``seconds``; return at once when told to stop."""
        while seconds > 0 and not self._stopping.is_set() and not self._leaving():
            self._beat()
            step = min(seconds, 1.0)
            seconds -= step
            try:
                await asyncio.wait_for(self._stopping.wait(), step)
            except TimeoutError:
                continue
