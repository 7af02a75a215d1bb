"""The list of segments: their number, their rows, the messages in one, the segments of given messages, and the removal
of cancelled ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from asyncpg import Connection, Record

from delayer.core.units import DAY_MS
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

    segments: int = 0
    messages: int = 0
    """Including broken segments."""
    broken: int = 0
    broken_messages: int = 0
    next_due_ms: int | None = None


class OverdueSegments(NamedTuple):
    """Segments that should have been restored by now, and their live messages."""

    segments: int = 0
    messages: int = 0
    first_due_ms: int | None = None


async def count(connection: Connection) -> SegmentTotals:
    """Count the segments, cheaply, without reading any. Raises the driver's errors."""
    return SegmentTotals(*await connection.fetchrow(statements.read("count_segments")))


async def list_segments(connection: Connection, before_ms: int = FOREVER_MS) -> list[SegmentEntry]:
    """List the segments whose first message is due before ``before_ms``, soonest first. Raises the driver's errors."""
    return [SegmentEntry(*row) for row in await connection.fetch(statements.read("list_segments"), before_ms)]


async def count_late(connection: Connection, before_ms: int) -> OverdueSegments:
    """Count readable segments whose first message is due before ``before_ms``. Raises the driver's errors."""
    return OverdueSegments(*await connection.fetchrow(statements.read("late_segments"), before_ms))


async def next_due(connection: Connection) -> Record | None:
    """The due instants of the first and last message of the soonest readable segment; None if there is none. Raises the
    driver's errors, and StoreLost without pyarrow, so an operator can install it long before the segment is due."""
    if found := await connection.fetchrow(statements.read("next_segment")):
        check_arrow()
    return found


async def due_days(connection: Connection, segment: int) -> range:
    """The due days of a segment's messages (since 1970); empty if it is gone. Raises the driver's errors."""
    row = await connection.fetchrow("SELECT first_due, last_due FROM segment WHERE id = $1", segment)
    return range(0) if row is None else range(row["first_due"] // DAY_MS, row["last_due"] // DAY_MS + 1)


async def read_segment(connection: Connection, segment: int) -> tuple[Any, int] | None:
    """Read the messages of a segment (see :func:`live`) for lists, and its lane; None if it is gone. Raises
    SegmentBroken, StoreLost without pyarrow, and the driver's errors."""
    check_arrow()
    from delayer.store.segments.restore import live  # noqa: PLC0415 - pyarrow

    async with connection.transaction(isolation="repeatable_read", readonly=True):
        row = await connection.fetchrow(
            "SELECT id, lane, messages, format, digest, gone FROM segment WHERE id = $1", segment
        )
        return None if row is None else (await live(connection, row), row["lane"])


_HOLDING = """
SELECT s.id, array_agg(number)
FROM segment AS s CROSS JOIN LATERAL unnest(s.ids) WITH ORDINALITY AS one (number, nth)
WHERE s.first_due <= $3 AND s.last_due >= $2 AND number = ANY($1)
  AND CASE WHEN (nth - 1) / 8 < length(s.gone) THEN get_bit(s.gone, nth - 1) = 0 ELSE true END
GROUP BY s.id ORDER BY s.id
"""


async def find_segments(connection: Connection, ids: Collection[int], dues: Mapping[int, int]) -> dict[int, list[int]]:
    """The segments that contain messages ``ids``, each with the ids in it. Reads the ids of every segment, about 40 KB
    each, or only of those around ``dues`` (epoch ms by id) if it has all ids. Raises the driver's errors."""
    if not ids:
        return {}
    at = [dues[number] for number in ids if number in dues]
    first_ms, last_ms = (min(at), max(at) + 1) if len(at) == len(ids) else (pool.BEGINNING_MS, FOREVER_MS)
    return dict(map(tuple, await connection.fetch(_HOLDING, list(ids), first_ms, last_ms)))


_STATE: Final = """
SELECT coalesce(max(id), 0), count(*) AS segments,
       (SELECT coalesce(sum(n), 0)::bigint FROM counter WHERE kind = 'restored')
FROM segment
"""


async def read_list_state(connection: Connection) -> Record:
    """The newest id, the number of ``segments``, and the count of restores. This differs if a segment has been added or
    removed since, even if both, because ids are never reused. Raises the driver's errors."""
    return await connection.fetchrow(_STATE)


_LOCK: Final = "SELECT id, gone FROM segment WHERE id = ANY($1) ORDER BY id FOR UPDATE"
_REMOVE: Final = """
UPDATE segment AS s SET gone = r.gone, messages = s.messages - r.messages, raw_bytes = s.raw_bytes - r.size
FROM unnest($1::bigint[], $2::bytea[], $3::int[], $4::bigint[]) AS r (id, gone, messages, size)
WHERE s.id = r.id RETURNING s.id, s.messages
"""


async def remove(connection: Connection, packed: Sequence[Record], spare: Collection[bytes]) -> list[Record]:
    """Remove messages (rows of message_key) from their segments, which stay packed, but only lock those of ``spare``.
    Returns those that were still there. Step 3 of rows/keys.py. Raises the driver's errors."""
    changes, met = [], []
    by_segment: dict[int, list[Record]] = {}
    for place in packed:
        by_segment.setdefault(place["segment"], []).append(place)
    for segment, gone in await connection.fetch(_LOCK, list(by_segment)):
        met += by_segment[segment]
        if removed := [place for place in by_segment[segment] if place["key"] not in spare]:
            bits = with_bits(gone, [place["position"] for place in removed])
            changes.append((segment, bits, len(removed), sum(place["size"] for place in removed)))
    if changes:
        left = await connection.fetch(_REMOVE, *map(list, zip(*changes, strict=True)))
        if empty := [segment for segment, messages in left if not messages]:
            await connection.execute("DELETE FROM segment WHERE id = ANY($1)", empty)
    return met


def with_bits(bits: bytes, positions: Iterable[int]) -> bytes:
    """Return ``bits`` with the bits at ``positions`` set, numbered like Postgres's ``get_bit``.

    >>> with_bits(b"\\x01", [3, 8])
    b'\\t\\x01'
    """
    found = bytearray(bits)
    for position in positions:
        found += bytes(max(position // 8 + 1 - len(found), 0))
        found[position // 8] |= 1 << position % 8
    return bytes(found)
