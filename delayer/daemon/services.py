"""The parts of a daemon: started together, stopped together, and in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Final

import structlog

from delayer.retry import take_failures

log = structlog.get_logger(__name__)

GRACE: Final = 6.5
"""Seconds for the parts to settle messages in flight after an order to stop. CUT_OFF, the closing (wiring.py) and the
log come on top; a stop takes at most ten."""
FIRST_SHARE: Final = 0.7
"""The share of GRACE after which the last parts stop even if others still run, and settle in the rest."""
CUT_OFF: Final = 0.5
"""Seconds for a cancelled part to end; after that it ends with the process."""

Part = Callable[[asyncio.Event], Coroutine[None, None, None]]
"""Runs until the event is set, then settles and returns. An exception is a bug, or a reason to stop the daemon."""


class ServiceGroup:
    """Runs parts concurrently. The first to fail stops all of them, and its failure is the daemon's."""

    def __init__(self, grace: float = GRACE) -> None:
        self.stopping = asyncio.Event()
        self._stop_last = asyncio.Event()
        self._grace = grace
        self._parts: set[asyncio.Task[None]] = set()
        self._last: set[asyncio.Task[None]] = set()
        self._failures: list[BaseException] = []
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Tell every part to stop. Safe to call twice, and from a signal handler of the loop."""
        self.stopping.set()
        self._changed.set()

    def add(self, name: str, part: Part, *, last: bool = False) -> None:
        """Start a part, even while others run. The other parts need the ``last`` parts to settle, so those stop only
        when all others have stopped or used up their share of the grace."""
        task = asyncio.create_task(part(self._stop_last if last else self.stopping), name=name)
        (self._last if last else self._parts).add(task)
        task.add_done_callback(lambda _: self._changed.set())

    async def run(self) -> None:
        """Wait for :meth:`stop` or a failure, then for every part to stop. Raises the first failure of a part.

        After the grace, cancels the parts still running. The broker requeues their deliveries, and the store rolls back
        their transactions, as after a crash.
        """
        while not self.stopping.is_set() and not self._failures:
            await self._changed.wait()
            self._changed.clear()
            self._collect()
        self.stop()
        began = asyncio.get_running_loop().time()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(began + self._grace * FIRST_SHARE):
                await self._wait_for(self._parts)
        self._stop_last.set()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(began + self._grace):
                await self._wait_for(self._parts)
                await self._wait_for(self._last)
        self._collect()
        if late := self._parts | self._last:
            for task in late:
                log.error("stop forced", part=task.get_name(), after_seconds=self._grace)
                task.cancel()
            await asyncio.wait(late, timeout=CUT_OFF)
            self._collect()
        for further in self._failures[1:]:
            log.error("part failed too", reason=repr(further))
        if self._failures:
            raise self._failures[0]

    async def _wait_for(self, parts: set[asyncio.Task[None]]) -> None:
        """Wait for these parts, and for parts added in the meantime."""
        while parts:
            await asyncio.wait(parts)
            self._collect()

    def _collect(self) -> None:
        """Drop finished parts, and note failures among them."""
        done = {task for task in self._parts | self._last if task.done()}
        self._parts -= done
        self._last -= done
        self._failures += take_failures(done)
