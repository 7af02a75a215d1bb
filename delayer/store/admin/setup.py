"""Settings of a store beside its tables. They are the number of lanes, skipped ids, the server's lock table, and
the owner of the tables.

One role may upgrade the store and another one run the daemon (docs/security.md). Postgres keeps the locks of a whole
cluster in one table of fixed size: max_locks_per_transaction for each connection or process of the server. When it is
full, a transaction of any database may fail with "out of shared memory".
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
    """The schema's revision; None if the store has no schema of ours. Raises StoreLost, BadStoreUrl."""
    async with opened(url, "delayer schema", "read the schema's version") as connection:
        return await current_of(connection)


_ORDINARY: Final = "SELECT count(*) FROM lane WHERE route IS NULL"


async def raise_lanes(url: str, wanted: int) -> int:
    """Make lanes until there are ``wanted`` without a route; how many there are. Raises StoreLost, BadStoreUrl,
    SchemaOutdated."""
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
"""More than any store gives while a backup or a standby is behind, and nothing beside the 2^63 that there are."""

LOCK_SECONDS: Final = 0.5
"""Seconds that we wait for the numbers. Parks that need one wait behind us."""

# This changes nothing, but its lock keeps all others from taking numbers until the commit. Numbers taken between the
# reading and the setting would be given twice. There is no LOCK for sequences.
_ALONE: Final = "ALTER SEQUENCE message_id NO CYCLE"
_WAY_OUT: Final = (
    "run this again when what takes ids in long transactions (an import?) is over, or stop daemons and imports first; "
    "nothing is changed"
)


async def skip_ids(url: str, by: int, *, tries: int = TRIES, pause: float = PAUSE_SECONDS) -> int:
    """Leave out ``by`` numbers; the number that the next message gets at the least. Safe beside daemons, and to repeat.
    ``tries``: attempts at its lock. ``pause``: seconds between two. Raises StoreLost, BadStoreUrl, SchemaOutdated."""
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
    """It waits only a moment for its lock, because the traffic waits behind it. Raises the driver's errors."""
    async with pool.transaction(connection):
        # A transaction that took numbers holds their lock until the commit, and an import's commit may take long.
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
    StoreLost, BadStoreUrl, SchemaOutdated."""
    async with opened(url, "delayer topology", "note the broker") as connection:
        await check(connection)
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
    the lanes of ``limited`` routes are not among these."""

    allowed: int
    connections: int
    partitions: int
    lanes: int
    limited: int = 0
    history_days: int = 0
    parks: int = 3
    """Parks of one process at once."""

    @property
    def of_history(self) -> int:
        """Partitions of the history, once it has run for ``history_days``."""
        return self.history_days + history.DAYS_AHEAD + 2 if self.history_days else 0  # Today's, and the default one.

    @property
    def needed(self) -> int:
        """The max_locks_per_transaction for the worst case: every park has keys, and messages of every day.

        Postgres keeps one entry for each locked object, and twice as many for each holder of one.
        """
        # Locks of a transaction on other tables and indexes: lane, counter, message_key, held, segment, history.
        beside = 16
        of_days = 5 * self.partitions + beside  # A table with two indexes, and one of out-of-line bodies with one.
        of_history = 3 * self.of_history  # Table, and out-of-line values with their index. Only readers lock all.
        things = of_days + of_history + LOCKS + self.lanes + self.limited
        readers = 2 * (of_days + of_history)  # A dump or an export, and a command.
        holders = self.lanes * (self.parks * (LOCKS + of_days) + of_days) + readers
        usual = 64  # Postgres's default
        return max(usual, math.ceil(max(things, holders / 2) / self.connections))

    @property
    def enough(self) -> bool:
        return self.allowed >= self.needed


async def lock_need(url: str, history_days: int = 0) -> LockNeed:
    """Return the size of the lock table, and the size that it needs with a history of so many days. Raises StoreLost,
    BadStoreUrl."""
    async with opened(url, "delayer check", "look at the locks") as connection:
        return LockNeed(*await connection.fetchrow(_LOCK_TABLE))._replace(history_days=history_days)


async def server_state(url: str) -> servers.ServerState:
    """See ServerState. Raises StoreLost, BadStoreUrl."""
    async with opened(url, "delayer check", "look at the server") as connection:
        return await servers.state(connection)


_CONNECTIONS: Final = """
SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int,
       (SELECT count(*) FROM lane WHERE route IS NULL), (SELECT count(*) FROM lane WHERE route IS NOT NULL),
       (SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'delayer presence')
"""


class ConnectionNeed(NamedTuple):
    """``allowed``: the connections of ordinary roles to the server. ``lanes``: without those of ``limited`` routes.
    ``daemons``: those at work."""

    allowed: int
    lanes: int
    limited: int
    daemons: int

    @property
    def needed(self) -> int:
        """The most connections of all daemons together: two for each lane, and for each daemon its presence, parks,
        and the sessions that limited routes share."""
        each = 1 + PARKERS + (LIMITED_SESSIONS if self.limited else 0)
        return 2 * self.lanes + max(self.daemons, 1) * each


async def connection_need(url: str) -> ConnectionNeed:
    """Return the connections that the server allows, and what they are needed for. Raises StoreLost, BadStoreUrl."""
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
    """The role that owns the tables, and the one that should."""

    tables: str
    database: str


async def mistaken(url: str) -> OwnerMismatch | None:
    """Both, where the daemon's role upgraded a store that has an owner: that of the database, a member of the other and
    no superuser. None where all is well. Raises StoreLost, BadStoreUrl."""
    async with opened(url, "delayer check", "look at the owner") as connection:
        row = await connection.fetchrow(_OWNERS)
    return None if row is None else OwnerMismatch(*row)
