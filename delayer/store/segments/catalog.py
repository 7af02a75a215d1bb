"""The list of segments: their number, their rows, the messages in one, and the segments of given messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from asyncpg import Connection

from delayer.store import pool, statements
from delayer.store.errors import check_arrow

FOREVER_MS = 1 << 50
"""Upper bound past every due instant: the year 37,648."""


class SegmentEntry(NamedTuple):
    """A row of segment. Instants are epoch milliseconds, rounded down."""

    id: int
    lane: int
    first_due_ms: int
    last_due_ms: int
    messages: int
    raw_bytes: int
    packed_bytes: int
    broken: str | None


class SegmentTotals(NamedTuple):
    """Totals of all segments. ``next_due_ms``: the first due instant, leaving out broken segments."""

    segments: int
    messages: int
    """Including broken segments."""
    broken: int
    broken_messages: int
    next_due_ms: int | None


async def count(connection: Connection) -> SegmentTotals:
    """Count the segments, cheaply, without reading any. Raises the driver's errors."""
    return SegmentTotals(*await connection.fetchrow(statements.read("count_segments")))


async def listed(connection: Connection, before_ms: int = FOREVER_MS) -> list[SegmentEntry]:
    """List the segments whose first message is due before ``before_ms``, soonest first. Raises the driver's errors."""
    return [SegmentEntry(*row) for row in await connection.fetch(statements.read("list_segments"), before_ms)]


_READ = "SELECT id, messages, format, digest, gone, lane FROM segment WHERE id = $1"


async def read(connection: Connection, segment: int) -> tuple[Any, int] | None:
    """Read the messages of a segment (see :func:`live`) for lists, and its lane; None if it is gone. Raises
    SegmentBroken, StoreLost without pyarrow, and the driver's errors."""
    check_arrow()
    from delayer.store.segments.restore import live  # noqa: PLC0415 - pyarrow

    async with connection.transaction(isolation="repeatable_read", readonly=True):
        row = await connection.fetchrow(_READ, segment)
        return None if row is None else (await live(connection, row), row["lane"])


_HOLDING = """
SELECT s.id, array_agg(number)
FROM segment AS s CROSS JOIN LATERAL unnest(s.ids) WITH ORDINALITY AS one (number, nth)
WHERE s.first_due <= $3 AND s.last_due >= $2 AND number = ANY($1)
  AND CASE WHEN (nth - 1) / 8 < length(s.gone) THEN get_bit(s.gone, nth - 1) = 0 ELSE true END
GROUP BY s.id ORDER BY s.id
"""


async def holding(connection: Connection, ids: Collection[int], dues: Mapping[int, int]) -> dict[int, list[int]]:
    """The segments that contain messages ``ids``, each with the ids in it. Reads the ids of every segment, about 40 KB
    each, or only of those around ``dues`` (epoch ms by id) if it has all ids. Raises the driver's errors."""
    if not ids:
        return {}
    at = [dues[number] for number in ids if number in dues]
    first_ms, last_ms = (min(at), max(at) + 1) if len(at) == len(ids) else (pool.BEGINNING_MS, FOREVER_MS)
    return dict(map(tuple, await connection.fetch(_HOLDING, list(ids), first_ms, last_ms)))


_STATE = """
SELECT coalesce(max(id), 0), count(*), (SELECT coalesce(sum(n), 0)::bigint FROM counter WHERE kind = 'restored')
FROM segment
"""


class SegmentListState(NamedTuple):
    """The state of the list of segments. It differs if a segment has been added or removed since, even if both: ids are
    never reused, and restores are counted."""

    newest: int
    segments: int
    restored: int


async def state(connection: Connection) -> SegmentListState:
    """Raises the driver's errors."""
    return SegmentListState(*await connection.fetchrow(_STATE))
