"""Schema upgrades: how a store gets to where this program needs it; schema.py says where it stands.

One at a time in a process, as Alembic keeps its environment in module globals; processes take turns by a lock.
Each lock is had within a second, or others pass and all begins anew: `pg_dump` and an audit keep what they read locked
for as long as they run, and every daemon would wait behind an upgrade that waits for them.
They ship with the package (delayer/store/migrations in the wheel); in a checkout they are in migrations/ at its root.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import asyncpg
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from delayer.core.errors import StoreLost
from delayer.store import brief_locks, session, tables
from delayer.store.errors import driver_error, lost, translated

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection


LOCK_SECONDS: Final = 1.0
"""How long an upgrade waits for a lock, and others behind it."""
_HOLDERS: Final = """
SELECT a.application_name, a.pid
FROM pg_stat_activity AS a
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND EXISTS (
    SELECT FROM pg_locks AS k JOIN pg_class AS c ON c.oid = k.relation
    WHERE k.pid = a.pid AND k.granted AND c.relnamespace = current_schema()::regnamespace
) AND coalesce(a.xact_start, '-infinity') < now() - $1::float8 * interval '1 second'
ORDER BY a.xact_start NULLS LAST, a.pid LIMIT 3
"""
"""Who has had locks for longer than we wait. Of other roles only their superior sees since when."""


def _config() -> Config:
    here = Path(__file__).resolve().parent
    shipped, checkout = here / "migrations", here.parents[1] / "migrations"
    config = Config()
    config.set_main_option("script_location", str(shipped if shipped.is_dir() else checkout).replace("%", "%%"))
    return config


def revisions() -> list[str]:
    """The schema upgrades that ship with this program, oldest first."""
    scripts = ScriptDirectory.from_config(_config())
    return [script.revision for script in reversed(list(scripts.walk_revisions()))]


async def upgrade(url: str, revision: str = "head") -> None:
    """Bring the schema up to ``revision``, in one transaction. Raises StoreLost, BadStoreUrl, ValueError."""
    await _run(url, lambda config: command.upgrade(config, revision))


async def downgrade(url: str, revision: str) -> None:
    """Take the schema down to ``revision`` (``base`` is nothing at all), in one transaction, with its messages."""
    await _run(url, lambda config: command.downgrade(config, revision))


async def _run(url: str, step: Callable[[Config], None]) -> None:
    try:
        with translated("schema upgrade"):
            await brief_locks.patiently(lambda: _try(url, step))
    except StoreLost as error:
        if isinstance(error.__cause__, brief_locks.IN_THE_WAY):
            raise StoreLost(str(error), await _way_out(url)) from error
        raise
    except CommandError as error:
        raise ValueError(f"schema upgrade: {error}") from error


async def _try(url: str, step: Callable[[Config], None]) -> None:
    """Raises the driver's errors for locks that are in the way, else StoreLost, BadStoreUrl, CommandError."""

    async def connect() -> asyncpg.Connection:
        # An upgrade of a large store takes as long as it takes.
        return await session.connect_plain(url, "delayer schema", {"statement_timeout": "0"}, command_seconds=None)

    def run(connection: Connection) -> None:
        config = _config()
        config.attributes["connection"] = connection
        config.attributes["target_metadata"] = tables.metadata
        config.attributes["lock_ms"] = round(LOCK_SECONDS * 1000)
        step(config)

    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect, poolclass=NullPool)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(run)
    except DBAPIError as error:
        driver = driver_error(error.orig or error)
        if isinstance(driver, brief_locks.IN_THE_WAY):
            raise driver from None  # whose cause it is
        raise lost("schema upgrade", error.orig or error) from error
    finally:
        await engine.dispose()


async def _way_out(url: str) -> str:
    """What to do about a lock that never came, by who has one at this moment."""
    connection = await session.connect_plain(url, "delayer schema")
    try:
        with translated("who has locks"):
            holders = await connection.fetch(_HOLDERS, LOCK_SECONDS)
    finally:
        await session.close(connection)
    named = ", ".join(f"{name or 'without a name'} (process {pid})" for name, pid in holders)
    who = f" of {named}" if named else " that keeps tables locked"
    return (
        f"wait for the end of the transaction{who} (a dump, an audit, somebody's psql?), or end it by "
        "SELECT pg_terminate_backend(PROCESS), and run this again; nothing is changed, and daemons go on meanwhile"
    )
