"""Held messages: listed, found by id or filter, and exported."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from typing import Final, NamedTuple

import asyncpg
from asyncpg import Connection

from delayer.core.filters import Filter
from delayer.core.hold import Hold
from delayer.format.rows import read_hold
from delayer.store.rows import of_schedule
from delayer.store.waiting import BEFORE, BEGINNING_OF_BODY, BYTES, COLUMNS, NO_BODY, Entry, entry_of, matches

AT_ONCE: Final = 1000
_STATE: Final = "kind, reason, may_be_delivered, isolated, attempts, held_at, retry_at"
# $1: the id after which to begin. $2: rows; $3: bytes of properties, but at least one row.
_NEXT: Final = f"""
SELECT * FROM (
    SELECT *, sum(octet_length(properties)) {BEFORE} AS before
    FROM (SELECT {COLUMNS.format(body=NO_BODY)}, {_STATE} FROM held WHERE id > $1 ORDER BY id LIMIT $2) AS ordered
) AS summed
WHERE before IS NULL OR before < $3
ORDER BY id
"""
_NAMED: Final = (
    f"SELECT {COLUMNS.format(body=BEGINNING_OF_BODY.format(2))}, {_STATE} FROM held WHERE id = ANY($1) ORDER BY id"
)
_WHOLE: Final = f"SELECT {COLUMNS.format(body='body')}, {_STATE}, token FROM held WHERE id > $1 ORDER BY id LIMIT 100"

_OF_SCHEDULES: Final = """
WITH first AS (SELECT properties, position($1::bytea IN properties) + length($1) AS at
               FROM (SELECT properties, route FROM held ORDER BY id LIMIT $2) AS seen WHERE route = '')
SELECT substring(properties FROM at + 1 FOR get_byte(properties, at - 1)) AS name, count(*)
FROM first WHERE at > length($1) AND at <= length(properties) GROUP BY 1
"""


class HeldState(NamedTuple):
    """Why a message is held (core/hold.py), and when the daemon retries it (epoch ms; None: an operator decides)."""

    kind: str
    reason: str
    may_be_delivered: bool
    isolated: bool
    attempts: int
    held_ms: int
    retry_ms: int | None

    @property
    def hold(self) -> Hold:
        return read_hold(*self[:4])


class HeldEntry(NamedTuple):
    entry: Entry
    held: HeldState


class HeldPage(NamedTuple):
    """``after``: the id after which the next page begins; None at the end. ``bounded``: reading hit its limit."""

    messages: Sequence[HeldEntry]
    after: int | None
    bounded: bool


def _held_of(row: asyncpg.Record) -> HeldEntry:
    return HeldEntry(entry_of(row), HeldState(*row[15:22]))


async def find(connection: Connection, wanted: Filter, limit: int, after: int = 0, *, scan: int = 20_000) -> HeldPage:
    """The next ``limit`` held messages of ``wanted`` by arrival; reads at most ``scan``, and about BYTES of
    properties. Raises the driver's errors."""
    found: list[HeldEntry] = []
    read, room = 0, BYTES
    while read < scan and room > 0:
        rows = await connection.fetch(_NEXT, after, AT_ONCE, BYTES)
        if not rows:
            return HeldPage(found, None, bounded=False)
        for row in rows:
            after = row["id"]
            one = _held_of(row)
            if wanted.kind in (None, one.held.kind) and matches(one.entry, wanted):
                found.append(one)
            if len(found) == limit:
                return HeldPage(found, after, bounded=False)
        read += len(rows)
        room -= sum(len(row["properties"]) for row in rows)
    return HeldPage(found, after, bounded=True)


async def find_by_id(connection: Connection, ids: Collection[int], most_body: int = 0) -> list[HeldEntry]:
    """The held messages among these ids, with up to ``most_body`` bytes of each body. Raises the driver's errors."""
    return [_held_of(row) for row in await connection.fetch(_NAMED, list(ids), most_body)]


def dues_of(messages: Sequence[HeldEntry]) -> dict[int, int]:
    """The due times (epoch ms) of these messages, by id."""
    return {one.entry.place.id: one.entry.place.due_ms for one in messages}


async def pages(connection: Connection, wanted: Filter) -> AsyncIterator[dict[int, int]]:
    """All held messages of ``wanted``, page by page, each with its due time. Raises the driver's errors."""
    after: int | None = 0
    while after is not None:
        page = await find(connection, wanted, AT_ONCE, after)
        yield dues_of(page.messages)
        after = page.after


SCANNED: Final = 100_000
"""How many held messages are counted at most."""
_GROUPS: Final = (
    "SELECT kind, to_exchange, to_key, count(*) AS messages, min(reason) AS reason, min(retry_at) AS retry_ms,"
    " count(*) FILTER (WHERE retry_at IS NULL) AS by_hand FROM (SELECT * FROM held ORDER BY id LIMIT $1) AS first"
    " GROUP BY 1, 2, 3 ORDER BY messages DESC, 1, 2, 3 LIMIT 50"
)


async def count_groups(connection: Connection) -> Sequence[asyncpg.Record]:
    """The largest groups of the first SCANNED held messages, with one reason each. Raises the driver's errors."""
    return list(await connection.fetch(_GROUPS, SCANNED))


async def count_by_schedule(connection: Connection) -> dict[str, int]:
    """How many of the first SCANNED held messages each schedule has made, by its name. Raises the driver's errors."""
    rows = await connection.fetch(_OF_SCHEDULES, of_schedule.HEADER, SCANNED)
    return {name.decode("utf-8", "replace"): number for name, number in rows}


async def read_all(connection: Connection) -> AsyncIterator[Sequence[tuple[HeldEntry, bytes]]]:
    """All held messages with bodies, by arrival, each with its ``x-delayer-id``, or b"". Raises the driver's errors."""
    after = 0
    while rows := await connection.fetch(_WHOLE, after):
        after = rows[-1]["id"]
        yield [(_held_of(row), row["token"] or b"") for row in rows]
