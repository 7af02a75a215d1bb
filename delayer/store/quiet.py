"""A lane for somebody who only puts rows into it: nothing in it is due soon, so nobody waits for its release.

For a bulk restore. Its owner releases nothing, so the lane must not be one that a daemon would adopt; when it is given
up again, it is adopted as soon as something in it is due soon, like any other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from delayer.core.errors import StoreLost
from delayer.store import outlook, schema, session
from delayer.store.clock import StoreClock
from delayer.store.errors import DRIVER_ERRORS, translated
from delayer.store.lane import PostgresLane
from delayer.store.lanes import LaneTaker

IDLE_SECONDS = 5.0
TRANSACTION_SECONDS = 10.0
ATTEMPTS = 20


@asynccontextmanager
async def quiet_lane(url: str, owner: str) -> AsyncIterator[PostgresLane]:
    """A free lane without rows, else a free one in which nothing is due soon, else a new one; ours until the end.

    ``owner`` is what the table of lanes names. Raises StoreLost, BadStoreUrl, SchemaOutdated.
    """
    pool = await session.open_pool(url, "delayer restore", 2, {})
    clock = StoreClock()
    try:
        with translated("take a lane"):
            async with session.borrowed(pool) as connection:
                await schema.check(connection)
                await session.sample(connection, clock)
        taker = LaneTaker(url, pool, clock, owner=owner, idle=IDLE_SECONDS, releasing=TRANSACTION_SECONDS)
        lane = await _take(taker, pool, clock)
        try:
            yield lane
        finally:
            await lane.release()
    finally:
        try:
            await pool.close()
        except DRIVER_ERRORS:
            pool.terminate()


async def _take(taker: LaneTaker, pool: asyncpg.Pool, clock: StoreClock) -> PostgresLane:
    for _ in range(ATTEMPTS):
        with translated("take a lane"):
            async with session.borrowed(pool) as connection:
                numbers = await _quiet(taker, connection, clock)
                if not numbers and (new := await taker.create(connection)) is not None:
                    numbers = [new]
        taken = await taker.take(numbers, 1)
        if taken:
            return taken[0]
    raise StoreLost(f"take a lane: others were quicker {ATTEMPTS} times")


async def _quiet(taker: LaneTaker, connection: asyncpg.Connection, clock: StoreClock) -> list[int]:
    """The free lanes in which nothing is due soon, those without rows first."""
    quiet = []
    for number in reversed(await taker.free(connection)):
        ahead = await outlook.ahead(connection, number, clock.now_ms() + outlook.IDLE_MS)
        if ahead.empty:
            quiet.append(number)
    return quiet
