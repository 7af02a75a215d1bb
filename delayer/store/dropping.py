"""Dropping partitions: those of days that are passed, and any that lost all of its rows.

Dropping locks everything for a moment, so each try has a short timeout and is left for the next time.
"""

from __future__ import annotations

import asyncpg
import structlog

from delayer.store import session
from delayer.store.errors import describe
from delayer.store.partitions import bound, existing, name_of

log = structlog.get_logger()

_OWNED = "ALTER TABLE {} OWNER TO the role that owns the table message"
LOOK_SECONDS = 0.2
"""How long everything is locked while a partition is looked through once more, whether it is empty, and dropped."""


async def drop_passed(connection: asyncpg.Connection, today: int) -> list[str]:
    """Drop the empty partitions of days before yesterday, up to the first locked one. Returns their names."""
    passed = [name_of(day) for day in sorted(await existing(connection)) if day < today - 1]
    dropped = []
    for position, name in enumerate(passed, 1):
        try:
            if await drop_empty(connection, name):
                log.info("partition dropped", partition=name)
                dropped.append(name)
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError) as error:
            # A dump locks all of them, and each try keeps the traffic waiting for 200 ms.
            log.info("partition not dropped", partition=name, reason=describe(error), skipped=len(passed) - position)
            break
        except asyncpg.InsufficientPrivilegeError as error:  # somebody made it by hand; the others are ours
            log.warning("partition not dropped", partition=name, reason=describe(error), next_step=_OWNED.format(name))
    return dropped


async def drop_empty(
    connection: asyncpg.Connection, name: str, lock_ms: int = 200, look_seconds: float = LOOK_SECONDS
) -> bool:
    """Drop the partition ``name`` if it is empty; False if it is not, or is gone, or if it takes longer than
    ``look_seconds`` to see. Raises LockNotAvailableError, and the driver's other errors."""
    try:
        if await connection.fetchval(f"SELECT EXISTS (SELECT FROM {name})"):
            return False
        async with session.transaction(connection):
            # The traffic waits behind us while we wait for it, so not for long; and in its own order of locking.
            await connection.execute(f"SET LOCAL lock_timeout = '{lock_ms}ms'")
            await connection.execute("LOCK TABLE ONLY message IN ACCESS EXCLUSIVE MODE")
            await connection.execute(f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE")
            await bound(connection, look_seconds)  # many empty pages, which VACUUM did not cut off
            if await connection.fetchval(f"SELECT EXISTS (SELECT FROM {name})"):
                return False
            await connection.execute(f"DROP TABLE {name}")
    except (asyncpg.UndefinedTableError, asyncpg.QueryCanceledError) as error:
        log.info("partition not dropped", partition=name, reason=describe(error))
        return False
    return True
