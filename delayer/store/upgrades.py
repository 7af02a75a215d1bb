"""Schema upgrades: how a store gets to where this program needs it; schema.py says where it stands.

One at a time in a process, as Alembic keeps its environment in module globals; processes take turns by a lock.
They ship with the package (delayer/store/migrations in the wheel); in a checkout they are in migrations/ at its root.
"""

from __future__ import annotations

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

from delayer.store import session, tables
from delayer.store.errors import lost, translated

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection


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
        raise lost("schema upgrade", error.orig or error) from error
    except CommandError as error:
        raise ValueError(f"schema upgrade: {error}") from error
    finally:
        await engine.dispose()
