"""Schema upgrades: where the store stands, and how it gets to where this program needs it.

One at a time in a process, as Alembic keeps its environment in module globals; processes take turns by a lock.
They ship with the package (delayer/store/migrations in the wheel); in a checkout they are in migrations/ at its root.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from delayer.core.errors import StoreLost
from delayer.store import session, tables
from delayer.store.errors import SchemaOutdated, describe, translated

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection

VERSION_TABLE = "delayer_schema_version"


def _config() -> Config:
    here = Path(__file__).resolve().parent
    shipped, checkout = here / "migrations", here.parents[1] / "migrations"
    config = Config()
    config.set_main_option("script_location", str(shipped if shipped.is_dir() else checkout).replace("%", "%%"))
    return config


@cache
def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())


async def head() -> str:
    """The revision that this program works with."""
    return _head()


def _head() -> str:
    revision = _scripts().get_current_head()
    if revision is None:
        raise RuntimeError("the package has no schema upgrades in it")
    return revision


async def current(url: str) -> str | None:
    """The revision of the store; None if it has no schema of ours. Raises StoreLost, BadStoreUrl."""
    connection = await session.connect(url, "delayer schema")
    try:
        with translated("read the schema's version"):
            return await current_of(connection)
    finally:
        await session.close(connection)


async def current_of(connection: asyncpg.Connection) -> str | None:
    """The revision of the store behind ``connection``. Raises the driver's errors."""
    if not await connection.fetchval("SELECT to_regclass($1)", VERSION_TABLE):
        return None
    revision: str | None = await connection.fetchval(f"SELECT version_num FROM {VERSION_TABLE}")
    return revision


async def pending(url: str) -> bool:
    """Whether the store lacks an upgrade, or is beyond us. Raises StoreLost, BadStoreUrl."""
    return await current(url) != _head()


async def check(connection: asyncpg.Connection) -> None:
    """Raise SchemaOutdated unless the store has exactly our schema."""
    found = await current_of(connection)
    if found != _head():
        known = {script.revision for script in _scripts().walk_revisions()}
        raise SchemaOutdated(found, _head(), newer=found is not None and found not in known)


async def upgrade(url: str, revision: str = "head") -> None:
    """Bring the schema up to ``revision``, in one transaction. Raises StoreLost, BadStoreUrl, ValueError."""
    await _run(url, lambda config: command.upgrade(config, revision))


async def downgrade(url: str, revision: str) -> None:
    """Take the schema down to ``revision`` (``base`` is nothing at all), in one transaction, with its messages."""
    await _run(url, lambda config: command.downgrade(config, revision))


async def _run(url: str, step: Callable[[Config], None]) -> None:
    async def connect() -> asyncpg.Connection:
        # An upgrade of a large store takes as long as it takes.
        return await session.connect_plain(url, "delayer schema", {"statement_timeout": "0"}, command_seconds=None)

    def run(connection: Connection) -> None:
        config = _config()
        config.attributes["connection"] = connection
        config.attributes["target_metadata"] = tables.metadata
        step(config)

    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect, poolclass=NullPool)
    try:
        with translated("schema upgrade"):
            async with engine.begin() as connection:
                await connection.run_sync(run)
    except DBAPIError as error:
        raise StoreLost(f"schema upgrade: {describe(error.orig or error)}") from error
    except CommandError as error:
        raise ValueError(f"schema upgrade: {error}") from error
    finally:
        await engine.dispose()
