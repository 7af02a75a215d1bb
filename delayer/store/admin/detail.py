"""Single messages for people: one wherever it is, with all that the store knows of it; and held ones, to be listed,
retried or dropped."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

import asyncpg
from asyncpg import Connection

from delayer.core.filters import HOW_TO_NAME, OWN, Filter, Token
from delayer.core.segment import SegmentBroken
from delayer.store.admin import listing
from delayer.store.admin.listing import Entry, Test, entry_of, meant
from delayer.store.rows import envelope
from delayer.store.segments import catalog

HELD: Final = "kind, reason, may_be_delivered, isolated, attempts, held_at, retry_at"
BEGINNING: Final = 4096
"""Bytes of a body that are read where it is not read whole."""
_CONTENT: Final = (
    f"{listing.ENTRY}, checksum, format,"
    f" CASE WHEN octet_length(body) <= ${{}} THEN body ELSE substring(body FROM 1 FOR {BEGINNING}) END AS body"
)
_ROW: Final = f"SELECT {_CONTENT.format(6)} {listing.AT_PLACES}"
_HELD: Final = f"SELECT {_CONTENT.format(2)}, {HELD} FROM held WHERE id = $1"


class FoundIn(Enum):
    """The place where a message was found."""

    WAITING = "waiting"
    HELD = "held"
    SEGMENT = "segment"
    NOWHERE = "nowhere"
    UNREADABLE = "unreadable"
    """In a segment that does not read back."""


ABSENT: Final = (FoundIn.NOWHERE, FoundIn.UNREADABLE)


def absent(name: Token | str, found: FoundIn) -> str:
    """Why the message of this name is not here, in a sentence. Pure."""
    if found is FoundIn.UNREADABLE:
        return f"{name} may be in a segment that does not read back: see docs/backlog.md."
    quoted, subject = shlex.quote(str(name)), str(name)
    advice = f" If it was refused, `delayer refused list {quoted}` shows it."
    if isinstance(name, Token) and name.due_ms is not None:
        advice = " If it was rescheduled, try the part before the @."
    elif not subject.startswith(OWN):
        subject = f"message_id {name}"
        advice += f" {HOW_TO_NAME} For a key use `delayer list --delay-key {quoted}`."
    return f"{subject} is not in the store: it was delivered, cancelled, replaced, refused, or never parked.{advice}"


class HeldState(NamedTuple):
    """Why a message is held (core/hold.py), and when the daemon retries it (epoch ms; None: a person decides)."""

    kind: str
    reason: str
    may_be_delivered: bool
    isolated: bool
    attempts: int
    held_ms: int
    retry_ms: int | None


class FullMessage(NamedTuple):
    """A message with its body, or the beginning of it. ``sound``: its format and checksum fit; else the daemon will
    hold it. None: unknown, because only a part of the body was read."""

    where: FoundIn
    entry: Entry
    body: bytes
    sound: bool | None
    held: HeldState | None
    owner: str
    """The owner of the lane, or its last one."""
    owned: bool


async def show(connection: Connection, token: Token, most: int = (1 << 31) - 1) -> FullMessage | FoundIn:
    """The message of this name, on one snapshot; NOWHERE, or UNREADABLE if its segment does not read back. A body
    larger than ``most`` bytes is cut. Raises the driver's errors."""
    dues = {} if token.due_ms is None else {token.id: token.due_ms}
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        held = await connection.fetchrow(_HELD, token.id, most)
        if held is not None:
            return await _whole(connection, FoundIn.HELD, entry_of(held), held[12:15], HeldState(*held[15:22]))
        places = await listing.find_rows(connection, [token.id], dues)
        if (row := await connection.fetchrow(_ROW, *places, most)) is not None:
            return await _whole(connection, FoundIn.WAITING, entry_of(row), row[12:15])
        for segment in await listing.find_in_segments(connection, [token.id], dues):
            return await _in_segment(connection, segment, token.id) or FoundIn.UNREADABLE
        return FoundIn.NOWHERE


async def _in_segment(connection: Connection, segment: int, number: int) -> FullMessage | None:
    try:
        found = await catalog.read(connection, segment)
    except SegmentBroken:
        return None
    import pyarrow.compute as pc  # noqa: PLC0415 - pyarrow, once there is a segment to read

    if found is None or not len(table := found[0].filter(pc.equal(found[0]["id"], number))):
        return None
    lane = found[1]
    content = [table[name][0].as_py() for name in ("checksum", "format", "body")]
    return await _whole(connection, FoundIn.SEGMENT, listing.entries_in(table, lane, segment)[0], content)


async def _whole(
    connection: Connection, where: FoundIn, entry: Entry, content: Sequence[Any], held: HeldState | None = None
) -> FullMessage:
    """``content``: the checksum, the format, and the body or the beginning of it."""
    owner = await connection.fetchrow(
        "SELECT owner, EXISTS (SELECT FROM pg_locks AS k WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 2"
        " AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        " AND k.classid = 'lane'::regclass AND k.objid = number::int::oid) FROM lane WHERE number = $1",
        entry.place.lane,
    )
    checksum, format_, body = content
    sound = None
    if len(body) == entry.size:
        fits = checksum == envelope.checksum(entry.exchange, entry.routing_key, entry.properties, body)
        sound = fits and format_ == envelope.FORMAT
    name, owned = (owner[0], owner[1]) if owner is not None else ("", False)
    return FullMessage(where, entry, body, sound, held, name, owned)


def fate(found: FullMessage, to: str, owner: str, instant: Callable[[int], str]) -> str:
    """The future of a message, as a sentence without its capital and its end. Pure.

    ``to``: its destination, ``owner``: the owner of its lane, as the caller shows them. ``instant`` shows epoch
    milliseconds.
    """
    if found.sound is False:
        return "it is held when it is due: its bytes do not match their checksum, or their format is of a newer delayer"
    if found.held is not None and found.held.retry_ms is None:
        return f"nothing until an operator runs `delayer held retry`; then it is published to {to}"
    if found.held is not None and found.held.retry_ms is not None:
        return f"it is published to {to} again at {instant(found.held.retry_ms)}: attempt {found.held.attempts + 1}"
    who = f"by {owner}" if found.owned else "by the daemon that takes its lane"
    if found.where is FoundIn.SEGMENT:
        who = "after a daemon has restored its segment"
    return f"it is published to {to} at {instant(found.entry.place.due_us // 1000)}, {who}"


AT_ONCE: Final = 1000
_NEXT: Final = f"SELECT {listing.ENTRY}, {HELD} FROM held WHERE id > $1 ORDER BY id LIMIT $2"


class HeldEntry(NamedTuple):
    """A held message without its body, and why it is held."""

    entry: Entry
    held: HeldState


class HeldPage(NamedTuple):
    """``after``: the id behind which the next page begins; None where nothing is left. ``bounded``: reading ended at
    its limit, before the page was full."""

    messages: Sequence[HeldEntry]
    after: int | None
    bounded: bool


async def held_page(
    connection: Connection, wanted: Filter, test: Test | None, limit: int, after: int = 0, *, scan: int = 20_000
) -> HeldPage:
    """The next ``limit`` held messages of ``wanted``, in the order of their arrival.

    It reads ``scan`` held messages at most. Raises the driver's errors."""
    found: list[HeldEntry] = []
    read = 0
    while read < scan:
        rows = await connection.fetch(_NEXT, after, AT_ONCE)
        for row in rows:
            after = row["id"]
            one = HeldEntry(entry_of(row), HeldState(*row[12:19]))
            if wanted.kind in (None, one.held.kind) and meant(one.entry, wanted, test):
                found.append(one)
            if len(found) == limit:
                return HeldPage(found, after, bounded=False)
        read += len(rows)
        if len(rows) < AT_ONCE:
            return HeldPage(found, None, bounded=False)
    return HeldPage(found, after, bounded=True)


async def held_named(connection: Connection, ids: Collection[int]) -> list[HeldEntry]:
    """The held messages among these ids. Raises the driver's errors."""
    rows = await connection.fetch(f"SELECT {listing.ENTRY}, {HELD} FROM held WHERE id = ANY($1) ORDER BY id", list(ids))
    return [HeldEntry(entry_of(row), HeldState(*row[12:19])) for row in rows]


async def held_matching(connection: Connection, wanted: Filter, test: Test | None) -> dict[int, int]:
    """All held messages of ``wanted``, each with its due time. Raises the driver's errors."""
    dues: dict[int, int] = {}
    after: int | None = 0
    while after is not None:
        page = await held_page(connection, wanted, test, AT_ONCE, after)
        dues |= {one.entry.place.id: one.entry.place.due_us // 1000 for one in page.messages}
        after = page.after
    return dues


_GROUPS: Final = (
    "SELECT kind, to_exchange, to_key, count(*) AS messages, min(reason) AS reason, min(retry_at) AS retry_ms,"
    " count(*) FILTER (WHERE retry_at IS NULL) AS by_hand FROM (SELECT * FROM held ORDER BY id LIMIT $1) AS first"
    " GROUP BY 1, 2, 3 ORDER BY messages DESC, 1, 2, 3 LIMIT 50"
)


async def held_groups(connection: Connection, scan: int = 100_000) -> Sequence[asyncpg.Record]:
    """The largest groups of the first ``scan`` held messages, with one reason each. Raises the driver's errors."""
    return list(await connection.fetch(_GROUPS, scan))


async def held_dues(connection: Connection, ids: Collection[int]) -> dict[int, int]:
    """The held messages among these ids, each with its due time. Raises the driver's errors."""
    return dict(await connection.fetch("SELECT id, due_at FROM held WHERE id = ANY($1)", list(ids)))
