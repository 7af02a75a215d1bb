"""Questions of `delayer check` to the server: the owner of the tables, and the number of locks that it can keep.

One role may upgrade the store and another one run the daemon: docs/security.md.

Postgres keeps the locks of a whole cluster in one table of fixed size: max_locks_per_transaction for each connection or
process of the server. When it is full, a transaction of any database may fail with "out of shared memory".
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from delayer.store import pool
from delayer.store.errors import translated
from delayer.store.rows.keys import LOCKS

_OWNERS: Final = """
SELECT tables.rolname, base.rolname
FROM pg_class AS c JOIN pg_roles AS tables ON tables.oid = c.relowner
CROSS JOIN pg_database AS d JOIN pg_roles AS base ON base.oid = d.datdba
WHERE c.oid = 'lane'::regclass AND d.datname = current_database() AND tables.oid <> base.oid
  AND NOT base.rolsuper AND pg_has_role(base.oid, tables.oid, 'MEMBER')
"""
_FOUND: Final = """
SELECT current_setting('max_locks_per_transaction')::int,
       (SELECT sum(setting::int) FROM pg_settings WHERE name IN ('max_connections', 'max_prepared_transactions',
           'autovacuum_max_workers', 'max_worker_processes', 'max_wal_senders'))::int,
       (SELECT count(*) FROM pg_inherits WHERE inhparent = 'message'::regclass), (SELECT count(*) FROM lane)
"""


class LockNeed(NamedTuple):
    """``allowed``: max_locks_per_transaction, for each of ``connections``. At most ``lanes`` processes work at once."""

    allowed: int
    connections: int
    partitions: int
    lanes: int
    parks: int = 4
    """Parks of one process at once."""

    @property
    def needed(self) -> int:
        """The max_locks_per_transaction for the worst case: every park has keys, and messages of every day.

        Postgres keeps one entry for each locked object, and twice as many for each holder of one.
        """
        beside = 16  # Locks of a transaction on other tables and indexes: lane, counter, message_key, held, segment.
        of_days = 4 * self.partitions + beside  # Table and primary key, and the same of out-of-line bodies.
        things = of_days + LOCKS + self.lanes
        readers = 2 * of_days  # A dump or an export, and a command.
        holders = self.lanes * (self.parks * (LOCKS + of_days) + of_days) + readers
        usual = 64  # Postgres's default
        return max(usual, math.ceil(max(things, holders / 2) / self.connections))

    @property
    def enough(self) -> bool:
        return self.allowed >= self.needed


async def looked(url: str) -> LockNeed:
    """Raises StoreLost, BadStoreUrl."""
    connection = await pool.connect(url, "delayer check")
    try:
        with translated("look at the locks"):
            return LockNeed(*await connection.fetchrow(_FOUND))
    finally:
        await pool.close(connection)


class Mistaken(NamedTuple):
    """The role that owns the tables, and the one that should."""

    tables: str
    database: str


async def mistaken(url: str) -> Mistaken | None:
    """Both, where the daemon's role upgraded a store that has an owner: that of the database, a member of the other and
    no superuser. None where all is well. Raises StoreLost, BadStoreUrl."""
    connection = await pool.connect(url, "delayer check")
    try:
        with translated("look at the owner"):
            row = await connection.fetchrow(_OWNERS)
    finally:
        await pool.close(connection)
    return None if row is None else Mistaken(*row)
