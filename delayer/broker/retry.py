"""After a loss: the failure to raise, and the pause before the next attempt.

An exception holds its traceback, a traceback its frames, and a frame its variables: here whole batches. A frame in the
traceback of an exception that it also has in a variable is a ring of references. Only the garbage collector breaks it,
and that runs rarely in this process (delayer/daemon/app.py).
"""

from __future__ import annotations

import asyncio
import gc
import random
from asyncio import Task
from collections.abc import Callable, Iterable

from delayer.core.backoff import pause
from delayer.core.errors import BrokerLost, StoreLost

LOSSES = (BrokerLost, StoreLost)


def take_failures(tasks: set[Task[None]]) -> list[BaseException]:
    """The failures of the finished ``tasks``. The set is emptied, because the caller may raise one of them."""
    failures = [
        failure for task in tasks if task.done() and not task.cancelled() and (failure := task.exception()) is not None
    ]
    tasks.clear()
    return failures


def raise_first(results: Iterable[BaseException | None], *, unless: tuple[type[BaseException], ...] = ()) -> None:
    """Raise the first failure that is a bug, else the first loss; return if there is none but those in ``unless``.

    A bug comes first, because after a loss every message comes again anyway.
    """
    failures = [result for result in results if result is not None and not isinstance(result, unless)]
    failures.sort(key=lambda failure: isinstance(failure, LOSSES))
    del results
    first = failures[0] if failures else None
    failures.clear()
    try:
        if first is not None:
            raise first
    finally:
        del first


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
        """Sleep for the pause after this many failures in a row; return at once when told to stop.

        Call this behind the ``except``. It collects garbage, so that whole batches in rings of references are freed.
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
