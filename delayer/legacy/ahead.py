"""Reading a batch while the one before it is committed: the two wait for different servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from delayer.core.importing import Batch

Read = Callable[[], Awaitable[Batch | None]]


class Ahead:
    """One batch ahead of who asks. ``read`` gives the batch behind the one that it gave last, whatever became of that
    one meanwhile; None when nothing is left."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._reading: asyncio.Future[Batch | None] | None = None

    async def next(self) -> Batch | None:
        """Raises what ``read`` raises."""
        reading = self._reading or asyncio.ensure_future(self._read())
        self._reading = None
        batch = await reading
        if batch is not None:
            self._reading = asyncio.ensure_future(self._read())
        return batch

    async def close(self) -> None:
        """Whatever is being read nobody wants any more. Safe to call twice."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
