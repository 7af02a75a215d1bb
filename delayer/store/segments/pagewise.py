"""Segments of a table that has pages which Postgres cannot read: those on its other pages, page by page.

One such page fails every statement that meets it, whatever else that statement is about; and the segments on the other
pages must come back in time all the same. The rows of ``segment`` are small, their bytes lie elsewhere: a hundred
thousand segments are some thousands of pages.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import asyncpg

from delayer.core.segment import FORMAT
from delayer.store import pool, statements
from delayer.store.errors import DAMAGED, describe
from delayer.store.segments.catalog import FOREVER_MS, Listed

_PAGES: Final = "SELECT pg_relation_size('segment') / current_setting('block_size')::bigint"
# Of all plans only this one reads no other page.
_BY_PLACE: Final = "SET LOCAL enable_seqscan = off; SET LOCAL enable_indexscan = off; SET LOCAL enable_bitmapscan = off"
_NEXT: Final = (
    "SELECT first_due, id, last_due FROM segment WHERE first_due <= $1 AND broken_at IS NULL AND format <= $2"
)
_DOUBTFUL: Final = "SELECT first_due, id FROM segment WHERE first_due <= $1 AND (broken_at IS NOT NULL OR format > $2)"


class Next(NamedTuple):
    """The soonest segment that can be read; instants are epoch milliseconds."""

    id: int
    first_due_ms: int
    last_due_ms: int


async def listed(connection: asyncpg.Connection, before_ms: int | None = None) -> tuple[list[Listed], list[str]]:
    """As segments.listed; and which pages cannot be read, with the reasons. Raises the driver's other errors."""
    before_ms = FOREVER_MS if before_ms is None else before_ms
    rows, unreadable = await _read(connection, statements.LIST_SEGMENTS, before_ms, None)
    return sorted((Listed(*row) for row in rows), key=lambda one: (one.first_due_ms, one.id)), unreadable


async def soonest(connection: asyncpg.Connection, horizon_ms: int) -> Next | None:
    """The soonest segment, if it begins by ``horizon_ms``. Raises the driver's other errors."""
    rows, _ = await _read(connection, _NEXT, horizon_ms, FORMAT)
    if not rows:
        return None
    first_ms, number, last_ms = min(map(tuple, rows))
    return Next(number, first_ms, last_ms)


async def doubtful(connection: asyncpg.Connection, horizon_ms: int) -> list[int]:
    """As segments.doubtful. Raises the driver's other errors."""
    rows, _ = await _read(connection, _DOUBTFUL, horizon_ms, FORMAT)
    return [number for _, number in sorted(map(tuple, rows))]


async def _read(
    connection: asyncpg.Connection, statement: str, *arguments: int | None
) -> tuple[list[asyncpg.Record], list[str]]:
    """The rows of ``statement``, which has two parameters, and why others are missing."""
    on_page = statement.replace("WHERE ", "WHERE ctid >= $3 AND ctid < $4 AND ", 1)
    rows: list[asyncpg.Record] = []
    unreadable: list[str] = []
    async with pool.transaction(connection):
        await connection.execute(_BY_PLACE)
        for page in range(await connection.fetchval(_PAGES)):
            try:
                async with pool.transaction(connection):  # a savepoint
                    rows += await connection.fetch(on_page, *arguments, (page, 0), (page + 1, 0))
            except DAMAGED as error:
                unreadable.append(f"page {page} of table segment: {describe(error)}")
    return rows, unreadable
