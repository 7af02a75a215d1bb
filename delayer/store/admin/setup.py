"""Settings of a store apart from its tables: the number of lanes, skipped ids, the server's lock table, and the tables'
owner. One role may upgrade the store and another run the daemon (docs/security.md).

Postgres keeps the locks of a whole cluster in one table of fixed size: max_locks_per_transaction for each connection or
process of the server. When it is full, a transaction of any database may fail with "out of shared memory".
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, NamedTuple

import asyncpg
from asyncpg import Connection

from delayer.core.errors import StoreLost
from delayer.store import pool, servers
from delayer.store.errors import WORTH_REPEATING
from delayer.store.identity import StoreIdentity, give_new_broker, read_identity
from delayer.store.lanes.locks import ADD, LIMITED_SESSIONS
from delayer.store.postgres import PARKERS
from delayer.store.rows import history
from delayer.store.rows.keys import LOCKS
from delayer.store.schema import check, current_of
from delayer.store.session import opened


async def schema_of(url: str) -> str | None:
    """The schema's revision; None if the store does not have our schema. Raises StoreLost, BadStoreUrl."""
    async with opened(url, "delayer schema", "read the schema's version") as connection:
        return await current_of(connection)


_ORDINARY: Final = "SELECT count(*) FROM lane WHERE route IS NULL"


async def raise_lanes(url: str, wanted: int) -> int:
    """Create lanes until ``wanted`` have no route. Returns the total. Raises StoreLost, BadStoreUrl, SchemaOutdated."""
    async with opened(url, "delayer schema", "make lanes") as connection, pool.transaction(connection):
        await check(connection)
        await connection.execute("LOCK TABLE lane IN SHARE ROW EXCLUSIVE MODE")
        count: int = await connection.fetchval(_ORDINARY)
        for _ in range(count, wanted):
            await connection.execute(ADD, None)
        return max(count, wanted)


TRIES: Final = 10
PAUSE_SECONDS: Final = 2.0
IN_THE_WAY: Final = (asyncpg.LockNotAvailableError, *WORTH_REPEATING)
FAR: Final = 1_000_000_000
"""More than any store issues while a backup or a standby is behind, and negligible out of 2^63."""

LOCK_SECONDS: Final = 0.5
"""How long to wait for the sequence. Parks that need an id wait behind us."""

# A no-op whose lock blocks nextval() elsewhere until the commit: an id drawn between nextval() and setval() would be
# issued twice. LOCK does not work on sequences.
_ALONE: Final = "ALTER SEQUENCE message_id NO CYCLE"
_WAY_OUT: Final = (
    "run this again when what takes ids in long transactions (an import?) is over, or stop daemons and imports first; "
    "nothing is changed"
)


async def skip_ids(url: str, by: int, *, tries: int = TRIES, pause: float = PAUSE_SECONDS) -> int:
    """Skip ``by`` ids. Returns the minimum for the next message's id. Safe while daemons run, and to repeat. ``tries``:
    attempts to lock the sequence, ``pause`` seconds apart. Raises StoreLost, BadStoreUrl, SchemaOutdated."""
    try:
        async with opened(url, "delayer skip-ids", "move the ids on") as connection:
            await check(connection)
            for _ in range(tries - 1):
                with suppress(*IN_THE_WAY):
                    return await _skip(connection, by)
                await asyncio.sleep(pause)
            return await _skip(connection, by)
    except StoreLost as error:
        if isinstance(error.__cause__, IN_THE_WAY):
            raise StoreLost(str(error), _WAY_OUT) from error
        raise


async def _skip(connection: Connection, by: int) -> int:
    """Wait for the lock only briefly, because the traffic waits behind us. Raises the driver's errors."""
    async with pool.transaction(connection):
        # A transaction that drew ids keeps the lock until its commit, and an import's commit may take long.
        await connection.execute(f"SET LOCAL lock_timeout = {LOCK_SECONDS * 1000:.0f}")
        await connection.execute(_ALONE)
        last: int = await connection.fetchval("SELECT setval('message_id', nextval('message_id') + $1)", by)
    return last + 1


async def identity(url: str) -> StoreIdentity:
    """The store's id, and whether it has a broker. Raises StoreLost, BadStoreUrl, SchemaOutdated."""
    async with opened(url, "delayer check", "read the store's id") as connection:
        await check(connection)
        return await read_identity(connection)


async def accept_broker(url: str, declare: Callable[[StoreIdentity], Awaitable[None]]) -> None:
    """Let the store belong to the broker on which ``declare`` declares its exchange. Raises what ``declare`` raises,
    and StoreLost, BadStoreUrl, SchemaOutdated."""
    async with opened(url, "delayer topology", "note the broker") as connection:
        await check(connection)
        if daemons := (await read_identity(connection)).daemons:
            raise StoreLost(
                f"daemons work for this store: {daemons}", "stop every daemon of the store, then repeat this"
            )
        await give_new_broker(connection, declare)


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
        return self.history_days + history.DAYS_AHEAD + 2 if self.history_days else 0  # Today's, and the default one.

    @property
    def needed(self) -> int:
        """The max_locks_per_transaction for the worst case, when every park has keys, and messages of every day.
        Postgres has one entry for each locked object, and twice as many for each holder of one."""
        # A transaction's locks on other tables and indexes: lane, counter, message_key, held, segment, history.
        beside = 16
        of_days = 5 * self.partitions + beside  # A table with two indexes, and one of out-of-line bodies with one.
        of_history = 3 * self.of_history  # Table, out-of-line values and their index. Only readers lock all.
        things = of_days + of_history + LOCKS + self.lanes + self.limited
        readers = 2 * (of_days + of_history)  # A dump or an export, and a command.
        holders = self.lanes * (self.parks * (LOCKS + of_days) + of_days) + readers
        usual = 64  # Postgres's default.
        return max(usual, math.ceil(max(things, holders / 2) / self.connections))

    @property
    def enough(self) -> bool:
        return self.allowed >= self.needed


async def lock_need(url: str, history_days: int = 0) -> LockNeed:
    """Query the size of the lock table, and what it needs, given ``history_days``. Raises StoreLost, BadStoreUrl."""
    async with opened(url, "delayer check", "look at the locks") as connection:
        return LockNeed(*await connection.fetchrow(_LOCK_TABLE))._replace(history_days=history_days)


async def server_state(url: str) -> servers.ServerState:
    """See ServerState. Raises StoreLost, BadStoreUrl."""
    async with opened(url, "delayer check", "look at the server") as connection:
        return await servers.state(connection)


_CONNECTIONS: Final = """
SELECT allowed, raise,
       (SELECT count(*) FROM lane WHERE route IS NULL), (SELECT count(*) FROM lane WHERE route IS NOT NULL),
       (SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'delayer presence')
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
    ``daemons``: live."""

    allowed: int
    command: str
    lanes: int
    limited: int
    daemons: int

    @property
    def needed(self) -> int:
        """Connections of all daemons: two per lane, and per daemon its presence, parks, and sessions for limited
        routes."""
        each = 1 + PARKERS + (LIMITED_SESSIONS if self.limited else 0)
        return 2 * self.lanes + max(self.daemons, 1) * each


async def connection_need(url: str) -> ConnectionNeed:
    """Query the connections that the server allows, and their uses. Raises StoreLost, BadStoreUrl."""
    async with opened(url, "delayer check", "look at the connections") as connection:
        return ConnectionNeed(*await connection.fetchrow(_CONNECTIONS))


_OWNERS: Final = """
SELECT tables.rolname, base.rolname
FROM pg_class AS c JOIN pg_roles AS tables ON tables.oid = c.relowner
CROSS JOIN pg_database AS d JOIN pg_roles AS base ON base.oid = d.datdba
WHERE c.oid = 'lane'::regclass AND d.datname = current_database() AND tables.oid <> base.oid
  AND NOT base.rolsuper AND pg_has_role(base.oid, tables.oid, 'MEMBER')
"""


class OwnerMismatch(NamedTuple):
    """The role that owns the tables, and the role that should."""

    tables: str
    database: str


async def mistaken(url: str) -> OwnerMismatch | None:
    """Both owners, if they differ because the daemon's role upgraded the store: the database's owner is a member of
    that role and no superuser. None if all is well. Raises StoreLost, BadStoreUrl."""
    async with opened(url, "delayer check", "look at the owner") as connection:
        row = await connection.fetchrow(_OWNERS)
    return None if row is None else OwnerMismatch(*row)
