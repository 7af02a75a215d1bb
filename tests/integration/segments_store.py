"""A store far in the future, for the tests of segments."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from delayer.core.segment import Broken, Restored
from delayer.core.units import DAY_MS
from delayer.store.rows import partitions
from delayer.store.segments import restore
from delayer.store.segments.catalog import FOREVER_MS
from tests.support.store import sql

START_MS = 1_900_000_000_000 // DAY_MS * DAY_MS
"""The first instant of a day in the far future."""


@asynccontextmanager
async def store(url: str, days: int = 0) -> AsyncIterator[asyncpg.Connection]:
    """A connection to a store, with partitions for some days from START_MS on."""
    async with sql(url) as admin:
        first = START_MS // DAY_MS
        for day in range(first, first + days):
            assert await partitions.make(admin, day, first - 10) is partitions.PartitionResult.DONE
        yield admin


async def restore_all(admin: asyncpg.Connection, **more: Any) -> list[Restored | Broken]:
    """Restore all segments, as a daemon does."""
    found = []
    while (one := await restore.restore_one(admin, FOREVER_MS, **more)) is not None:
        found.append(one)
    return found


async def apart(url: str, work: Callable[[asyncpg.Connection], Awaitable[Any]]) -> Any:
    """Run ``work`` with its own connection."""
    async with sql(url) as connection:
        return await work(connection)
