"""Sessions of other roles that have locks of the store, or wait for them.

Every role that can connect may take any advisory lock, and see in pg_locks which ones the daemons use. Such a session
can keep a process from taking a lane, or from parking messages. delayer cannot take the lock away, so it says who has
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from asyncpg import Connection

from delayer.store.statements import OURS, TRUSTED

LOCKED: Final = (
    "lane", "delayer_inbox", "message", "message_key", "schedule", "history", "request", "import_run", "segment",
    "delayer_schema_version",
)  # fmt: skip
"""The tables whose OIDs are the class ids of delayer's advisory locks."""
ADVICE: Final = (
    "end that session (or ROLLBACK PREPARED), and revoke the lock functions from its role: docs/security.md, "
    '"Postgres: applications that send by SQL"'
)
_MOST: Final = 20
# The locks of a prepared transaction have no session. A session that has ended since is no longer in the view.
_FOREIGN: Final = f"""
SELECT k.pid, a.usename, a.application_name,
       array_agg(DISTINCT k.classid::regclass::text ORDER BY k.classid::regclass::text)
FROM pg_locks AS k LEFT JOIN pg_stat_activity AS a USING (pid)
WHERE {OURS} AND k.classid = ANY (SELECT to_regclass(name) FROM unnest($1::text[]) AS name)
      AND (k.pid IS NULL OR a.pid IS NOT NULL) AND NOT {TRUSTED}
GROUP BY 1, 2, 3 ORDER BY 1 LIMIT {_MOST}
"""


class ForeignLocks(NamedTuple):
    """The locks of one session. ``pid``, ``role`` and ``application`` are None for those of prepared transactions."""

    pid: int | None
    role: str | None
    application: str | None
    tables: Sequence[str]

    def __str__(self) -> str:
        """
        >>> str(ForeignLocks(4711, "shop", "psql", ["lane", "message_key"]))
        "session 4711 of role 'shop' (psql) has locks of the store, or waits for them: lane, message_key"
        """
        who = "a prepared transaction (pg_prepared_xacts)"
        if self.pid is not None:
            who = f"session {self.pid} of role {self.role!r} ({self.application or 'without a name'})"
        return f"{who} has locks of the store, or waits for them: {', '.join(self.tables)}"


async def find(connection: Connection, timeout: float | None = None) -> list[ForeignLocks]:
    """Find them, at most 20 sessions. Raises the driver's errors."""
    return [ForeignLocks(*row) for row in await connection.fetch(_FOREIGN, LOCKED, timeout=timeout)]
