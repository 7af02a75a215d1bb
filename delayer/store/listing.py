"""Waiting messages, page by page, in the order of (due instant, id), merged over the lanes and the segments.

A page begins behind the last place of the one before, found by the primary key of the few partitions that it touches:
it costs the same with ten million rows waiting as with ten. What no index knows (route, destination, headers) is found
by reading on, and that is bounded: a page may end before it is full, and says so, and the next one goes on from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import asyncpg

from delayer.core.filters import Filter, Token
from delayer.store import cancelling, schema, segments, session, unpacking
from delayer.store.errors import translated
from delayer.store.scanning import BEGINNING, LAST_ID, Place, Rows, Test, conditions

__all__ = [
    "BEGINNING", "LAST_ID", "SCAN", "SEGMENTS", "SETTINGS", "Entry", "Found", "Place", "Test", "conditions", "entries",
    "entries_of", "find", "looking", "meant", "named",
]  # fmt: skip

SCAN: Final = 10_000
"""Rows that one page reads at most, of all lanes together, to find those that are meant."""
SEGMENTS: Final = 4
"""Segments that one page unpacks at most: some 50 ms each."""
SETTINGS: Final = {
    # Plans must be ranges of the primary key, whatever the statistics say of a partition that was just filled.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}
_COLUMNS: Final = """
SELECT m.lane, (extract(epoch FROM m.due_at) * 1000000)::bigint AS due_us, m.id, m.parked_at, m.route, m.exchange,
       m.routing_key, m.to_exchange, m.to_key, m.key, octet_length(m.body) AS size, m.properties
"""
_ENTRIES: Final = f"""{_COLUMNS}
FROM unnest($1::smallint[], $2::bigint[], $3::bigint[]) AS w (lane, due_us, id)
CROSS JOIN LATERAL (
    SELECT * FROM message
    WHERE lane = w.lane AND due_at = 'epoch'::timestamptz + w.due_us * interval '1 microsecond' AND id = w.id
      AND due_at >= $4 AND due_at < $5
) AS m
ORDER BY due_us, id
"""
# Of which the due instant is known to the millisecond.
_NAMED: Final = f"""{_COLUMNS}
FROM unnest($1::smallint[], $2::timestamptz[], $3::bigint[]) AS w (lane, due, id)
CROSS JOIN LATERAL (
    SELECT * FROM message
    WHERE lane = w.lane AND due_at >= w.due AND due_at < w.due + interval '1 millisecond' AND id = w.id
      AND due_at >= $4 AND due_at < $5
) AS m
"""
_KEYED: Final = (
    "SELECT m.lane, (extract(epoch FROM m.due_at) * 1000000)::bigint, m.id FROM message_key AS k JOIN message AS m"
    " ON m.lane = k.lane AND m.due_at = k.due_at AND m.id = k.id WHERE k.key = $1"
)


class Entry(NamedTuple):
    """A waiting message without its body."""

    place: Place
    parked_ms: int
    route: bytes
    exchange: bytes
    routing_key: bytes
    to_exchange: bytes
    to_key: bytes
    key: bytes | None
    size: int
    properties: bytes


class Found(NamedTuple):
    """The next messages that are meant. ``after`` is where to go on, None where nothing is left.

    ``bounded``: reading ended at its limit, before enough were found. ``broken``: segments that do not read back and
    may hold messages that are meant.
    """

    places: Sequence[Place]
    packed: dict[int, Entry]
    """Of those that stand in segments: their entries, as they were unpacked anyway."""
    after: tuple[int, int] | None
    bounded: bool
    broken: Sequence[int]


@asynccontextmanager
async def looking(url: str, doing: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection to look at the store with. Raises StoreLost, BadStoreUrl, SchemaOutdated."""
    connection = await session.connect(url, "delayer look", SETTINGS)
    try:
        with translated(doing):
            await schema.check(connection)
            yield connection
    finally:
        await session.close(connection)


async def find(
    connection: asyncpg.Connection,
    wanted: Filter,
    test: Test | None,
    limit: int,
    after: tuple[int, int] = BEGINNING,
    *,
    scan: int = SCAN,
) -> Found:
    """The next ``limit`` messages of ``wanted`` that wait behind ``after`` (due microseconds, id), rows and those in
    segments, on one snapshot. ``test`` stands for the headers of ``wanted``. Raises the driver's errors."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        if wanted.key is not None:
            return await _find_keyed(connection, wanted, test, after)
        rows = Rows(connection, wanted, test, limit, scan)
        end = await rows.read(after)
        packed, broken, end_of_segments = await _in_segments(connection, wanted, test, after, end)
        end = end if end_of_segments is None else min(end or end_of_segments, end_of_segments)
    both = sorted([*rows.places, *(entry.place for entry in packed)])
    meant = [place for place in both if end is None or place[:2] <= end]
    full = len(meant) >= limit and (len(meant) > limit or end is not None)
    if full:
        meant, end = meant[:limit], meant[limit - 1][:2]
    of_segments = {entry.place.id: entry for entry in packed}
    return Found(meant, of_segments, end, bounded=end is not None and not full, broken=broken)


async def entries(connection: asyncpg.Connection, found: Found) -> list[Entry]:
    """What was found, without the bodies. One that went meanwhile is left out. Raises the driver's errors."""
    rows = [place for place in found.places if place.segment is None]
    read = [found.packed[place.id] for place in found.places if place.segment is not None]
    if rows:
        dues = [place.due_us for place in rows]
        told = await connection.fetch(
            _ENTRIES, [place.lane for place in rows], dues, [place.id for place in rows],
            min(dues) // 1000, max(dues) // 1000 + 1,
        )  # fmt: skip
        read += map(_entry, told)
    return sorted(read)


def _entry(row: asyncpg.Record) -> Entry:
    return Entry(Place(row["due_us"], row["id"], row["lane"]), *row[3:])


async def named(connection: asyncpg.Connection, tokens: Sequence[Token]) -> tuple[list[Entry], list[int]]:
    """Those of these names that wait, as rows or in segments; and segments that do not read back and may hold more.
    Raises the driver's errors."""
    ids = {token.id for token in tokens}
    dues = {token.id: token.due_ms for token in tokens if token.due_ms is not None}
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        places = await cancelling.find_rows(connection, list(ids), dues)
        rows = [] if places is None else await connection.fetch(_NAMED, *places[:3], *places.bounds)
        found = [_entry(row) for row in rows]
        left = ids - {entry.place.id for entry in found}
        there = await cancelling.find(connection, left, dues)
        for segment, numbers in there.holding.items():
            found += [one for one in await entries_of(connection, segment) or () if one.place.id in numbers]
    return sorted(found), sorted(there.unreadable)


async def _find_keyed(
    connection: asyncpg.Connection, wanted: Filter, test: Test | None, after: tuple[int, int]
) -> Found:
    rows = await connection.fetch(_KEYED, wanted.key)
    places = [Place(due_us, number, lane) for lane, due_us, number in rows]
    found = Found([place for place in places if place[:2] > after], {}, None, bounded=False, broken=())
    read = [one for one in await entries(connection, found) if meant(one, wanted, test)]
    return found._replace(places=[one.place for one in read])


def meant(entry: Entry, wanted: Filter, test: Test | None) -> bool:
    """Whether ``wanted`` means this message. Pure."""
    asked = ((wanted.route, entry.route), (wanted.exchange, entry.to_exchange), (wanted.routing_key, entry.to_key))
    same = all(want is None or want == found for want, found in (*asked, (wanted.key, entry.key)))
    return same and wanted.in_range(entry.place.due_us // 1000) and (test is None or test(entry.properties))


async def _in_segments(
    connection: asyncpg.Connection,
    wanted: Filter,
    test: Test | None,
    after: tuple[int, int],
    end: tuple[int, int] | None,
) -> tuple[list[Entry], list[int], tuple[int, int] | None]:
    """The messages in segments that are meant, between two places; segments that do not read back; and the place up to
    which segments were looked into, None for all of them."""
    first_ms = max(after[0] // 1000, -(1 << 53) if wanted.due_from_ms is None else wanted.due_from_ms)
    last_ms = segments.FOREVER_MS if end is None else end[0] // 1000
    if wanted.due_before_ms is not None:
        last_ms = min(last_ms, wanted.due_before_ms - 1)
    rows = await connection.fetch(
        "SELECT id, first_due FROM segment WHERE first_due < $1 AND last_due >= $2 ORDER BY first_due, id",
        last_ms + 1,
        first_ms,
    )
    found: list[Entry] = []
    broken: list[int] = []
    for position, (segment, first_due_ms) in enumerate(rows):
        # Not to the end of an instant: the next segment may begin inside of it.
        before = (first_due_ms * 1000 - 1, LAST_ID)
        if position >= SEGMENTS and before > after:
            return found, broken, before
        unpacked = await entries_of(connection, segment)
        if unpacked is None:
            broken.append(segment)
        else:
            found += [entry for entry in unpacked if entry.place[:2] > after and meant(entry, wanted, test)]
    return found, broken, None


async def entries_of(connection: asyncpg.Connection, segment: int) -> list[Entry] | None:
    """The live messages of a segment; None where it does not read back. Read in a thread, as by unpacking.read. Raises
    the driver's errors."""
    from delayer.store.packing import SegmentBroken  # noqa: PLC0415 - pyarrow, once there is one to read

    try:
        table = await unpacking.read(connection, segment)
    except SegmentBroken:
        return None
    if table is None:
        return []
    lane = await connection.fetchval("SELECT lane FROM segment WHERE id = $1", segment)
    return await asyncio.to_thread(_of_table, table, lane, segment)


def _of_table(table: Any, lane: int, segment: int) -> list[Entry]:
    import pyarrow.compute as pc  # noqa: PLC0415

    from delayer.store.packing import integers  # noqa: PLC0415

    columns = [integers(table[name]).to_pylist() for name in ("due_at", "id", "parked_at")]
    columns += [table[name].to_pylist() for name in ("route", "exchange", "routing_key", "to_exchange", "to_key")]
    columns += [table["properties"].to_pylist(), pc.binary_length(table["body"]).to_pylist()]
    return [
        Entry._make((Place(due_us, number, lane, segment), parked_us // 1000, *names, None, size, properties))
        for due_us, number, parked_us, *names, properties, size in zip(*columns, strict=True)
    ]
