"""Single messages for people: one wherever it is, with all that the store knows of it; and held ones, to be listed,
retried or dropped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import Final, NamedTuple

import asyncpg

from delayer.core.filters import Filter, Token
from delayer.store.admin import listing
from delayer.store.admin.listing import Entry, Place, Test, meant
from delayer.store.rows import envelope
from delayer.store.segments import catalog

HELD: Final = "kind, reason, may_be_delivered, isolated, attempts, held_at, retry_at"
_COLUMNS: Final = (
    "lane, (extract(epoch FROM due_at) * 1000000)::bigint AS due_us, id, parked_at, checksum, format, route, exchange,"
    " routing_key, to_exchange, to_key, properties, octet_length(body) AS size, key,"
    " CASE WHEN octet_length(body) <= $2 THEN body ELSE substring(body FROM 1 FOR $3) END AS body"
)
_ROW: Final = f"SELECT {_COLUMNS} FROM message WHERE lane = $4 AND due_at >= $5 AND due_at < $6 AND id = $1"
_HELD: Final = f"SELECT {_COLUMNS}, {HELD} FROM held WHERE id = $1"
BEGINNING: Final = 4096
"""Bytes of a body that are read where it is not read whole."""
_NAMES: Final = (
    "id", "due_at", "parked_at", "checksum", "format", "route", "exchange", "routing_key", "to_exchange", "to_key",
    "properties", "body",
)  # fmt: skip


class Found(Enum):
    """The place where a message was found."""

    WAITING = "waiting"
    HELD = "held"
    SEGMENT = "segment"
    NOWHERE = "nowhere"
    UNREADABLE = "unreadable"
    """Nowhere else; but a segment whose ids do not read back may hold it."""


class Held(NamedTuple):
    """Why a message is held (core/hold.py), and when the daemon retries it (epoch ms; None: a person decides)."""

    kind: str
    reason: str
    may_be_delivered: bool
    isolated: bool
    attempts: int
    held_ms: int
    retry_ms: int | None


class Whole(NamedTuple):
    """A message with its body, or the beginning of it. ``sound``: its format and checksum fit; else the daemon will
    hold it. None: unknown, because only a part of the body was read."""

    where: Found
    entry: Entry
    body: bytes
    sound: bool | None
    held: Held | None
    owner: str
    """The owner of the lane, or its last one."""
    owned: bool


async def show(connection: asyncpg.Connection, token: Token, most: int = (1 << 31) - 1) -> Whole | Found:
    """The message of this name, on one snapshot; NOWHERE, or UNREADABLE if a segment that may hold it does not read
    back. Of a body larger than ``most`` bytes only the beginning. Raises the driver's errors."""
    dues = {} if token.due_ms is None else {token.id: token.due_ms}
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        held = await connection.fetchrow(_HELD, token.id, most, BEGINNING)
        if held is not None:
            return await _whole(connection, Found.HELD, held, Held(*held[15:22]))
        places = await listing.find_rows(connection, [token.id], dues)
        if places is not None:
            lane, due_ms = places.lanes[0], places.dues[0]
            row = await connection.fetchrow(_ROW, token.id, most, BEGINNING, lane, due_ms, due_ms + 1)
            return await _whole(connection, Found.WAITING, row, None)
        holding, unreadable = await listing.find_in_segments(connection, [token.id], dues)
        for segment in holding:
            found = await _in_segment(connection, segment, token.id)
            if found is not None:
                return found
        return Found.UNREADABLE if unreadable or holding else Found.NOWHERE


async def _in_segment(connection: asyncpg.Connection, segment: int, number: int) -> Whole | None:
    import pyarrow.compute as pc  # noqa: PLC0415 - pyarrow, once there is a segment to read

    from delayer.store.segments.codec import SegmentBroken  # noqa: PLC0415

    try:
        table = await catalog.read(connection, segment)
    except SegmentBroken:
        return None
    if table is None:
        return None
    table = table.filter(pc.equal(table["id"], number))
    if not len(table):
        return None
    lane = await connection.fetchval("SELECT lane FROM segment WHERE id = $1", segment)
    values = {
        name: (table[name].cast("int64") if name in ("due_at", "parked_at") else table[name])[0].as_py()
        for name in _NAMES
    }
    row = {**values, "lane": lane, "due_us": values["due_at"], "parked_at": values["parked_at"] // 1000, "key": None}
    row["size"] = len(row["body"])
    return await _whole(connection, Found.SEGMENT, row, None, segment)


async def _whole(
    connection: asyncpg.Connection, where: Found, row: asyncpg.Record, held: Held | None, segment: int | None = None
) -> Whole:
    owner = await connection.fetchrow(
        "SELECT owner, EXISTS (SELECT FROM pg_locks AS k WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 2"
        " AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        " AND k.classid = 'lane'::regclass AND k.objid = number::int::oid) FROM lane WHERE number = $1",
        row["lane"],
    )
    body, properties = row["body"], row["properties"]
    entry = Entry(
        Place(row["due_us"], row["id"], row["lane"], segment),
        row["parked_at"],
        row["route"],
        row["exchange"],
        row["routing_key"],
        row["to_exchange"],
        row["to_key"],
        row["key"],
        row["size"],
        properties,
    )
    sound = None
    if len(body) == row["size"]:
        fits = row["checksum"] == envelope.checksum(row["exchange"], row["routing_key"], properties, body)
        sound = fits and row["format"] == envelope.FORMAT
    name, owned = (owner[0], owner[1]) if owner is not None else ("", False)
    return Whole(where, entry, body, sound, held, name, owned)


def fate(found: Whole, to: str, owner: str, instant: Callable[[int], str]) -> str:
    """The future of a message, as a sentence without its capital and its end. Pure.

    ``to``: its destination, ``owner``: the owner of its lane, as the caller shows them. ``instant`` shows epoch
    milliseconds.
    """
    if found.sound is False:
        return "it is held when it is due: its bytes do not fit their checksum, or their format is of a newer delayer"
    if found.held is not None and found.held.retry_ms is None:
        return f"nothing, until somebody says so (`delayer held retry`): then it is published to {to}"
    if found.held is not None and found.held.retry_ms is not None:
        return f"it is published to {to} again at {instant(found.held.retry_ms)}: attempt {found.held.attempts + 1}"
    who = f"by {owner}" if found.owned else "by the daemon that takes its lane"
    if found.where is Found.SEGMENT:
        who = "after a daemon has restored its segment"
    return f"it is published to {to} at {instant(found.entry.place.due_us // 1000)}, {who}"


AT_ONCE: Final = 1000
_HELD_ENTRY: Final = f"""
SELECT lane, (extract(epoch FROM due_at) * 1000000)::bigint AS due_us, id, parked_at, route, exchange, routing_key,
       to_exchange, to_key, key, octet_length(body) AS size, properties, {HELD}
FROM held
"""
_NEXT: Final = f"{_HELD_ENTRY} WHERE id > $1 ORDER BY id LIMIT $2"
_NAMED: Final = f"{_HELD_ENTRY} WHERE id = ANY($1) ORDER BY id"


class HeldEntry(NamedTuple):
    """A held message without its body, and why it is held."""

    entry: Entry
    held: Held


class HeldPage(NamedTuple):
    """``after``: the id behind which the next page begins; None where nothing is left. ``bounded``: reading ended at
    its limit, before the page was full."""

    messages: Sequence[HeldEntry]
    after: int | None
    bounded: bool


async def held_page(
    connection: asyncpg.Connection, wanted: Filter, test: Test | None, limit: int, after: int = 0, *, scan: int = 20_000
) -> HeldPage:
    """The next ``limit`` held messages of ``wanted``, in the order of their arrival.

    It reads ``scan`` held messages at most. Raises the driver's errors."""
    found: list[HeldEntry] = []
    read = 0
    while read < scan:
        rows = await connection.fetch(_NEXT, after, AT_ONCE)
        for row in rows:
            after = row["id"]
            one = _read(row)
            if meant(one.entry, wanted, test):
                found.append(one)
            if len(found) == limit:
                return HeldPage(found, after, bounded=False)
        read += len(rows)
        if len(rows) < AT_ONCE:
            return HeldPage(found, None, bounded=False)
    return HeldPage(found, after, bounded=True)


async def held_named(connection: asyncpg.Connection, ids: Collection[int]) -> list[HeldEntry]:
    """The held messages among these ids. Raises the driver's errors."""
    return [_read(row) for row in await connection.fetch(_NAMED, list(ids))]


def _read(row: asyncpg.Record) -> HeldEntry:
    return HeldEntry(Entry(Place(row["due_us"], row["id"], row["lane"]), *row[3:12]), Held(*row[12:19]))
