"""Upgrades of the store's schema by Alembic (`delayer db upgrade`). The scripts in migrations/ define and explain the
tables. The wheel has them in delayer/store/migrations. schema.py finds out which schema a store has."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import asyncpg
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from delayer.store import pool
from delayer.store.admin.setup import raise_lanes
from delayer.store.errors import SchemaUnusable, describe, driver_error, to_store_lost, translate_errors

_TAKEN: Final = (asyncpg.DuplicateTableError, asyncpg.DuplicateFunctionError, asyncpg.DuplicateObjectError)
"""A relation, a function or a type of this name exists."""
OWN_SCHEMA: Final = (
    "give delayer a schema of its own: CREATE SCHEMA delayer, add options=-csearch_path%3Ddelayer to the query of "
    "store.url (postgresql://…/database?options=-csearch_path%3Ddelayer), and call delayer.delayer_send(…). But "
    "if this schema had a store, restore its table delayer_schema_version: messages may wait in the others"
)


def _config() -> Config:
    here = Path(__file__).resolve().parent
    shipped, checkout = here / "migrations", here.parents[1] / "migrations"
    config = Config()
    config.set_main_option("script_location", str(shipped if shipped.is_dir() else checkout).replace("%", "%%"))
    return config


async def upgrade(url: str, lanes: int = 4) -> None:
    """Upgrade to schema.HEAD in one transaction, then create missing lanes up to ``lanes``. Raises SchemaUnusable,
    StoreLost, BadStoreUrl."""
    schema: str | None = None

    async def connect() -> asyncpg.Connection:
        return await pool.connect(url, "delayer schema", plain=True)  # Upgrading a large store takes its time.

    def run(connection: Connection) -> None:
        nonlocal schema
        schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
        if schema is None:
            text = "no schema of the search_path exists in this database, or this role may not use it"
            raise SchemaUnusable(f"{text}; nothing was changed", "CREATE SCHEMA, or correct options in store.url")
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")

    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect, poolclass=NullPool)
    try:
        with translate_errors("schema upgrade"):
            async with engine.begin() as connection:
                await connection.run_sync(run)
    except DBAPIError as error:
        if isinstance(taken := driver_error(error.orig or error), _TAKEN):
            text = f"the schema {schema!r} is in use: {describe(taken)}; nothing was changed"
            raise SchemaUnusable(text, OWN_SCHEMA) from error
        raise to_store_lost("schema upgrade", error.orig or error) from error
    finally:
        await engine.dispose()
    await raise_lanes(url, lanes)
