"""The segments of a store, for lists: their number, their rows, and the messages in one."""

from __future__ import annotations

from typing import Any, NamedTuple

from asyncpg import Connection

from delayer.store import statements
from delayer.store.errors import check_arrow

FOREVER_MS = 1 << 50
"""Behind every due instant, as a bound: the year 37,648."""


class SegmentEntry(NamedTuple):
    """A segment as it stands. Instants are epoch milliseconds, rounded down."""

    id: int
    lane: int
    first_due_ms: int
    last_due_ms: int
    messages: int
    raw_bytes: int
    packed_bytes: int
    broken: str | None


class SegmentTotals(NamedTuple):
    """All segments together. ``next_due_ms`` is the first due instant of those that are not broken."""

    segments: int
    messages: int
    """In broken segments too."""
    broken: int
    broken_messages: int
    next_due_ms: int | None


async def count(connection: Connection) -> SegmentTotals:
    """Count them: cheap, no segment is read. Raises the driver's errors."""
    return SegmentTotals(*await connection.fetchrow(statements.read("count_segments")))


async def listed(connection: Connection, before_ms: int | None = None, limit: int | None = None) -> list[SegmentEntry]:
    """The segments whose first message is due before ``before_ms``, the soonest first. Raises the driver's errors."""
    before_ms = FOREVER_MS if before_ms is None else before_ms
    return [SegmentEntry(*row) for row in await connection.fetch(statements.read("list_segments"), before_ms, limit)]


_READ = "SELECT id, messages, format, digest, gone, lane FROM segment WHERE id = $1"


async def read(connection: Connection, segment: int) -> tuple[Any, int] | None:
    """The messages of a segment (see :func:`live`), for lists, and its lane; None if it is gone. Raises SegmentBroken,
    StoreLost without pyarrow, and the driver's errors."""
    check_arrow()
    from delayer.store.segments.restore import live  # noqa: PLC0415 - pyarrow

    async with connection.transaction(isolation="repeatable_read", readonly=True):
        row = await connection.fetchrow(_READ, segment)
        return None if row is None else (await live(connection, row), row["lane"])
