"""What a daemon's restoring adds to segments.py: a look that locks nothing, partitions, and a note to the lane."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Final

import asyncpg

from delayer.core.segment import Locked, Restoration, Restored
from delayer.store import segments, session, statements
from delayer.store.lane import PostgresLane
from delayer.store.partitions import DAY_MS

PORTION_BYTES: Final = 256 << 10
"""Rows are sent so many bytes at a time: what the event loop does at once, and the server beside the releases."""
PAUSE: Final = 0.002
"""Seconds between two portions."""


async def restore_soonest(
    pool: asyncpg.Pool,
    lane: PostgresLane,
    horizon_ms: int,
    ensure_days: Callable[[set[int]], Awaitable[None]],
) -> Restoration:
    """Restore the soonest segment into ``lane``, if it begins by ``horizon_ms``, with partitions for its days.

    Raises LaneLost, the driver's errors, and what ``ensure_days`` raises.
    """
    async with session.borrowed(pool) as connection:
        soonest = await connection.fetchrow(statements.NEXT_SEGMENT, horizon_ms)
    if soonest is None:
        return None
    first_ms, last_ms = soonest
    # The first time it takes half a second, and would be the event loop's.
    await asyncio.to_thread(import_module, "delayer.store.copying")
    # Perhaps another one is restored, if somebody has this one: then rows may go to the default partition. Days that
    # are passed, or too far, have none in any case.
    await ensure_days(set(range(first_ms // DAY_MS, last_ms // DAY_MS + 1)))
    try:
        async with session.borrowed(pool) as connection:
            found = await segments.restore_one(connection, lane, horizon_ms, portion_bytes=PORTION_BYTES, pause=PAUSE)
    except BaseException:
        # Perhaps it was committed. None that could have been restored begins sooner.
        lane.note_parked(first_ms)
        raise
    if found is None:
        return Locked(first_ms)
    if isinstance(found, Restored):
        lane.note_parked(found.first_due_ms)
    return found
