"""Held messages for people: listed by their ids, tried again now, dropped."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import asyncpg

from delayer.core.filters import Filter
from delayer.store import acts, cancelling, session, telling
from delayer.store.cancelling import Found
from delayer.store.listing import Entry, Place, Test, meant
from delayer.store.showing import HELD, Held

AT_ONCE: Final = 1000
SCAN: Final = 20_000
"""Held messages that one page reads at most to find those that are meant."""
_COLUMNS: Final = f"""
SELECT lane, (extract(epoch FROM due_at) * 1000000)::bigint AS due_us, id, parked_at, route, exchange, routing_key,
       to_exchange, to_key, key, octet_length(body) AS size, properties, {HELD}
FROM held
"""
_NEXT: Final = f"{_COLUMNS} WHERE id > $1 ORDER BY id LIMIT $2"
_NAMED: Final = f"{_COLUMNS} WHERE id = ANY($1) ORDER BY id"
_RETRY: Final = (
    "UPDATE held SET retry_at = greatest(due_at, statement_timestamp())"
    " WHERE id IN (SELECT id FROM held WHERE id = ANY($1) ORDER BY id FOR UPDATE) RETURNING lane, retry_at"
)


class HeldEntry(NamedTuple):
    """A held message without its body, and why it is held."""

    entry: Entry
    held: Held


class Page(NamedTuple):
    """``after``: the id behind which the next page begins; None where nothing is left. ``bounded``: reading ended at
    its limit, before the page was full."""

    messages: Sequence[HeldEntry]
    after: int | None
    bounded: bool


async def listed(connection: asyncpg.Connection, wanted: Filter, test: Test | None, limit: int, after: int = 0) -> Page:
    """The next ``limit`` held messages of ``wanted``, in the order of their arrival. Raises the driver's errors."""
    found: list[HeldEntry] = []
    read = 0
    while read < SCAN:
        rows = await connection.fetch(_NEXT, after, AT_ONCE)
        for row in rows:
            after = row["id"]
            one = _read(row)
            if meant(one.entry, wanted, test):
                found.append(one)
            if len(found) == limit:
                return Page(found, after, bounded=False)
        read += len(rows)
        if len(rows) < AT_ONCE:
            return Page(found, None, bounded=False)
    return Page(found, after, bounded=True)


async def named(connection: asyncpg.Connection, ids: Collection[int]) -> list[HeldEntry]:
    """Those of these ids that are held. Raises the driver's errors."""
    return [_read(row) for row in await connection.fetch(_NAMED, list(ids))]


def _read(row: asyncpg.Record) -> HeldEntry:
    return HeldEntry(Entry(Place(row["due_us"], row["id"], row["lane"]), *row[3:12]), Held(*row[12:19]))


async def retry(connection: asyncpg.Connection, ids: Collection[int], act: int) -> int:
    """Try these again now, or as soon as they are due. How many there were; one that is being tried at this moment is
    waited for. Raises the driver's errors; then nothing is changed."""
    soonest: dict[int, int] = {}
    async with session.transaction(connection):
        rows = await connection.fetch(_RETRY, list(ids))
        for lane, retry_ms in rows:
            soonest[lane] = min(retry_ms, soonest.get(lane, retry_ms))
        await acts.add(connection, act, len(rows))
        await telling.tell(connection, {}, soonest)
    return len(rows)


async def drop(connection: asyncpg.Connection, messages: Sequence[HeldEntry], act: int) -> int:
    """Cancel these. How many there were; one that was delivered meanwhile is none. Raises the driver's errors."""
    dues = {one.entry.place.id: one.entry.place.due_us // 1000 for one in messages}
    found = await cancelling.cancel(connection, list(dues), dues, act)
    return sum(where is not Found.NOWHERE for where in found.values())
