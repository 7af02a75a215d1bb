"""What the daemons need of the server that holds their store, for `delayer check`: locks, connections and rights.

Postgres keeps the locks of a whole cluster in one table of fixed size: max_locks_per_transaction for each connection or
process of the server. When it is full, a transaction of any database may fail with "out of shared memory".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from asyncpg import Connection

from delayer.store import statements
from delayer.store.lanes.locks import LIMITED_SESSIONS
from delayer.store.postgres import PARKERS
from delayer.store.requests import MOST_ATTEMPTS
from delayer.store.rows import history
from delayer.store.rows.keys import LOCKS

_LOCK_TABLE: Final = """
SELECT current_setting('max_locks_per_transaction')::int,
       (SELECT sum(setting::int) FROM pg_settings WHERE name IN ('max_connections', 'max_prepared_transactions',
           'autovacuum_max_workers', 'max_worker_processes', 'max_wal_senders'))::int,
       (SELECT count(*) FROM pg_inherits WHERE inhparent = 'message'::regclass),
       (SELECT count(*) FROM lane WHERE route IS NULL), (SELECT count(*) FROM lane WHERE route IS NOT NULL)
"""


class LockNeed(NamedTuple):
    """``allowed``: max_locks_per_transaction, for each of ``connections``. At most ``lanes`` processes work at once;
    lanes of ``limited`` routes come on top."""

    allowed: int
    connections: int
    partitions: int
    lanes: int
    limited: int = 0
    history_days: int = 0
    parks: int = 3
    """Parallel parks of one process."""

    @property
    def of_history(self) -> int:
        """The history's partitions once it has run for ``history_days``."""
        return (
            self.history_days + history.DAYS_AHEAD + 2 if self.history_days else 0
        )  # With those of today and the default.

    @property
    def needed(self) -> int:
        """The max_locks_per_transaction for the worst case, when every park has keys, and messages of every day.
        Postgres has one entry for each locked object, and twice as many for each holder of a lock."""
        # Locks on other tables and indexes: lane, counter, message_key, held, segment, schedule, history.
        beside = 20
        of_days = (
            5 * self.partitions + beside
        )  # A table with two indexes, and its table of out-of-line bodies with one.
        of_history = 3 * self.of_history  # Table, out-of-line values and their index. Only readers lock all.
        things = of_days + of_history + LOCKS + 1 + self.lanes + self.limited
        readers = 2 * (of_days + of_history)  # Allows for a dump or an export, and a command.
        holders = self.lanes * (self.parks * (LOCKS + of_days) + of_days) + readers
        usual = 64  # Postgres's default.
        return max(usual, math.ceil(max(things, holders / 2) / self.connections))

    @property
    def enough(self) -> bool:
        return self.allowed >= self.needed


async def lock_need(connection: Connection, history_days: int = 0) -> LockNeed:
    """Query the size of the lock table, and its use, given ``history_days``. Raises the driver's errors."""
    return LockNeed(*await connection.fetchrow(_LOCK_TABLE))._replace(history_days=history_days)


_CONNECTIONS: Final = f"""
SELECT allowed, raise,
       (SELECT count(*) FROM lane WHERE route IS NULL), (SELECT count(*) FROM lane WHERE route IS NOT NULL),
       (SELECT count(*) FROM ({statements.DAEMONS}) AS daemons)
FROM pg_database, pg_roles, LATERAL (VALUES
    (current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
     - coalesce(current_setting('reserved_connections', true)::int, 0), ''),  -- from Postgres 16 on
    (nullif(datconnlimit, -1), format('ALTER DATABASE %I CONNECTION LIMIT', datname)),
    (nullif(rolconnlimit, -1), format('ALTER ROLE %I CONNECTION LIMIT', rolname))
) AS limits (allowed, raise)
WHERE datname = current_database() AND rolname = current_user
ORDER BY allowed LIMIT 1  -- NULL, no limit, comes last
"""


class ConnectionNeed(NamedTuple):
    """``allowed``: the connections for ordinary roles, by the least of the limits of server, database and role.
    ``command``: the statement that raises it; empty: max_connections. ``lanes``: without ``limited`` routes.
    ``daemons``: live. ``tokens``: whether they answer requests over HTTP that change something."""

    allowed: int
    command: str
    lanes: int
    limited: int
    daemons: int
    tokens: bool = False

    @property
    def needed(self) -> int:
        """Connections of all daemons: two per lane, one for the SQL inbox, and per daemon its presence, parks, sessions
        for limited routes, and requests with an Idempotency-Key."""
        each = 1 + PARKERS + (LIMITED_SESSIONS if self.limited else 0) + (MOST_ATTEMPTS if self.tokens else 0)
        return 2 * self.lanes + 1 + max(self.daemons, 1) * each


async def connection_need(connection: Connection) -> ConnectionNeed:
    """Query the connections that the server allows, and their uses. Raises the driver's errors."""
    return ConnectionNeed(*await connection.fetchrow(_CONNECTIONS))


RIGHTS: Final[Mapping[str, str]] = {
    "SCHEMA public": "USAGE, CREATE",
    "message": "OWNER",
    "message_default": "SELECT, DELETE",
    "held": "SELECT, INSERT, UPDATE, DELETE",
    "message_key": "SELECT, INSERT, UPDATE, DELETE",
    "lane": "SELECT, INSERT, UPDATE",
    "store": "SELECT, UPDATE",
    "counter": "SELECT, INSERT, UPDATE",
    "delayer_schema_version": "SELECT",
    "SEQUENCE message_id": "USAGE",
    "segment": "SELECT, UPDATE, DELETE",
    "schedule": "SELECT, UPDATE",
    "request": "SELECT, INSERT, UPDATE, DELETE",
    "delayer_inbox": "SELECT, DELETE",
}
"""The rights of a daemon, as docs/security.md grants them."""
OF_HISTORY: Final[Mapping[str, str]] = {"history": "OWNER", "history_default": "SELECT, DELETE"}

# The roles of live daemons. They may insert or update lanes; any session may have the name of a daemon's. Without a
# live daemon, the current role, unless it only reads: then it is an operator's. Given several privileges, these
# functions are true for any of them. Only the named function of a CASE is called.
_MISSING: Final = """
WITH live AS (
    SELECT DISTINCT usename AS role FROM pg_stat_activity
    WHERE datname = current_database() AND application_name LIKE 'delayer presence%'
          AND has_table_privilege(usesysid, 'lane', 'INSERT, UPDATE')
), roles AS (
    SELECT role FROM live
    UNION SELECT current_user
    WHERE NOT EXISTS (SELECT FROM live) AND has_table_privilege('held', 'INSERT, UPDATE, DELETE')
), needed AS (
    SELECT replace("on", 'SCHEMA public', format('SCHEMA %I', current_schema())) AS "on",
           unnest(string_to_array(rights, ', ')) AS "right"
    FROM unnest($1::text[], $2::text[]) AS listed ("on", rights)
)
SELECT role, "right", "on", CASE "right"
    WHEN 'OWNER' THEN format('ALTER TABLE %s OWNER TO %I', "on", role)
    ELSE format('GRANT %s ON %s TO %I', "right", "on", role) END
FROM roles
CROSS JOIN needed
WHERE NOT CASE
    WHEN "right" = 'OWNER'
        THEN pg_has_role(role, (SELECT relowner FROM pg_class WHERE oid = to_regclass("on")), 'USAGE')
    WHEN "on" LIKE 'SCHEMA %' THEN has_schema_privilege(role, current_schema(), "right")
    WHEN "on" LIKE 'SEQUENCE %' THEN has_sequence_privilege(role, split_part("on", ' ', 2), "right")
    ELSE has_table_privilege(role, "on", "right")
END
"""


_OPEN: Final = """
SELECT count(*) FROM pg_proc
WHERE pronamespace = quote_ident(current_schema())::regnamespace
      AND proname IN ('delayer_send', 'delayer_cancel', 'delayer_write')
      AND has_function_privilege('public', oid, 'EXECUTE')
"""


async def open_functions(connection: Connection) -> int:
    """Count the functions of the SQL inbox that every role may call. Raises the driver's errors."""
    return int(await connection.fetchval(_OPEN))


class MissingRight(NamedTuple):
    """A right that ``role`` lacks. ``advice``: the statement that gives it."""

    role: str
    right: str
    on: str
    advice: str


async def missing_rights(connection: Connection, *, history: bool) -> list[MissingRight]:
    """The rights that the daemons' roles lack. Raises the driver's errors."""
    needed = {**RIGHTS, **(OF_HISTORY if history else {})}
    rows = await connection.fetch(_MISSING, list(needed), list(needed.values()))
    return [MissingRight(*row) for row in rows]
