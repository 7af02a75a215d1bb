"""Connections of commands, and of the page, to a store with our schema."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

from asyncpg import Connection

from delayer.store import pool, schema
from delayer.store.errors import translate_errors

LONG_SECONDS: Final = 3_600.0
"""For statements over the whole store, without statement_timeout. To the driver, None means COMMAND_SECONDS."""


@asynccontextmanager
async def connect_for(
    url: str, application: str, doing: str, more: Mapping[str, str] | None = None
) -> AsyncIterator[Connection]:
    """A connection of :func:`pool.connect` for one block. Errors name ``doing``. Raises StoreLost, BadStoreUrl."""
    connection = await pool.connect(url, application, more)
    try:
        with translate_errors(doing):
            yield connection
    finally:
        await pool.close(connection)


@asynccontextmanager
async def read_connection(
    url: str, doing: str, application: str = "delayer look", settings: Mapping[str, str] = pool.INDEX_ONLY
) -> AsyncIterator[Connection]:
    """A connection for queries of the store. Errors name ``doing``. Raises StoreLost, BadStoreUrl, SchemaOutdated."""
    async with connect_for(url, application, doing, settings) as connection:
        await schema.check(connection)
        yield connection


async def clock_ms(url: str, doing: str) -> int:
    """The store's clock, rounded up to epoch milliseconds. An instant from now counts from it, because the clock of the
    host may be behind or ahead. Raises like :func:`read_connection`."""
    async with read_connection(url, doing) as connection:
        now_ms: int = await connection.fetchval("SELECT ceil(extract(epoch FROM clock_timestamp()) * 1000)::bigint")
    return now_ms
