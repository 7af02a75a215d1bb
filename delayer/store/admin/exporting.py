"""Every message of one snapshot of a store, for `delayer export`: rows and segments in the order of their due instants,
then held messages.

It reads page by page, as listing.py does, in one transaction. So a compaction, restore, reschedule or release beside it
changes nothing in the file.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import asyncpg

from delayer.core.filters import Filter
from delayer.core.hold import Hold
from delayer.core.message import Parcel, Target
from delayer.store.admin import listing
from delayer.store.admin.listing import BEGINNING, Place, Test
from delayer.store.rows import envelope
from delayer.store.segments import catalog

PAGE: Final = 1_000
PAGE_BYTES: Final = 16 << 20
"""Bodies that are read at once."""
_WHOLE: Final = """
SELECT m.id, m.due_at, m.checksum, m.route, m.exchange, m.routing_key, m.to_exchange, m.to_key, m.properties, m.body,
       m.key
FROM unnest($1::smallint[], $2::bigint[], $3::bigint[]) AS w (lane, due_us, id)
CROSS JOIN LATERAL (
    SELECT * FROM message
    WHERE lane = w.lane AND due_at = 'epoch'::timestamptz + w.due_us * interval '1 microsecond' AND id = w.id
      AND due_at >= $4 AND due_at < $5
) AS m
"""
_SIZES: Final = """
SELECT m.id, octet_length(m.body) AS size
FROM unnest($1::smallint[], $2::bigint[], $3::bigint[]) AS w (lane, due_us, id)
CROSS JOIN LATERAL (
    SELECT id, body FROM message
    WHERE lane = w.lane AND due_at = 'epoch'::timestamptz + w.due_us * interval '1 microsecond' AND id = w.id
      AND due_at >= $4 AND due_at < $5
) AS m
"""
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
    """Some segments do not read back: their messages are not exported, all others, ``exported`` of them, are."""

    def __init__(self, segments: Sequence[int], exported: int) -> None:
        self.segments = tuple(segments)
        self.exported = exported
        super().__init__(f"segments {', '.join(map(str, segments))} do not read back: see docs/backlog.md")


@asynccontextmanager
async def snapshot(url: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection whose transaction reads one snapshot to the end, however slowly the file is written.

    Raises StoreLost, BadStoreUrl, SchemaOutdated.
    """
    async with listing.looking(url, "export") as connection:
        await connection.execute(_NO_TIMEOUTS)
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(_KEEP_PARTITIONS)
            yield connection


async def waiting(
    connection: asyncpg.Connection, wanted: Filter, test: Test | None
) -> AsyncIterator[Sequence[Exported]]:
    """Waiting messages of the snapshot, by portions. Raises the driver's errors; at the end BrokenSegments, if any."""
    reader = _Segments(connection)
    broken: set[int] = set()
    exported = 0
    after: tuple[int, int] | None = BEGINNING
    while after is not None:
        found = await listing.find(connection, wanted, test, PAGE, after, scan=100_000)
        broken |= set(found.broken)
        for places in await _portions(connection, found.places):
            rows = await _rows(connection, [place for place in places if place.segment is None])
            rows |= await reader.rows([place for place in places if place.segment is not None])
            whole = [rows[place.id] for place in places]  # All places are of one snapshot.
            exported += len(whole)
            yield whole
        after = found.after
    if broken:
        raise BrokenSegments(sorted(broken), exported)


async def held(connection: asyncpg.Connection) -> AsyncIterator[Sequence[Exported]]:
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


def _arguments(places: Sequence[Place]) -> tuple[Any, ...]:
    dues = [place.due_us for place in places]
    return (
        [place.lane for place in places], dues, [place.id for place in places], min(dues) // 1000, max(dues) // 1000 + 1
    )  # fmt: skip


async def _portions(connection: asyncpg.Connection, places: Sequence[Place]) -> list[list[Place]]:
    """``places`` in runs whose bodies fit PAGE_BYTES, one at least."""
    as_rows = [place for place in places if place.segment is None]
    sizes = dict(await connection.fetch(_SIZES, *_arguments(as_rows))) if as_rows else {}
    portions: list[list[Place]] = []
    room = 0
    for place in places:
        size = sizes.get(place.id, 0)
        if room < size or not portions:
            portions.append([])
            room = PAGE_BYTES
        portions[-1].append(place)
        room -= size
    return portions


async def _rows(connection: asyncpg.Connection, places: Sequence[Place]) -> dict[int, Exported]:
    if not places:
        return {}
    return {row["id"]: _exported(row) for row in await connection.fetch(_WHOLE, *_arguments(places))}


class _Segments:
    """Messages in segments, of which the latest are kept unpacked."""

    def __init__(self, connection: asyncpg.Connection, *, kept: int = 2) -> None:
        self._connection = connection
        self._most = kept
        self._kept: dict[int, dict[int, Exported]] = {}

    async def rows(self, places: Sequence[Place]) -> dict[int, Exported]:
        found = {}
        for place in places:
            assert place.segment is not None
            found[place.id] = (await self._unpacked(place.segment))[place.id]
        return found

    async def _unpacked(self, segment: int) -> dict[int, Exported]:
        if segment not in self._kept:
            table = await catalog.read(self._connection, segment)
            while len(self._kept) >= self._most:
                del self._kept[next(iter(self._kept))]
            self._kept[segment] = {} if table is None else {one[0]: one[1] for one in _messages(table)}
        return self._kept[segment]


def _messages(table: Any) -> list[tuple[int, Exported]]:
    due = [micros // 1000 for micros in table["due_at"].cast("int64").to_pylist()]
    names = ("id", "checksum", "route", "exchange", "routing_key", "to_exchange", "to_key", "properties", "body")
    columns = [table[name].to_pylist() for name in names]
    return [
        (id_, _exported(dict(zip(names, (id_, *rest), strict=True), due_at=due_ms, key=None)))
        for due_ms, id_, *rest in zip(due, *columns, strict=True)
    ]
