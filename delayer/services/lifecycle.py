"""The common life of everything that runs: start, run until told to stop, stop in time; and who is still moving."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Final

import structlog

log = structlog.get_logger(__name__)

GRACE: Final = 9.0
"""Seconds that the parts have to settle what is in flight, once told to stop. Ten are promised."""

Part = Callable[[asyncio.Event], Coroutine[None, None, None]]
"""Runs until the event is set, then settles and returns. An exception out of it is a bug, or a reason to end."""


class Life:
    """Runs parts side by side. The first one to fail stops all of them, and its failure is the daemon's."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self._parts: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Tell every part to stop. Safe to call twice, and from a signal handler of the loop."""
        self.stopping.set()
        self._changed.set()

    def add(self, name: str, part: Part) -> None:
        """Start a part; parts may be added while others run."""
        task = asyncio.create_task(part(self.stopping), name=name)
        self._parts.add(task)
        task.add_done_callback(lambda _: self._changed.set())

    async def run(self) -> None:
        """Return when every part has stopped. Raises the first failure of a part, after stopping the others.

        Parts that have not stopped when the grace is over are cancelled; what they had in flight is given back by
        the broker and rolled back by the store, as after a crash.
        """
        failure: BaseException | None = None
        while not self.stopping.is_set() and failure is None:
            await self._changed.wait()
            self._changed.clear()
            failure = self._failure()
        self.stop()
        if self._parts:
            _, late = await asyncio.wait(self._parts, timeout=GRACE)
            for task in late:
                log.error("stop forced", part=task.get_name(), after_seconds=GRACE)
                task.cancel()
            if late:
                await asyncio.wait(late)
        failure = failure or self._failure()
        if failure is not None:
            raise failure

    def _failure(self) -> BaseException | None:
        for task in [task for task in self._parts if task.done()]:
            self._parts.discard(task)
            if not task.cancelled() and (failure := task.exception()) is not None:
                return failure
        return None
