"""Reading batches while those before them are committed and removed: the two wait for different servers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from delayer.core.importing import Batch

DEPTH: Final = 2
"""Batches that are read before anybody asks for them: one while the last is committed, one while it is removed."""
Read = Callable[[], Awaitable[Batch | None]]


class Ahead:
    """``DEPTH`` batches ahead of who asks. ``read`` gives the batch behind the one that it gave last, whatever became
    of that one meanwhile; None when nothing is left."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._coming: deque[asyncio.Future[Batch | None]] = deque()

    async def next(self) -> Batch | None:
        """Raises what ``read`` raises."""
        while len(self._coming) <= DEPTH:
            before = self._coming[-1] if self._coming else None
            self._coming.append(asyncio.ensure_future(self._behind(before)))
        batch = None
        try:
            batch = await self._coming.popleft()
        finally:
            if batch is None:
                await self.close()  # whatever it was, those behind it have come to the same end
        return batch

    async def _behind(self, before: asyncio.Future[Batch | None] | None) -> Batch | None:
        """One read after the other."""
        if before is not None and await before is None:
            return None
        return await self._read()

    async def close(self) -> None:
        """Whatever is being read nobody wants any more. Safe to call twice."""
        unwanted = list(self._coming)
        self._coming.clear()
        for one in unwanted:
            one.cancel()
        await asyncio.gather(*unwanted, return_exceptions=True)
