"""Failures after a loss: which one to raise, and the pause before the next attempt.

An exception refers to its traceback, a traceback to its frames, and a frame to its variables: here whole batches. If a
variable of such a frame refers to the exception, the references form a cycle. Only the garbage collector frees it, and
that runs rarely in this process (delayer/daemon/app.py).
"""

from __future__ import annotations

import asyncio
import gc
import random
from asyncio import Task
from collections.abc import Callable, Iterable
from typing import Final

from delayer.amqp.errors import BrokerLost
from delayer.core.backoff import pause
from delayer.core.errors import StoreLost

LOSSES = (BrokerLost, StoreLost)
Pause = Callable[[int, float], float]  # As delayer.core.backoff.pause.


def take_failures(tasks: set[Task[None]]) -> list[BaseException]:
    """The failures of the finished ``tasks``. The set is emptied, because the caller may raise one of them."""
    failures = [
        failure for task in tasks if task.done() and not task.cancelled() and (failure := task.exception()) is not None
    ]
    tasks.clear()
    return failures


def raise_first(results: Iterable[BaseException | None], *, unless: tuple[type[BaseException], ...] = ()) -> None:
    """Raise the first failure that is a bug, else the first loss. Failures of types in ``unless`` are ignored.

    A bug has priority, because all messages of a loss come again anyway.
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


async def first_set(*events: asyncio.Event, seconds: float | None = None) -> list[asyncio.Event]:
    """Wait at most ``seconds`` until one of the events is set. Returns the events that ended the wait."""
    waiting = {asyncio.create_task(event.wait(), name="waiting"): event for event in events}
    try:
        done, _ = await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
    return [waiting[task] for task in done]


STEP: Final = 0.25
"""How often a pause looks whether it is over, in seconds."""


class Backoff:
    """The count of failures in a row, and the pauses after them. Pauses feed the watchdog by ``beat``."""

    def __init__(self, beat: Callable[[], None], *ends: asyncio.Event, pause: Pause = pause) -> None:
        """A pause ends when one of the events ``ends`` is set."""
        self._beat = beat
        self._ends = ends
        self._pause = pause
        self._failures = 0

    def succeeded(self) -> None:
        """Reset the count: the next pause is the shortest."""
        self._failures = 0

    async def pause(self, again: Callable[[], bool] = lambda: False) -> None:
        """Count a failure and sleep, longer after each in a row, or until one of the events is set. ``again``: whether
        a server is reachable again; then the pause lasts at most STEP.

        Call this after the ``except`` block. It collects garbage, so that batches in reference cycles are freed.
        """
        gc.collect()
        self._failures += 1
        await self.wait(self._pause(self._failures - 1, random.random()), again)

    async def wait(self, seconds: float, again: Callable[[], bool] = lambda: False) -> None:
        """Sleep for ``seconds``, or until one of the events is set, or until ``again()`` is true."""
        while seconds > 0 and not any(end.is_set() for end in self._ends):
            self._beat()
            step = min(seconds, STEP)
            seconds = 0 if again() else seconds - step
            await first_set(*self._ends, seconds=step)
