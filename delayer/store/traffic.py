"""What the traffic does, for a job that gives way to it (core/giving_way.py); and whose turn it is beside it."""

from __future__ import annotations

import time
from typing import Final

import asyncpg

from delayer.core.giving_way import Seen
from delayer.store import session, statements

SINCE_MS: Final = 1_000
"""How late a message is at the most, as far as a look can say."""
# Whatever the statistics say of a partition that changes all the time.
_BY_INDEX: Final = "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off"
_TURN: Final = "('segment'::regclass::oid::int, 1)"


async def look(connection: asyncpg.Connection) -> Seen:
    """Look at it: some index entries, whatever waits. Raises the driver's errors."""
    now_ms, lanes, passed = await connection.fetchrow(statements.TRAFFIC)
    late_ms = await _late_ms(connection, lanes, now_ms) if lanes else 0.0
    return Seen(time.monotonic(), len(lanes), passed, late_ms)


async def _late_ms(connection: asyncpg.Connection, lanes: list[int], now_ms: float) -> float:
    async with session.transaction(connection):
        await connection.execute(_BY_INDEX)
        late_ms: float | None = await connection.fetchval(statements.LATE, lanes, now_ms - SINCE_MS, now_ms)
    return late_ms or 0.0


async def take_turn(connection: asyncpg.Connection) -> bool:
    """Whether it is this session's turn now, until :func:`end_turn` or its own end. Raises the driver's errors."""
    return bool(await connection.fetchval(f"SELECT pg_try_advisory_lock{_TURN}"))


async def end_turn(connection: asyncpg.Connection) -> None:
    """Let others have theirs. Raises the driver's errors."""
    await connection.fetchval(f"SELECT pg_advisory_unlock{_TURN}")
