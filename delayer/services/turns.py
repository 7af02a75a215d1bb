"""Keeping what has a key in the order of its arrival, while several batches are parked at a time.

"A later message with the same key replaces the waiting one" is about the order in the intake queue. Batches without
keys need no order; those with keys park one after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from delayer.core.errors import StoreLost

Before = asyncio.Future[bool] | None
"""The turn before, if it is not over yet: done with whether it went well."""


class Turns:
    """Hands out turns; each waits for the one before it."""

    def __init__(self) -> None:
        self._last: Before = None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Before]:
        """Take a turn at once, synchronously with the caller; wait for it with :func:`wait`."""
        before = self._last if self._last is not None and not self._last.done() else None
        mine: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._last = mine
        done = False
        try:
            yield before
            done = True
        finally:
            mine.set_result(done)


async def wait(before: Before) -> None:
    """Return when the turn before is over. Raises StoreLost if it failed: its messages come again, and those of this
    turn have to come after them."""
    if before is not None and not await asyncio.shield(before):
        raise StoreLost("an earlier batch with keys could not be parked: this one is given back too, to keep the order")
