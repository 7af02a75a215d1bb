"""What a daemon's restoring adds to catalog.py: a look that locks nothing, and partitions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import import_module
from typing import Final

import asyncpg

from delayer.core.segment import FORMAT, Broken, Locked, Restoration, Restored
from delayer.store import pool as session
from delayer.store import statements
from delayer.store.errors import DAMAGED
from delayer.store.rows.partitions import DAY_MS
from delayer.store.segments import catalog, pagewise

PAUSE: Final = 0.002
"""Seconds between two portions."""


EnsureDays = Callable[[set[int]], Awaitable[None]]


async def restore_soonest(pool: asyncpg.Pool, horizon_ms: int, ensure_days: EnsureDays) -> Restoration:
    """Restore the soonest segment, if it begins by ``horizon_ms``, with partitions for its days.

    Segments on damaged pages of the table keep no others back; their error is raised when nothing else is due. Raises
    the driver's errors, and what ``ensure_days`` raises.
    """
    try:
        async with session.borrowed(pool) as connection:
            soonest = await connection.fetchrow(statements.NEXT_SEGMENT, horizon_ms, FORMAT)
        if soonest is None:
            return None
        # Perhaps another one is restored, if somebody has this one: then rows may go to the default partition.
        first_ms, last_ms = soonest
        work = partial(catalog.restore_one, horizon_ms=horizon_ms)
        return await _restore(pool, (first_ms, last_ms), ensure_days, work) or Locked(first_ms)
    except DAMAGED:  # a page of the table, met while the soonest was found or locked: it keeps nothing else there
        found = await _restore_readable(pool, horizon_ms, ensure_days)
        if found is None:
            raise  # nothing else is due: an alarm
        return found


async def _restore_readable(pool: asyncpg.Pool, horizon_ms: int, ensure_days: EnsureDays) -> Restoration:
    """The same beside pages that cannot be read."""
    async with session.borrowed(pool) as connection:
        soonest = await pagewise.soonest(connection, horizon_ms)
    if soonest is None:
        return None
    dues = soonest.first_due_ms, soonest.last_due_ms
    work = partial(catalog.restore, segment=soonest.id)
    return await _restore(pool, dues, ensure_days, work) or Locked(soonest.first_due_ms)


async def restore_again(pool: asyncpg.Pool, segment: int, ensure_days: EnsureDays) -> Restoration:
    """The same for the segment of this id, one of segments.doubtful. None: it is gone, or somebody has it locked."""
    async with session.borrowed(pool) as connection:
        found = await connection.fetchrow("SELECT first_due, last_due FROM segment WHERE id = $1", segment)
    if found is None:
        return None
    return await _restore(pool, tuple(found), ensure_days, partial(catalog.restore, segment=segment))


async def _restore(
    pool: asyncpg.Pool,
    dues: tuple[int, int],
    ensure_days: EnsureDays,
    work: Callable[..., Awaitable[Restored | Broken | None]],
) -> Restored | Broken | None:
    first_ms, last_ms = dues
    # The first time it takes half a second, and would be the event loop's.
    await asyncio.to_thread(import_module, "delayer.store.segments.codec")
    # Days that are passed, or too far, have none in any case.
    await ensure_days(set(range(first_ms // DAY_MS, last_ms // DAY_MS + 1)))
    async with session.borrowed(pool) as connection:
        return await work(connection, portion_bytes=catalog.SMALL_PORTION_BYTES, pause=PAUSE)
