"""Every message of one snapshot of a store, for `delayer export`: rows and segments in the order of their due instants,
then held messages.

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
from delayer.store.admin import listing
from delayer.store.admin.listing import Place, Places, Test
from delayer.store.rows import envelope
from delayer.store.segments import catalog

PAGE: Final = 1_000
PAGE_BYTES: Final = 16 << 20
"""Bodies that are read at once."""
_WHOLE: Final = f"""
SELECT id, due_at, checksum, route, exchange, routing_key, to_exchange, to_key, properties, body, key
{listing.AT_PLACES}
"""
_SIZES: Final = f"SELECT id, octet_length(body) AS size {listing.AT_PLACES}"
_HELD: Final = """
SELECT id, due_at, checksum, route, exchange, routing_key, to_exchange, to_key, properties, body, key,
       kind, reason, may_be_delivered, isolated, token
FROM held WHERE id > $1 ORDER BY id LIMIT 100
"""


# The first query after this takes the snapshot. A snapshot does not cover the catalog. The lock on the parent prevents
# that a partition is dropped. The lock on the default partition prevents that one is attached after its rows moved.
_KEEP_PARTITIONS: Final = "LOCK TABLE ONLY message, ONLY message_default IN ACCESS SHARE MODE"
_NO_TIMEOUTS: Final = """
SELECT set_config(name, '0', false) FROM pg_settings
WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')
"""


class Exported(NamedTuple):
    """A message, its checksum as it stands in the store, and why it is held, if it is."""

    parcel: Parcel
    checksum: int
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
    connection: Connection, wanted: Filter, test: Test | None, page_bytes: int = PAGE_BYTES
) -> AsyncIterator[Sequence[Exported]]:
    """Waiting messages of the snapshot, by portions. Raises the driver's errors; at the end BrokenSegments, if any."""
    broken: set[int] = set()
    async for found in listing.pages(connection, wanted, test, PAGE):
        broken |= set(found.broken)
        for places in await _portions(connection, found.places, page_bytes):
            rows = {row["id"]: _exported(row) for row in await connection.fetch(_WHOLE, *Places.of(places))}
            rows |= await _packed(connection, places)
            yield [rows[place.id] for place in places]  # All places are of one snapshot.
    if broken:
        raise BrokenSegments(sorted(broken))


async def held(connection: Connection) -> AsyncIterator[Sequence[Exported]]:
    """Held messages of the snapshot, in the order of arrival. Raises the driver's errors."""
    after = 0
    while rows := await connection.fetch(_HELD, after):
        after = rows[-1]["id"]
        yield [_exported(row, envelope.read_hold(*row[11:15]), row["token"]) for row in rows]


def _exported(row: Mapping[str, Any], held: Hold | None = None, token: bytes | None = None) -> Exported:
    parcel = Parcel(
        row["due_at"], row["route"], row["exchange"], row["routing_key"], Target(row["to_exchange"], row["to_key"]),
        row["properties"], row["body"], row["key"], token or b"",
    )  # fmt: skip
    return Exported(parcel, row["checksum"], held)


async def _portions(connection: Connection, places: Sequence[Place], page_bytes: int) -> list[list[Place]]:
    """``places`` in runs whose bodies fit ``page_bytes``, one at least."""
    sizes = dict(await connection.fetch(_SIZES, *Places.of(places)))
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
    columns["due_at"] = [due_us // 1000 for due_us in microseconds(table["due_at"])]
    values = (dict(zip(columns, row, strict=True), key=None) for row in zip(*columns.values(), strict=True))
    return {one["id"]: _exported(one) for one in values}
