"""Waiting messages, page by page, in the order of (due instant, id), merged over the lanes and the segments.

A page begins behind the last place of the one before. The primary key of the few partitions that it touches finds that
place, so a page costs the same with ten million rows as with ten. No index knows route, destination and headers. The
page reads on to find them, up to a bound. A page that ends before it is full says so, and the next one goes on there.

The functions ``named`` and ``called`` find single messages, by id and by the other names of a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import asyncpg
from asyncpg import Connection

from delayer.core.filters import MAX_ID, OWN, Filter, Token
from delayer.core.message import SHORT_STRING
from delayer.core.segment import SegmentBroken
from delayer.core.units import DAY_MS
from delayer.store import pool, schema, statements
from delayer.store.errors import translated
from delayer.store.segments import catalog

_LANES: Final = (
    "SELECT lane FROM counter GROUP BY lane"
    " HAVING sum(CASE WHEN kind IN ('parked', 'restored') THEN n ELSE -n END) > 0 ORDER BY lane"
)
# $1: lanes. $2, $3: bounds of due_at, which prune partitions while planning. $4 (microseconds), $5 (id): the place
# behind which to begin. $6: rows of each lane at most. A filter on due_at alone reads only the index.
_NEXT: Final = """
SELECT lane, (extract(epoch FROM due_at) * 1000000)::bigint AS due_us, id, {meant} AS meant, {properties} AS properties
FROM unnest($1::smallint[]) AS l (number)
CROSS JOIN LATERAL (
    SELECT {columns} FROM message
    WHERE lane = l.number AND due_at >= $2 AND due_at < $3
      AND (due_at, id) > ('epoch'::timestamptz + $4::bigint * interval '1 microsecond', $5::bigint)
    ORDER BY due_at, id
    LIMIT $6
) AS next
"""


class Place(NamedTuple):
    """The place where a message waits. Lists are in the order of places."""

    due_us: int
    id: int
    lane: int
    segment: int | None = None

    @property
    def token(self) -> Token:
        return Token(self.id, self.due_us // 1000)


Test = Callable[[bytes], bool]
"""Whether a message is meant, by its properties: what SQL cannot read."""
BEGINNING: Final = (-(1 << 53), -1)


class Rows:
    """Rows of ``message``, read window by window: of the days ahead one, then two, then four, until there are enough.

    One statement over all partitions would open hundreds of them to read the first page of one. ``scan``: the rows to
    read at most for a narrow filter.
    """

    def __init__(self, connection: Connection, wanted: Filter, test: Test | None, limit: int, scan: int) -> None:
        self.places: list[Place] = []
        self._connection = connection
        self._wanted = wanted
        self._test = test
        self._limit = limit
        self._left = scan
        self._each = limit + 1
        """Rows of each lane that the next window reads at most: few first, as they may all match."""

    async def read(self, after: tuple[int, int]) -> tuple[int, int] | None:
        """Read on behind ``after``. The place up to which it found all matches; None if it read to the end."""
        lanes = [lane for (lane,) in await self._connection.fetch(_LANES)]
        last_ms = catalog.FOREVER_MS if self._wanted.due_before_ms is None else self._wanted.due_before_ms
        if self._wanted.due_from_ms is not None:
            after = max(after, (self._wanted.due_from_ms * 1000 - 1, MAX_ID))
        width = DAY_MS
        low_ms = pool.BEGINNING_MS if after <= BEGINNING else after[0] // 1000
        now_ms = await self._connection.fetchval("SELECT now()")
        while lanes and low_ms < last_ms:
            high_ms = min(max(low_ms, now_ms) + width, last_ms)
            if high_ms > now_ms + 1000 * DAY_MS:
                high_ms = last_ms  # Behind every partition of a day.
            stopped = await self._window(lanes, low_ms, high_ms, after)
            if stopped is not None:
                after = stopped
                low_ms = after[0] // 1000
                if len(self.places) > self._limit or self._left <= 0:
                    return after
                continue
            low_ms, width = high_ms, width * 2
            if len(self.places) > self._limit:
                return (high_ms * 1000 - 1, MAX_ID)
        return None

    async def _window(
        self, lanes: Sequence[int], low_ms: int, high_ms: int, after: tuple[int, int]
    ) -> tuple[int, int] | None:
        """Read rows due from ``low_ms`` to before ``high_ms``. The place up to which it read every lane; None after
        the whole window."""
        narrow = self._wanted.narrow
        enough = min(self._limit + 1, max(2 * self._limit // len(lanes), AT_ONCE))
        each = max(min(self._left // len(lanes), self._each), 1) if narrow else enough
        self._each *= 4
        terms, given = conditions(self._wanted, first=7)
        columns = ", route, to_exchange, to_key" if given else ""
        properties = "NULL::bytea" if self._test is None else f"CASE WHEN {terms} THEN properties END"
        statement = _NEXT.format(
            meant=terms,
            properties=properties,
            columns=f"lane, due_at, id{columns}{', properties' if self._test else ''}",
        )
        rows = await self._connection.fetch(statement, lanes, low_ms, high_ms, *after, each, *given)
        counted: dict[int, int] = {}
        last: dict[int, tuple[int, int]] = {}
        for lane, due_us, number, _, _ in rows:
            counted[lane] = counted.get(lane, 0) + 1
            last[lane] = max(last.get(lane, BEGINNING), (due_us, number))
        if narrow:
            self._left -= len(rows)
        end = min((last[lane] for lane, n in counted.items() if n == each), default=None)
        self.places += [
            Place(due_us, number, lane)
            for lane, due_us, number, hit, raw in rows
            if hit and (end is None or (due_us, number) <= end) and (self._test is None or self._test(raw))
        ]
        return end


def conditions(wanted: Filter, first: int) -> tuple[str, list[bytes]]:
    """The filters without an index, as SQL with parameters from ``first`` on, and these parameters."""
    asked = {"route": wanted.route, "to_exchange": wanted.to_exchange, "to_key": wanted.to_key}
    given = {column: value for column, value in asked.items() if value is not None}
    terms = [f"{column} = ${number}" for number, column in enumerate(given, first)]
    return " AND ".join(terms) or "true", list(given.values())


LONG_SECONDS: Final = 3_600.0
"""For statements over the whole store that have no statement_timeout. For the driver, None means COMMAND_SECONDS."""
AT_ONCE: Final = 64
"""Rows of each lane that a page reads at least: most pages need no second statement."""
SCAN: Final = 10_000
"""Rows that one page reads at most, of all lanes together, to find those that match."""
SEGMENTS: Final = 4
"""Segments that begin behind a page's first place and that the page unpacks at most: some 50 ms each. A page also
unpacks every segment that reaches over its first place: one more for each compaction of the same days."""
SETTINGS: Final = {
    # Plans must be ranges of the primary key, also with wrong statistics of a partition that was just filled.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}
ENTRY: Final = """
lane, (extract(epoch FROM due_at) * 1000000)::bigint AS due_us, id, parked_at, route, exchange, routing_key,
to_exchange, to_key, key, octet_length(body) AS size, properties
"""
"""The columns of ``message`` and ``held`` for :func:`entry_of`."""
AT_PLACES: Final = """
FROM unnest($1::smallint[], $2::timestamptz[], $3::bigint[]) AS wanted (of_lane, due, number)
CROSS JOIN LATERAL (
    SELECT * FROM message
    WHERE lane = of_lane AND due_at >= due AND due_at < due + interval '1 millisecond' AND id = number
      AND due_at >= $4 AND due_at < $5
) AS there
"""
"""Rows by the primary key. The arguments are :class:`Places`."""
_ENTRIES: Final = f"SELECT {ENTRY} {AT_PLACES} ORDER BY due_us, id"
NAMED: Final = 10
"""The messages that :func:`called` finds for one name at most."""
_CALLED: Final = " UNION ALL ".join(
    f"SELECT (extract(epoch FROM due_at) * 1000000)::bigint, id, properties FROM {table}"
    " WHERE EXISTS (SELECT FROM unnest($1::bytea[]) AS text WHERE position(text IN properties) > 0)"
    for table in ("message", "held")
)
_HELD_OF: Final = f"SELECT '{OWN}'::bytea || token, due_at, id FROM held WHERE '{OWN}'::bytea || token = ANY($1)"


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


class FoundPage(NamedTuple):
    """The next messages that match. ``after`` is where to go on, None where nothing is left.

    ``bounded``: reading ended at its limit, before enough were found. ``broken``: segments that do not read back and
    may hold messages that match.
    """

    places: Sequence[Place]
    packed: dict[int, Entry]
    """The entries of messages in segments, which were unpacked anyway."""
    after: tuple[int, int] | None
    bounded: bool
    broken: Sequence[int]


@asynccontextmanager
async def opened(
    url: str, application: str, doing: str, more: Mapping[str, str] | None = None
) -> AsyncIterator[Connection]:
    """A connection of :func:`pool.connect` for one block. Errors say ``doing``. Raises StoreLost, BadStoreUrl."""
    connection = await pool.connect(url, application, more)
    try:
        with translated(doing):
            yield connection
    finally:
        await pool.close(connection)


@asynccontextmanager
async def looking(
    url: str, doing: str, application: str = "delayer look", settings: Mapping[str, str] = SETTINGS
) -> AsyncIterator[Connection]:
    """A connection to look at the store with. Errors say ``doing``. Raises StoreLost, BadStoreUrl, SchemaOutdated."""
    async with opened(url, application, doing, settings) as connection:
        await schema.check(connection)
        yield connection


async def find(
    connection: Connection,
    wanted: Filter,
    test: Test | None,
    limit: int,
    after: tuple[int, int] = BEGINNING,
    *,
    scan: int = SCAN,
) -> FoundPage:
    """The next ``limit`` messages of ``wanted`` that wait behind ``after`` (due microseconds, id), rows and those in
    segments, on one snapshot. ``test`` stands for the headers and the message_id of ``wanted``. ``scan``: the rows to
    read at most. Raises the driver's errors."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        if wanted.key is not None:
            return await _find_keyed(connection, wanted, test, after)
        rows = Rows(connection, wanted, test, limit, scan)
        end = await rows.read(after)
        packed, broken, end_of_segments = await _in_segments(connection, wanted, test, after, end, limit=limit)
        end = end if end_of_segments is None else min(end or end_of_segments, end_of_segments)
    both = sorted([*rows.places, *(entry.place for entry in packed)])
    sure = [place for place in both if end is None or place[:2] <= end]
    full = len(sure) >= limit and (len(sure) > limit or end is not None)
    if full:
        sure, end = sure[:limit], sure[limit - 1][:2]
    of_segments = {entry.place.id: entry for entry in packed}
    return FoundPage(sure, of_segments, end, bounded=end is not None and not full, broken=broken)


async def pages(connection: Connection, wanted: Filter, test: Test | None, limit: int) -> AsyncIterator[FoundPage]:
    """All that :func:`find` finds, page by page; its transaction is over between two of them. Raises the driver's
    errors."""
    after: tuple[int, int] | None = BEGINNING
    while after is not None:
        found = await find(connection, wanted, test, limit, after, scan=10 * SCAN)
        yield found
        after = found.after


async def entries(connection: Connection, found: FoundPage) -> list[Entry]:
    """The entries of found messages, without the bodies and without messages that went meanwhile. Raises the driver's
    errors."""
    read = [found.packed[place.id] for place in found.places if place.segment is not None]
    return sorted([*read, *map(entry_of, await connection.fetch(_ENTRIES, *Places.of(found.places)))])


def entry_of(row: asyncpg.Record) -> Entry:
    """The entry of a row that begins with the columns of ENTRY."""
    return Entry(Place(row["due_us"], row["id"], row["lane"]), *row[3:12])


async def named(connection: Connection, tokens: Sequence[Token]) -> tuple[list[Entry], list[int]]:
    """The waiting messages with these ids, as rows or in segments; and the ids of those in segments that do not read
    back. Raises the driver's errors."""
    ids = {token.id for token in tokens}
    dues = {token.id: token.due_ms for token in tokens if token.due_ms is not None}
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        places = await find_rows(connection, list(ids), dues)
        found = [entry_of(row) for row in await connection.fetch(_ENTRIES, *places)]
        left = ids - {entry.place.id for entry in found}
        broken = []
        for segment, numbers in (await find_in_segments(connection, left, dues)).items():
            inside = await entries_of(connection, segment)
            if inside is None:
                broken += numbers
            found += [one for one in inside or () if one.place.id in numbers]
    return sorted(found), sorted(broken)


async def called(
    connection: Connection, names: Sequence[bytes], message_id: Callable[[bytes], bytes | None], *, packed: bool
) -> dict[bytes, list[Token]]:
    """The ids of the waiting and held messages that have one of these message_ids, or of the held ones with that
    ``x-delayer-id`` after ``id:``. ``message_id`` reads the message_id from properties. To find one, it reads every
    row; with ``packed`` every segment too, as long as it takes. Raises the driver's errors."""
    found: dict[bytes, list[Token]] = {name: [] for name in names}
    published = {name for name in names if not name.startswith(OWN.encode())}
    # As properties hold them: a byte of length, then the text.
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
            add(*row)  # A header's text may be in every row.
        for (segment,) in await connection.fetch("SELECT id FROM segment WHERE $1", packed):
            for place, *_, properties in await entries_of(connection, segment) or ():
                add(place.due_us, place.id, properties)
    return found


async def _find_keyed(connection: Connection, wanted: Filter, test: Test | None, after: tuple[int, int]) -> FoundPage:
    places = [Place(*row) for row in await connection.fetch(statements.read("find_keyed"), wanted.key)]
    found = FoundPage([place for place in places if place[:2] > after], {}, None, bounded=False, broken=())
    for place in found.places:  # At most one.
        if place.segment is not None:
            if (inside := await entries_of(connection, place.segment)) is None:
                return found._replace(places=[], broken=[place.segment])
            packed = {one.place.id: one for one in inside if one.place.id == place.id}
            found = found._replace(places=[one.place for one in packed.values()], packed=packed)
    read = [one for one in await entries(connection, found) if meant(one, wanted, test)]
    return found._replace(places=[one.place for one in read])


def meant(entry: Entry, wanted: Filter, test: Test | None) -> bool:
    """Whether ``wanted`` means this message. Pure."""
    asked = ((wanted.route, entry.route), (wanted.to_exchange, entry.to_exchange), (wanted.to_key, entry.to_key))
    same = all(want is None or want == found for want, found in (*asked, (wanted.key, entry.key)))
    return same and wanted.in_range(entry.place.due_us // 1000) and (test is None or test(entry.properties))


async def _in_segments(
    connection: Connection,
    wanted: Filter,
    test: Test | None,
    after: tuple[int, int],
    end: tuple[int, int] | None,
    *,
    limit: int,
) -> tuple[list[Entry], list[int], tuple[int, int] | None]:
    """The first ``limit`` matching messages in segments between two places; segments that do not read back; and the
    place up to which segments were read, None for all of them. In memory are ``limit`` messages and one segment."""
    first_ms = max(after[0] // 1000, -(1 << 53) if wanted.due_from_ms is None else wanted.due_from_ms)
    last_ms = catalog.FOREVER_MS if end is None else end[0] // 1000
    if wanted.due_before_ms is not None:
        last_ms = min(last_ms, wanted.due_before_ms - 1)
    rows = await connection.fetch(
        "SELECT id, first_due FROM segment WHERE first_due < $1 AND last_due >= $2 ORDER BY first_due, id",
        last_ms + 1,
        first_ms,
    )
    found: list[Entry] = []
    broken: list[int] = []
    last: tuple[int, int] | None = None
    for position, (segment, first_due_ms) in enumerate(rows):
        # The last place before the first millisecond of this segment. The segments after it begin no earlier.
        before = (first_due_ms * 1000 - 1, MAX_ID)
        if last is not None and before >= last:
            break
        if position >= SEGMENTS and before > after:
            return found, broken, before
        unpacked = await entries_of(connection, segment)
        if unpacked is None:
            broken.append(segment)
        else:
            found += [entry for entry in unpacked if entry.place[:2] > after and meant(entry, wanted, test)]
            if len(found) > limit:
                found = sorted(found)[:limit]
                last = found[-1].place[:2]
    return found, broken, last


async def entries_of(connection: Connection, segment: int) -> list[Entry] | None:
    """The live messages of a segment; None where it does not read back. Threads unpack it. Raises the driver's
    errors."""
    try:
        found = await catalog.read(connection, segment)
    except SegmentBroken:
        return None
    return [] if found is None else await asyncio.to_thread(entries_in, *found, segment)


def entries_in(table: Any, lane: int, segment: int) -> list[Entry]:
    """The entries of a table of codec.SCHEMA, which holds messages of ``segment``."""
    import pyarrow.compute as pc  # noqa: PLC0415

    from delayer.store.segments.codec import microseconds  # noqa: PLC0415

    columns = [microseconds(table["due_at"]), table["id"].to_pylist(), microseconds(table["parked_at"])]
    columns += [table[name].to_pylist() for name in ("route", "exchange", "routing_key", "to_exchange", "to_key")]
    columns += [table["key"].to_pylist(), pc.binary_length(table["body"]).to_pylist(), table["properties"].to_pylist()]
    rows = zip(*columns, strict=True)
    return [Entry(Place(due, number, lane, segment), parked // 1000, *others) for due, number, parked, *others in rows]


_HOLDING: Final = """
SELECT s.id, array_agg(number)
FROM segment AS s CROSS JOIN LATERAL unnest(s.ids) WITH ORDINALITY AS one (number, nth)
WHERE s.first_due <= $3 AND s.last_due >= $2 AND number = ANY($1)
  AND CASE WHEN (nth - 1) / 8 < length(s.gone) THEN get_bit(s.gone, nth - 1) = 0 ELSE true END
GROUP BY s.id ORDER BY s.id
"""
_SEEN: Final = """
SELECT coalesce(max(id), 0), count(*), (SELECT coalesce(sum(n), 0)::bigint FROM counter WHERE kind = 'restored')
FROM segment
"""

_EVERY_LANE = "SELECT array(SELECT number FROM lane)"

Dues = Mapping[int, int]
"""Due times (epoch ms) by id, as far as they are known. A message with one is looked for at that time only."""
NO_DUES: Final[Dues] = {}


class SegmentListState(NamedTuple):
    """The state of the list of segments. Two states differ if a segment came or went in between, or came and went: ids
    are never used again, and restores are counted."""

    newest: int
    segments: int
    restored: int


async def segments_seen(connection: Connection) -> SegmentListState:
    """Raises the driver's errors."""
    return SegmentListState(*await connection.fetchrow(_SEEN))


class Places(NamedTuple):
    """The places of rows, as the statements take them, in the order in which a release locks them. Due instants travel
    as milliseconds. A row written by hand may lie between two milliseconds. ``from_ms`` and ``before_ms`` are bounds of
    all rows, which prune partitions while planning. The method ``of`` leaves out messages in segments."""

    lanes: list[int]
    dues: list[int]
    ids: list[int]
    from_ms: int
    before_ms: int

    @classmethod
    def of(cls, places: Iterable[Place]) -> Places:
        ordered = sorted((one for one in places if one.segment is None), key=lambda one: (one.lane, one.due_us, one.id))
        dues = [one.due_us // 1000 for one in ordered]
        lanes, ids = [one.lane for one in ordered], [one.id for one in ordered]
        return cls(lanes, dues, ids, min(dues, default=0), max(dues, default=-1) + 1)


async def find_rows(connection: Connection, ids: Sequence[int], dues: Dues) -> Places:
    """The places of the rows among ``ids``. Raises the driver's errors."""
    known = [number for number in ids if number in dues]
    unknown = [number for number in ids if number not in dues]
    found = await connection.fetch(statements.read("find_rows"), unknown) if unknown else []
    if known:
        at = [dues[number] for number in known]
        lanes = await connection.fetchval(_EVERY_LANE)
        found += await connection.fetch(statements.read("find_rows_at"), known, at, min(at), max(at) + 1, lanes)
    return Places.of(Place(due_ms * 1000, number, lane) for lane, due_ms, number in found)


async def find_in_segments(connection: Connection, ids: Collection[int], dues: Dues = NO_DUES) -> dict[int, list[int]]:
    """The segments that hold messages ``ids``, each with these.

    Reads the ids of every segment, some 40 KB each. If ``dues`` has all of them, it reads only segments around those
    instants. Raises the driver's errors.
    """
    if not ids:
        return {}
    at = [dues[number] for number in ids if number in dues]
    first_ms, last_ms = (min(at), max(at) + 1) if len(at) == len(ids) else (pool.BEGINNING_MS, catalog.FOREVER_MS)
    return dict(map(tuple, await connection.fetch(_HOLDING, list(ids), first_ms, last_ms)))
