"""Work that needs a lock which others hold for long, perhaps, and in whose queue everybody else would wait meanwhile.

So it waits for the lock for a moment only, lets everybody pass, and tries again: its whole transaction anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import asyncpg

from delayer.store.errors import WORTH_REPEATING

T = TypeVar("T")

TRIES: Final = 10
PAUSE_SECONDS: Final = 2.0
IN_THE_WAY: Final = (asyncpg.LockNotAvailableError, *WORTH_REPEATING)


async def patiently(work: Callable[[], Awaitable[T]]) -> T:
    """``work``, up to :data:`TRIES` times. Raises what it raises; IN_THE_WAY only of the last time."""
    for _ in range(TRIES - 1):
        try:
            return await work()
        except IN_THE_WAY:
            await asyncio.sleep(PAUSE_SECONDS)
    return await work()
