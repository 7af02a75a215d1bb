"""What living owners of lanes say of themselves, in the name of the session that holds a lane's lock: a mark of the
broker and virtual host that they publish to. Daemons of two brokers on one store would publish each other's messages.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Final

import asyncpg

APART: Final = (
    "give each broker and virtual host a database of its own; at once, stop the daemons that have the wrong store.url: "
    "whoever adopts a lane of the other publishes the other's messages"
)
_SESSIONS: Final = """
SELECT k.objid::int AS lane, coalesce(a.application_name, '')  -- NULL for who may not look: taken for old, to be safe
FROM pg_locks AS k JOIN pg_stat_activity AS a ON a.pid = k.pid
WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 2 AND k.classid = 'lane'::regclass
  AND k.objid::bigint <= 32767  -- those beside it are said by who asks for lanes, or has adopted one: handover.py
  AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
ORDER BY lane
"""


def mark_of(cluster: str, vhost: str) -> str:
    """Short, as there is little room in a session's name; "" where nothing is known of the broker.

    By the name that a cluster gives itself, because its nodes, and ways to them, have many."""
    return hashlib.sha256(f"{cluster}\0{vhost}".encode()).hexdigest()[:8] if cluster else ""


def application_of(lane: int, broker: str = "") -> str:
    """The name of the session that holds the lock of ``lane``. ``broker``: its mark, where it is known."""
    return f"delayer lane {lane}{f', broker {broker}' if broker else ''}"


def broker_of(application: str) -> str:
    """The mark of the broker that the owner publishes to; "" where it does not say. Pure."""
    found = re.search(r", broker ([0-9a-f]{8})$", application)
    return found[1] if found else ""


async def brokers(connection: asyncpg.Connection) -> Mapping[int, str]:
    """The marks of the lanes whose living owners say one. Raises the driver's errors."""
    rows = await connection.fetch(_SESSIONS)
    return {lane: mark for lane, application in rows if (mark := broker_of(application))}
