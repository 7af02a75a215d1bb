"""Whether there is traffic to which a job should give way, and which job may run during traffic."""

from __future__ import annotations

import time
from collections.abc import Callable

from asyncpg import Connection

from delayer.store import statements

_PASSED = f"""
SELECT EXISTS (SELECT FROM lane AS l WHERE {statements.IS_OWNED}),
       (SELECT coalesce(sum(n), 0)::bigint FROM counter WHERE kind IN ('parked', 'released'))
"""
"""Whether a daemon owns a lane, and how much all have parked and released so far."""
_TURN = "('segment'::regclass::oid::int, 1)"


class Traffic:
    """The daemons at work, as seen by one process of a job. ``busy`` until :meth:`look` finds otherwise."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.busy = True
        self._clock = clock
        self._at = 0.0
        self._passed: int | None = None

    async def look(self, connection: Connection) -> bool:
        """Check, at most once a second, whether lanes are owned and 50 messages/s pass. Raises the driver's errors."""
        now = self._clock()
        if self._passed is not None and now - self._at < 1.0:
            return self.busy
        owned, passed = await connection.fetchrow(_PASSED)
        self.busy = owned and (self._passed is None or (passed - self._passed) / (now - self._at) >= 50)
        self._at, self._passed = now, passed
        return self.busy


async def take_turn(connection: Connection) -> bool:
    """Whether this session may work now, until :func:`end_turn` or its own end. Raises the driver's errors."""
    return bool(await connection.fetchval(f"SELECT pg_try_advisory_lock{_TURN}"))


async def end_turn(connection: Connection) -> None:
    """Let other sessions work. Raises the driver's errors."""
    await connection.fetchval(f"SELECT pg_advisory_unlock{_TURN}")
