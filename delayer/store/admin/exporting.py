"""Every message of one snapshot of a store, for `delayer export` and `delayer backlog export`: rows and segments in the
order of their due instants, then held messages.

It reads page by page, as listing.py does, in one transaction. So a compaction, restore, reschedule or release beside it
changes nothing in the file.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

from asyncpg import Connection

from delayer.core.filters import Filter
from delayer.core.hold import Hold
from delayer.core.message import Parcel, Target
from delayer.core.segment import SegmentBroken
from delayer.store.admin import listing
from delayer.store.admin.listing import Place, Places, Test
from delayer.store.rows import envelope
from delayer.store.segments import catalog

PAGE: Final = 1_000
PAGE_BYTES: Final = 16 << 20
"""Bodies and properties that are read at once."""
_COLUMNS: Final = (
    "id, due_at, parked_at, checksum, route, exchange, routing_key, to_exchange, to_key, properties, {body} AS body,"
    " octet_length(body) AS body_bytes, key"
)
_WHOLE: Final = f"SELECT {_COLUMNS} {listing.AT_PLACES}"
_SIZES: Final = f"SELECT id, octet_length({{body}}) + octet_length(properties) AS size {listing.AT_PLACES}"
_HELD: Final = f"""
SELECT {_COLUMNS.format(body="body")}, kind, reason, may_be_delivered, isolated, token
FROM held WHERE id > $1 ORDER BY id LIMIT 100
"""
_BODY, _NO_BODY = "body", "''::bytea"
# The sum does not depend on the order of rows. Messages keep their id and checksum in a segment.
_DIGESTS: Final = """
SELECT floor(due_us / 86400000000.0)::bigint, route, count(*),
       sum(hashint8extended(id, due_us # (checksum << 16)))::numeric::text
FROM {} GROUP BY 1, 2
"""
_OF_ROWS: Final = _DIGESTS.format(
    "(SELECT id, (extract(epoch FROM due_at) * 1000000)::bigint AS due_us, checksum, route FROM message) AS waiting"
)
_OF_SEGMENT: Final = _DIGESTS.format(
    "unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bytea[]) AS packed (id, due_us, checksum, route)"
)


# The first query after this takes the snapshot. A snapshot does not cover the catalog. The lock on the parent prevents
# that a partition is dropped. The lock on the default partition prevents that one is attached after its rows moved.
_KEEP_PARTITIONS: Final = "LOCK TABLE ONLY message, ONLY message_default IN ACCESS SHARE MODE"
_NO_TIMEOUTS: Final = """
SELECT set_config(name, '0', false) FROM pg_settings
WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')
"""


class Exported(NamedTuple):
    """A message, its checksum as it stands in the store, and why it is held, if it is. ``body_bytes``: the size of its
    body, also where that was not read."""

    parcel: Parcel
    checksum: int
    id: int
    parked_ms: int
    body_bytes: int
    held: Hold | None = None


class BrokenSegments(Exception):
    """Some segments do not read back: their messages are not exported, all others are."""

    def __init__(self, segments: Sequence[int]) -> None:
        super().__init__(f"segments {', '.join(map(str, segments))} do not read back: see docs/backlog.md")


@asynccontextmanager
async def snapshot(url: str) -> AsyncIterator[Connection]:
    """A connection whose transaction reads one snapshot to the end, however slowly the file is written.

    Raises StoreLost, BadStoreUrl, SchemaOutdated.
    """
    async with listing.looking(url, "export") as connection:
        await connection.execute(_NO_TIMEOUTS)
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(_KEEP_PARTITIONS)
            yield connection


async def waiting(
    connection: Connection, wanted: Filter, test: Test | None, page_bytes: int = PAGE_BYTES, *, bodies: bool = True
) -> AsyncIterator[Sequence[Exported]]:
    """Waiting messages of the snapshot, by portions, with empty bodies unless ``bodies``. Raises the driver's errors;
    at the end BrokenSegments, if any."""
    broken: set[int] = set()
    body = _BODY if bodies else _NO_BODY
    async for found in listing.pages(connection, wanted, test, PAGE):
        broken |= set(found.broken)
        for places in await _portions(connection, found.places, page_bytes, body):
            whole = await connection.fetch(_WHOLE.format(body=body), *Places.of(places))
            rows = {row["id"]: _exported(row) for row in whole}
            rows |= await _packed(connection, places)
            yield [rows[place.id] for place in places]  # All places are of one snapshot.
    if broken:
        raise BrokenSegments(sorted(broken))


class Digest(NamedTuple):
    """The number of some messages, and the sum of their hashes: it changes with their ids, instants and checksums."""

    messages: int
    total: int

    def __add__(self, other: Digest) -> Digest:  # type: ignore[override]
        return Digest(self.messages + other.messages, self.total + other.total)


async def digests(connection: Connection) -> tuple[dict[tuple[int, bytes], Digest], list[int]]:
    """A digest of the waiting messages of each due day (since 1970) and route, and the segments that do not read back.
    It reads every row once. Raises the driver's errors."""
    await connection.execute("SET LOCAL statement_timeout = 0; SET LOCAL enable_seqscan = on")
    rows = list(await connection.fetch(_OF_ROWS, timeout=listing.LONG_SECONDS))
    broken = []
    for segment in await catalog.listed(connection):
        try:
            inside = await catalog.read(connection, segment.id)
        except SegmentBroken:
            broken.append(segment.id)
            continue
        if inside is not None:
            rows += await connection.fetch(_OF_SEGMENT, *_hashed(inside[0]))
    await connection.execute("SET LOCAL enable_seqscan = off")
    found: dict[tuple[int, bytes], Digest] = {}
    for day, route, messages, total in rows:
        found[day, route] = found.get((day, route), Digest(0, 0)) + Digest(messages, int(total))
    return found, broken


def _hashed(table: Any) -> list[list[Any]]:
    """The columns of a table of codec.SCHEMA that a digest reads."""
    from delayer.store.segments.codec import microseconds  # noqa: PLC0415 - pyarrow

    return [
        table["id"].to_pylist(),
        microseconds(table["due_at"]),
        *(table[n].to_pylist() for n in ("checksum", "route")),
    ]


async def held(connection: Connection) -> AsyncIterator[Sequence[Exported]]:
    """Held messages of the snapshot, in the order of arrival. Raises the driver's errors."""
    after = 0
    while rows := await connection.fetch(_HELD, after):
        after = rows[-1]["id"]
        yield [_exported(row, envelope.read_hold(*row[13:17]), row["token"]) for row in rows]


def _exported(row: Mapping[str, Any], held: Hold | None = None, token: bytes | None = None) -> Exported:
    parcel = Parcel(
        row["due_at"], row["route"], row["exchange"], row["routing_key"], Target(row["to_exchange"], row["to_key"]),
        row["properties"], row["body"], row["key"], token or b"",
    )  # fmt: skip
    return Exported(parcel, row["checksum"], row["id"], row["parked_at"], row["body_bytes"], held)


async def _portions(connection: Connection, places: Sequence[Place], page_bytes: int, body: str) -> list[list[Place]]:
    """``places`` in runs whose bodies and properties fit ``page_bytes``, one at least."""
    sizes = dict(await connection.fetch(_SIZES.format(body=body), *Places.of(places)))
    portions: list[list[Place]] = []
    room = 0
    for place in places:
        size = sizes.get(place.id, 0)
        if room < size or not portions:
            portions.append([])
            room = page_bytes
        portions[-1].append(place)
        room -= size
    return portions


async def _packed(connection: Connection, places: Sequence[Place]) -> dict[int, Exported]:
    """Messages in segments. One segment after the other is unpacked."""
    found: dict[int, Exported] = {}
    for segment in {place.segment for place in places if place.segment is not None}:
        if (inside := await catalog.read(connection, segment)) is not None:
            found |= _messages(inside[0], {place.id for place in places if place.segment == segment})
    return found


def _messages(table: Any, wanted: Collection[int]) -> dict[int, Exported]:
    """The messages ``wanted`` of a table of codec.SCHEMA."""
    from delayer.store.segments.codec import microseconds  # noqa: PLC0415 - pyarrow

    rows = [at for at, number in enumerate(table["id"].to_pylist()) if number in wanted]
    table = table.take(rows)
    columns = {name: table[name].to_pylist() for name in table.column_names if not name.endswith("_at")}
    columns |= {name: [us // 1000 for us in microseconds(table[name])] for name in ("due_at", "parked_at")}
    columns["body_bytes"] = [len(body) for body in columns["body"]]
    values = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return {one["id"]: _exported(one) for one in values}
