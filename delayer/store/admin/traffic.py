"""Whether there is traffic that a job gives way to; and whose turn it is beside it."""

from __future__ import annotations

import time
from collections.abc import Callable

from asyncpg import Connection

from delayer.store import statements

_TURN = "('segment'::regclass::oid::int, 1)"


class Traffic:
    """Daemons at work, as one process of a job sees them. ``busy`` until a look says otherwise."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.busy = True
        self._clock = clock
        self._at = 0.0
        self._passed: int | None = None

    async def look(self, connection: Connection) -> bool:
        """Once a second at most: are lanes owned, and do 50 messages a second pass? Raises the driver's errors."""
        now = self._clock()
        if self._passed is not None and now - self._at < 1.0:
            return self.busy
        _, lanes, passed = await connection.fetchrow(statements.read("traffic"))
        self.busy = bool(lanes) and (self._passed is None or (passed - self._passed) / (now - self._at) >= 50)
        self._at, self._passed = now, passed
        return self.busy


async def take_turn(connection: Connection) -> bool:
    """Whether it is this session's turn now, until :func:`end_turn` or its own end. Raises the driver's errors."""
    return bool(await connection.fetchval(f"SELECT pg_try_advisory_lock{_TURN}"))


async def end_turn(connection: Connection) -> None:
    """Let others have theirs. Raises the driver's errors."""
    await connection.fetchval(f"SELECT pg_advisory_unlock{_TURN}")
