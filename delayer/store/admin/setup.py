"""Settings of a store apart from its tables: the number of lanes, skipped ids, and its broker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import asyncpg

from delayer.core.errors import StoreLost
from delayer.store import pool
from delayer.store.errors import WORTH_REPEATING
from delayer.store.identity import StoreIdentity, give_new_broker, read_identity
from delayer.store.lanes.locks import ADD
from delayer.store.schema import check, current_of
from delayer.store.session import connect_for


async def schema_of(url: str) -> str | None:
    """The schema's revision; None if the store does not have our schema. Raises StoreLost, BadStoreUrl."""
    async with connect_for(url, "delayer schema", "read the schema's version") as connection:
        return await current_of(connection)


_ORDINARY: Final = "SELECT count(*) FROM lane WHERE route IS NULL"


async def raise_lanes(url: str, wanted: int) -> int:
    """Create lanes until ``wanted`` have no route. Returns the total. Raises StoreLost, BadStoreUrl, SchemaOutdated."""
    async with connect_for(url, "delayer schema", "make lanes") as connection, pool.transaction(connection):
        await check(connection)
        await connection.execute("LOCK TABLE lane IN SHARE ROW EXCLUSIVE MODE")
        count: int = await connection.fetchval(_ORDINARY)
        for _ in range(count, wanted):
            await connection.execute(ADD, None)
        return max(count, wanted)


FAR: Final = 1_000_000_000
"""More than any store issues while a backup or a standby is behind, and negligible out of 2^63."""
LOCK_SECONDS: Final = 0.5
"""How long to wait for the sequence. Parks that need an id wait behind us. A transaction that drew ids keeps its lock
until its commit, and an import's commit may take long."""

# A no-op whose lock blocks nextval() elsewhere until the commit: an id drawn between nextval() and setval() would be
# issued twice. LOCK does not work on sequences.
_ALONE: Final = "ALTER SEQUENCE message_id NO CYCLE"
_WAY_OUT: Final = (
    "run this again when what takes ids in long transactions (an import?) is over, or stop daemons and imports first; "
    "nothing is changed"
)


async def skip_ids(url: str, by: int) -> int:
    """Skip ``by`` ids. Returns the minimum for the next message's id. Safe while daemons run, and to repeat. Raises
    StoreLost, BadStoreUrl, SchemaOutdated."""
    try:
        async with connect_for(url, "delayer skip-ids", "skip ids") as connection, pool.transaction(connection):
            await check(connection)
            await connection.execute(f"SET LOCAL lock_timeout = {LOCK_SECONDS * 1000:.0f}")
            await connection.execute(_ALONE)
            last: int = await connection.fetchval("SELECT setval('message_id', nextval('message_id') + $1)", by)
        return last + 1
    except StoreLost as error:
        if isinstance(error.__cause__, (asyncpg.LockNotAvailableError, *WORTH_REPEATING)):
            raise StoreLost(str(error), _WAY_OUT) from error
        raise


async def identity(url: str) -> StoreIdentity:
    """The store's id, and whether it has a broker. Raises StoreLost, BadStoreUrl, SchemaOutdated."""
    async with connect_for(url, "delayer check", "read the store's id") as connection:
        await check(connection)
        return await read_identity(connection)


async def accept_broker(url: str, declare: Callable[[StoreIdentity], Awaitable[None]]) -> None:
    """Let the store belong to the broker on which ``declare`` declares its exchange. Raises what ``declare`` raises,
    and StoreLost, BadStoreUrl, SchemaOutdated."""
    async with connect_for(url, "delayer topology", "note the broker") as connection:
        await check(connection)
        if daemons := (await read_identity(connection)).daemons:
            raise StoreLost(
                f"daemons work for this store: {daemons}", "stop every daemon of the store, then repeat this"
            )
        await give_new_broker(connection, declare)
