"""Upkeep of the store, by whichever daemon has its lock: partitions made ahead and dropped, and frozen parks ended."""

from __future__ import annotations

from typing import Final

import asyncpg

from delayer.store import dropping, partitions, session
from delayer.store.clock import StoreClock
from delayer.store.partitions import DAY_MS, Days

FROZEN_SECONDS: Final = 60.0
"""After how long a park is ended that says nothing in the middle of a COPY. Its rows come in within milliseconds."""
IDLE: Final = "15s"

_LOCK: Final = "('message'::regclass::oid::int, 2)"
_END_FROZEN: Final = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE datname = current_database() AND usename = current_user AND application_name = 'delayer park'
  AND state = 'active' AND wait_event = 'ClientRead' AND query_start < clock_timestamp() - make_interval(secs => $1)
"""


async def keep_up(connection: asyncpg.Connection, clock: StoreClock, days: Days) -> None:
    """One round, unless another daemon is at it. Raises the driver's errors."""
    await session.sample(connection, clock)
    try:
        # The lock is the session's. A process that froze while it has it would keep the upkeep from everybody.
        await connection.execute(f"SET idle_session_timeout = '{IDLE}'")
        if await connection.fetchval(f"SELECT pg_try_advisory_lock{_LOCK}"):
            await end_frozen(connection)
            today = clock.now_ms() // DAY_MS
            await partitions.make_ahead(connection, today, days, clock.monotonic())
            await dropping.drop_passed(connection, today)
            days.learn(await partitions.existing(connection))
            await connection.execute(f"SELECT pg_advisory_unlock{_LOCK}")
        await connection.execute("RESET idle_session_timeout")
    except BaseException:
        session.end(connection)  # and with it the lock, and what was set
        raise


async def end_frozen(connection: asyncpg.Connection) -> int:
    """End parks whose process froze (or is stopped) in the middle of a COPY: how many.

    None of the server's timeouts acts there, and they hold locks on partitions, and back what VACUUM may remove.
    """
    ended: int = await connection.fetchval(_END_FROZEN, FROZEN_SECONDS)
    return ended
