"""How many may make us work at once: a look at the store is a connection to it and the memory for what it finds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

WAITING: Final = 16
"""How many wait for their turn; more hear that it is busy."""


class Busy(Exception):
    """Too many ask at once."""


class Turns:
    """``at_once`` have their turn, and others wait for it."""

    def __init__(self, at_once: int) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._waiting = 0

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """A turn. Raises Busy."""
        if self._waiting >= WAITING:
            raise Busy(f"{WAITING} others wait already: try again in a moment")
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._free.release()
