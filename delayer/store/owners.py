"""What living owners of lanes say of themselves: the schema that their program works with, in the name of the session
that holds a lane's lock.

A daemon compares the schema when it starts, and not when somebody upgrades it under it. So daemons of an older version
may go on beside a newer schema, and do not know what came with that.
"""

from __future__ import annotations

import re
from typing import Final

import asyncpg

from delayer.store import schema

SEGMENTS: Final = "0002"
"""The schema from which on a daemon restores segments."""

_SESSIONS: Final = """
SELECT k.objid::int AS lane, coalesce(a.application_name, '')  -- NULL for who may not look: taken for old, to be safe
FROM pg_locks AS k JOIN pg_stat_activity AS a ON a.pid = k.pid
WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 2 AND k.classid = 'lane'::regclass
  AND k.objid::bigint <= 32767  -- those beside it are said by who asks for lanes, or has adopted one: handover.py
  AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
ORDER BY lane
"""


def application_of(lane: int) -> str:
    """The name of the session that holds the lock of ``lane``."""
    return f"delayer lane {lane}, schema {schema.HEAD}"


def schema_of(application: str) -> str:
    """The schema that the owner works with; "" for versions that did not say. Pure."""
    found = re.search(r", schema (\d{4})$", application)
    return found[1] if found else ""


async def without_segments(connection: asyncpg.Connection) -> list[int]:
    """The lanes whose living owners restore no segments. Raises the driver's errors."""
    rows = await connection.fetch(_SESSIONS)
    return [lane for lane, application in rows if schema_of(application) < SEGMENTS]
