"""The read model: waiting messages in the order of (due instant, id), as rows of all lanes and in segments.

A page is of one snapshot, and begins where the last one ended. The primary keys of the few partitions it touches find
that place, so a page costs the same with ten million rows as with ten. Route, destination and headers have no index, so
the page reads on to find them, up to a bound of rows and of bytes. A page that ends early says so, and the next page
continues there. ``find_by_id`` and ``find_by_name`` find single messages, by id and by the other names of a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple

import asyncpg
from asyncpg import Connection

from delayer.amqp.values import SHORT_STRING
from delayer.core.filters import MAX_ID, OWN, Filter, Token
from delayer.core.message import Parcel, Target
from delayer.core.segment import SegmentBroken
from delayer.core.units import DAY_MS
from delayer.format.reading import has_properties, message_id
from delayer.format.rows import FORMAT, checksum
from delayer.store import pool
from delayer.store.rows.places import AT_PLACES, Place, Places, find_rows
from delayer.store.segments import catalog
from delayer.store.session import LONG_SECONDS

Position = tuple[int, int]
"""A due instant in microseconds and an id, where a page begins or ends."""
BEGINNING: Final[Position] = (-(1 << 53), -1)
AT_ONCE: Final = 16
"""Minimum number of rows per lane that a page's first statement reads. Each further statement reads four times as
many."""
SCAN: Final = 10_000
"""Maximum number of rows that one page reads, of all lanes together, to find those that match."""
BYTES: Final = 8 << 20
"""Maximum bytes of properties that one statement reads, besides one row per lane, because a row may have 128 KB of
them. A page that has read as many ends."""
SEGMENTS: Final = 4
"""A page unpacks every segment that spans its first place, and at most this many that begin after it. Each takes about
50 ms."""
NAMED: Final = 10
"""Maximum number of messages that :func:`find_by_name` finds for one name."""
COLUMNS: Final = """
lane, (extract(epoch FROM due_at) * 1000000)::bigint AS due_us, id, parked_at, route, exchange, routing_key,
to_exchange, to_key, key, octet_length(body) AS size, properties, checksum, format, {body} AS body
"""
"""The columns of ``message`` and ``held``. :func:`entry_of` and held_messages.py count them."""
NO_BODY, BEGINNING_OF_BODY = "''::bytea", "substring(body FROM 1 FOR ${})"
BEFORE: Final = "OVER (ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)"
"""The rows before each row."""
_AT_PLACES: Final = f"SELECT {COLUMNS.format(body=BEGINNING_OF_BODY.format(6))} {AT_PLACES}"
_BODIES: Final = f"SELECT id, body {AT_PLACES}"
_LANES: Final = (
    "SELECT lane FROM counter GROUP BY lane"
    " HAVING sum(CASE WHEN kind IN ('parked', 'restored') THEN n ELSE -n END) > 0 ORDER BY lane"
)
# The lanes of rows due from $1 until $2, also of rows that no counter counts. Each step looks once into the index of
# each partition.
_LANES_OF_ROWS: Final = """
WITH RECURSIVE found AS (
    (SELECT lane FROM message WHERE due_at >= $1 AND due_at < $2 ORDER BY lane LIMIT 1)
    UNION ALL
    SELECT (
        SELECT m.lane FROM message AS m
        WHERE m.lane > f.lane AND m.due_at >= $1 AND m.due_at < $2 ORDER BY m.lane LIMIT 1
    )
    FROM found AS f WHERE f.lane IS NOT NULL
)
SELECT lane FROM found WHERE lane IS NOT NULL
"""
# $1: lanes. $2, $3: bounds of due_at, to prune partitions while planning. $4 (microseconds), $5 (id): the place after
# which to begin. $6: maximum rows per lane. $7: bytes of properties per lane, but at least one row. The last row of
# each lane is always returned, with the number of rows read, and of those that were there.
_NEXT: Final = f"""
SELECT next.*
FROM unnest($1::smallint[]) AS l (number)
CROSS JOIN LATERAL (
    SELECT *, row_number() OVER () AS nth, count(*) OVER () AS read
    FROM (
        SELECT *, count(*) OVER () AS there, sum(octet_length(properties)) FILTER (WHERE meant) {BEFORE} AS before
        FROM (
            SELECT {COLUMNS.format(body=NO_BODY)}, {{meant}} AS meant
            FROM message
            WHERE lane = l.number AND due_at >= $2 AND due_at < $3
              AND (due_at, id) > ('epoch'::timestamptz + $4::bigint * interval '1 microsecond', $5::bigint)
            ORDER BY due_at, id
            LIMIT $6
        ) AS ordered
    ) AS summed
    WHERE before IS NULL OR before < $7
) AS next
WHERE meant OR nth = read
"""
_OVERLAPPING: Final = """
SELECT id, first_due, messages, first_due >= $1 AND last_due < $2 AS whole
FROM segment WHERE last_due >= $1 AND first_due < $2 ORDER BY first_due, id
"""
_CALLED: Final = " UNION ALL ".join(
    f"SELECT (extract(epoch FROM due_at) * 1000000)::bigint, id, properties FROM {table}"
    " WHERE EXISTS (SELECT FROM unnest($1::bytea[]) AS text WHERE position(text IN properties) > 0)"
    for table in ("message", "held")
)
_HELD_OF: Final = f"SELECT '{OWN}'::bytea || token, due_at, id FROM held WHERE '{OWN}'::bytea || token = ANY($1)"


class Entry(NamedTuple):
    """A message of the store. ``body``: the part that was read; ``size``: bytes of the whole body."""

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
    checksum: int
    format: int
    body: bytes = b""

    @property
    def sound(self) -> bool | None:
        """Whether format and checksum match; if not, the daemon will hold it. None: unknown, for lack of the whole
        body."""
        if len(self.body) < self.size:
            return None
        found = checksum(self.exchange, self.routing_key, self.properties, self.body)
        return self.checksum == found and self.format == FORMAT

    def parcel(self, token: bytes = b"") -> Parcel:
        target = Target(self.to_exchange, self.to_key)
        published = self.route, self.exchange, self.routing_key
        return Parcel(self.place.due_ms, *published, target, self.properties, self.body, self.key, token)


class FoundPage(NamedTuple):
    """The next messages that match. ``after``: where to continue; None at the end. ``bounded``: reading hit its limit
    before enough were found. ``broken``: unreadable segments that may contain more."""

    messages: Sequence[Entry]
    after: Position | None
    bounded: bool
    broken: Collection[int]


async def find(
    connection: Connection,
    wanted: Filter,
    limit: int,
    after: Position = BEGINNING,
    *,
    scan: int = SCAN,
    bodies: bool = False,
    lanes: Collection[int] = (),
) -> FoundPage:
    """The next ``limit`` messages of ``wanted`` after ``after``, on one snapshot. ``scan``: maximum rows to read.
    ``bodies``: whether to read the bodies of messages in segments, which are unpacked anyway. ``lanes``: where to look
    for rows, in addition to the lanes that have messages by their counters. Raises the driver's errors."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        if wanted.key is not None:
            return await _find_keyed(connection, wanted, after)
        rows, end_of_rows = await _in_rows(connection, wanted, lanes, limit=limit, after=after, scan=scan)
        packed, end_of_segments, broken = await _in_segments(
            connection, wanted, limit=limit, after=after, end=end_of_rows, bodies=bodies
        )
    end = min((one for one in (end_of_rows, end_of_segments) if one is not None), default=None)
    # Beyond ``end`` either the rows or the segments were not read.
    sure = [one for one in sorted([*rows, *packed]) if end is None or one.place[:2] <= end]
    full = len(sure) >= limit and (len(sure) > limit or end is not None)
    if full:
        sure, end = sure[:limit], sure[limit - 1].place[:2]
    return FoundPage(sure, end, bounded=end is not None and not full, broken=broken)


async def pages(
    connection: Connection, wanted: Filter, limit: int, *, bodies: bool = False
) -> AsyncIterator[FoundPage]:
    """All that :func:`find` finds, page by page, each in its own transaction. Also finds rows that no counter counts,
    which are a fault of the store: they must not be lost on the way. Raises the driver's errors."""
    lanes = [lane for (lane,) in await connection.fetch(_LANES_OF_ROWS, *_bounds(wanted))]
    after: Position | None = BEGINNING
    while after is not None:
        found = await find(connection, wanted, limit, after, scan=10 * SCAN, bodies=bodies, lanes=lanes)
        yield found
        after = found.after


async def with_bodies(connection: Connection, messages: Sequence[Entry]) -> list[Entry]:
    """Add the bodies of rows to these messages of :func:`find`, called with ``bodies``. All must still be there, on the
    snapshot of the open transaction. Raises the driver's errors."""
    rows = dict(await connection.fetch(_BODIES, *Places.of(one.place for one in messages)))
    return [one if one.place.segment is not None else one._replace(body=rows[one.place.id]) for one in messages]


async def _in_rows(
    connection: Connection, wanted: Filter, lanes: Collection[int], *, limit: int, after: Position, scan: int
) -> tuple[list[Entry], Position | None]:
    """The first matching rows after ``after``, more than ``limit`` if there are that many. Also the position up to
    which these are complete; None if it read to the end. Reads windows of one day ahead, then two, then four, because a
    statement over all partitions would open hundreds of them even if the first day already fills the page."""
    lanes = sorted({lane for (lane,) in await connection.fetch(_LANES)} | set(lanes))
    now_ms = await connection.fetchval("SELECT now()")
    first_ms, last_ms = _bounds(wanted)
    after = max(after, (first_ms * 1000 - 1, MAX_ID))
    low_ms = pool.BEGINNING_MS if after <= BEGINNING else after[0] // 1000
    terms, given = _conditions(wanted, first=8)
    statement = _NEXT.format(meant=terms)
    found: list[Entry] = []
    width, each, room = DAY_MS, max(2 * limit // max(len(lanes), 1), AT_ONCE), BYTES
    while lanes and low_ms < last_ms and len(found) <= limit and scan > 0 and room > 0:
        high_ms = min(max(low_ms, now_ms) + width, last_ms)
        if high_ms > now_ms + 1000 * DAY_MS:
            high_ms = last_ms  # After every day's partition.
        most = min(each, max(scan // len(lanes), 1) if wanted.narrow else limit + 1)
        rows = await connection.fetch(statement, lanes, low_ms, high_ms, *after, most, BYTES // len(lanes), *given)
        room -= sum(len(row["properties"]) for row in rows)
        lasts = [row for row in rows if row["nth"] == row["read"]]
        # Every lane was read up to here; None: to the end of the window.
        more = [row for row in lasts if row["read"] == most or row["read"] < row["there"]]
        end = min(((row["due_us"], row["id"]) for row in more), default=None)
        messages = [entry_of(row) for row in rows if row["meant"]]
        found += [
            one for one in messages if (end is None or one.place[:2] <= end) and has_properties(one.properties, wanted)
        ]
        each *= 4
        if wanted.narrow:
            scan -= sum(row["read"] for row in lasts)
        if end is None:
            low_ms, width, after = high_ms, 2 * width, (high_ms * 1000 - 1, MAX_ID)
        else:
            low_ms, after = end[0] // 1000, end
    return found, after if lanes and low_ms < last_ms else None


def _conditions(wanted: Filter, first: int) -> tuple[str, list[bytes]]:
    """The filters on columns without an index, as SQL with parameters numbered from ``first``, and their values."""
    asked = {"route": wanted.route, "to_exchange": wanted.to_exchange, "to_key": wanted.to_key}
    given = {column: value for column, value in asked.items() if value is not None}
    terms = [f"{column} = ${number}" for number, column in enumerate(given, first)]
    return " AND ".join(terms) or "true", list(given.values())


async def _in_segments(
    connection: Connection, wanted: Filter, *, limit: int, after: Position, end: Position | None, bodies: bool
) -> tuple[list[Entry], Position | None, list[int]]:
    """The first ``limit`` matching messages in segments between two positions; the position up to which segments were
    read, None for all; and unreadable segments. Keeps ``limit`` messages and one segment in memory."""
    first_ms, before_ms = _bounds(wanted)
    before_ms = before_ms if end is None else min(before_ms, end[0] // 1000 + 1)
    rows = await connection.fetch(_OVERLAPPING, max(first_ms, after[0] // 1000), before_ms)
    found: list[Entry] = []
    broken: list[int] = []
    last: Position | None = None
    for number, (segment, first_due_ms, *_) in enumerate(rows):
        # The last position before this segment's first millisecond. Later segments begin no earlier.
        before = (first_due_ms * 1000 - 1, MAX_ID)
        if last is not None and before >= last:
            break
        if number >= SEGMENTS and before > after:
            return found, before, broken
        unpacked = await unpack(connection, segment, bodies=bodies)
        if unpacked is None:
            broken.append(segment)
            continue
        found += [one for one in unpacked if one.place[:2] > after and matches(one, wanted)]
        if len(found) > limit:
            found = sorted(found)[:limit]
            last = found[-1].place[:2]
    return found, last, broken


def _bounds(wanted: Filter) -> tuple[int, int]:
    """The limits of a filter's due times in milliseconds: the first included, the second excluded."""
    first_ms = pool.BEGINNING_MS if wanted.due_from_ms is None else wanted.due_from_ms
    return first_ms, catalog.FOREVER_MS if wanted.due_before_ms is None else wanted.due_before_ms


async def unpack_all(connection: Connection) -> AsyncIterator[tuple[int, list[Entry] | None]]:
    """Each segment, and its messages as found by :func:`unpack`. Raises the driver's errors."""
    for segment in await catalog.list_segments(connection):
        yield segment.id, await unpack(connection, segment.id)


async def unpack(connection: Connection, segment: int, *, bodies: bool = False) -> list[Entry] | None:
    """The live messages of a segment, unpacked in a thread; None if it is unreadable. Raises the driver's errors."""
    try:
        found = await catalog.read_segment(connection, segment)
    except SegmentBroken:
        return None
    return [] if found is None else await asyncio.to_thread(_entries_in, *found, segment, bodies=bodies)


def _entries_in(table: Any, lane: int, segment: int, *, bodies: bool) -> list[Entry]:
    import pyarrow.compute as pc  # noqa: PLC0415 - pyarrow, once there is a segment to read

    from delayer.store.segments.codec import microseconds  # noqa: PLC0415

    columns: dict[str, Iterable[Any]] = {"size": pc.binary_length(table["body"]).to_pylist(), "body": repeat(b"")}
    read = table if bodies else table.drop_columns(["body"])
    columns |= {name: read[name].to_pylist() for name in read.column_names if not name.endswith("_at")}
    places = map(Place, microseconds(table["due_at"]), columns["id"], repeat(lane), repeat(segment))
    parked_ms = [parked_us // 1000 for parked_us in microseconds(table["parked_at"])]
    return list(map(Entry, places, parked_ms, *(columns[name] for name in Entry._fields[2:])))


async def _find_keyed(connection: Connection, wanted: Filter, after: Position) -> FoundPage:
    row = await connection.fetchrow("SELECT id, due_at FROM message_key WHERE key = $1", wanted.key)
    found, broken = await find_by_id(connection, [] if row is None else [Token(*row)])
    matching = [one for one in found if one.place[:2] > after and matches(one, wanted)]
    return FoundPage(matching, None, bounded=False, broken=broken)


def matches(entry: Entry, wanted: Filter) -> bool:
    """Whether the message matches ``wanted``. Pure."""
    asked = ((wanted.route, entry.route), (wanted.to_exchange, entry.to_exchange), (wanted.to_key, entry.to_key))
    same = all(want is None or want == found for want, found in (*asked, (wanted.key, entry.key)))
    return same and wanted.in_range(entry.place.due_ms) and has_properties(entry.properties, wanted)


def entry_of(row: asyncpg.Record) -> Entry:
    """Parse a row that begins with COLUMNS."""
    return Entry(Place(row["due_us"], row["id"], row["lane"]), *row[3:15])


async def find_by_id(
    connection: Connection, tokens: Iterable[Token], most_body: int = 0
) -> tuple[list[Entry], dict[int, list[int]]]:
    """Find waiting messages by id, with up to ``most_body`` bytes of each body. Also returns ids in unreadable
    segments, by segment. Raises the driver's errors."""
    ids = {token.id for token in tokens}
    dues = {token.id: token.due_ms for token in tokens if token.due_ms is not None}
    broken: dict[int, list[int]] = {}
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        places = await find_rows(connection, list(ids), dues)
        found = [entry_of(row) for row in await connection.fetch(_AT_PLACES, *places, most_body)]
        left = ids - {entry.place.id for entry in found}
        for segment, numbers in (await catalog.find_segments(connection, left, dues)).items():
            inside = await unpack(connection, segment, bodies=most_body > 0)
            if inside is None:
                broken[segment] = numbers
            found += [one for one in inside or () if one.place.id in numbers]
    return sorted(found), broken


async def find_by_name(connection: Connection, names: Sequence[bytes], *, packed: bool) -> dict[bytes, list[Token]]:
    """The ids of waiting and held messages with one of these message_ids. A name ``id:X`` finds held messages whose
    ``x-delayer-id`` is X. Reads every row, and if ``packed`` every segment, however long it takes. Raises the driver's
    errors."""
    found: dict[bytes, list[Token]] = {name: [] for name in names}
    published = {name for name in names if not name.startswith(OWN.encode())}
    # As in properties: a length byte, then the text.
    short = [bytes([min(len(name), SHORT_STRING)]) + name for name in published]

    def add(due_us: int, number: int, properties: bytes) -> None:
        name = message_id(properties)
        if name in published and len(found[name]) < NAMED:
            found[name].append(Token(number, due_us // 1000))

    async with connection.transaction(isolation="repeatable_read", readonly=True):
        for name, due_ms, number in await connection.fetch(_HELD_OF, names):
            found[name].append(Token(number, due_ms))
        if not published:
            return found
        patient = "; SET LOCAL statement_timeout = 0" if packed else ""
        await connection.execute(f"SET LOCAL enable_seqscan = on{patient}")
        async for row in connection.cursor(_CALLED, short, prefetch=100, timeout=LONG_SECONDS):
            add(*row)  # A header in any row may contain the text.
        if packed:
            async for _, inside in unpack_all(connection):
                for one in inside or ():
                    add(one.place.due_us, one.place.id, one.properties)
    return found


async def count(connection: Connection, wanted: Filter) -> tuple[int, int]:
    """Count matching messages, and unreadable segments that may contain more, on one snapshot unless the filter names a
    key or header. Raises the driver's errors."""
    messages = 0
    broken: set[int] = set()
    if wanted.key is not None or wanted.message_id is not None or wanted.headers:
        async for page in pages(connection, wanted, 1000):
            messages += len(page.messages)
            broken |= set(page.broken)
        return messages, len(broken)
    bounds = _bounds(wanted)
    terms, given = _conditions(wanted, first=3)
    statement = f"SELECT count(*) FROM message WHERE due_at >= $1 AND due_at < $2 AND {terms}"
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        # The statement may read ten million rows, so allow any plan and any time.
        await connection.execute("SET LOCAL statement_timeout = 0; SET LOCAL enable_seqscan = on")
        messages = await connection.fetchval(statement, *bounds, *given, timeout=LONG_SECONDS)
        for segment, _, inside, whole in await connection.fetch(_OVERLAPPING, *bounds):
            if whole and not wanted.narrow:
                messages += inside
            elif (found := await unpack(connection, segment)) is None:
                broken.add(segment)
            else:
                messages += sum(matches(one, wanted) for one in found)
    return messages, len(broken)
