"""The store's part of a drain, which deletes rows in a transaction that commits only after their publish succeeded."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from asyncpg import Connection

from delayer.core.faultpoint import reach
from delayer.core.message import Due
from delayer.format.rows import read_row
from delayer.store import pool
from delayer.store.admin import audit_log
from delayer.store.admin.stats import count_inbox, counters, waiting_of
from delayer.store.rows.counters import add_counts
from delayer.store.rows.keys import OF_SCHEDULE, forget
from delayer.store.rows.places import AT, DELETE_ROWS, WANTED, Place, Places
from delayer.store.segments import catalog

_LOCK: Final = f"""
SELECT m.id, m.due_at, m.checksum, m.format, m.route, m.exchange, m.routing_key,
       m.to_exchange, m.to_key, m.properties, m.body, m.key
FROM message AS m JOIN {WANTED} ON {AT}
WHERE m.key IS NULL OR $6 AND NOT {OF_SCHEDULE}
ORDER BY m.lane, m.due_at, m.id
FOR UPDATE OF m
"""


class DrainBacklog(NamedTuple):
    """How many messages a drain can move, and how many it leaves and why. ``keyed`` and ``soon`` are disjoint parts of
    ``rows``. ``keyed``: with a key; if these are drained too, only occurrences of schedules. ``soon`` counts at most
    SOON_MOST rows per lane. ``packed``: messages in segments, ``broken``: in damaged ones.
    ``inbox``: in the SQL inbox; None if it takes too long to count."""

    rows: int
    keyed: int
    soon: int
    held: int
    packed: int
    broken: int
    inbox: int | None = 0


SOON_MOST: Final = 1_000_000
_KEYED: Final = (
    "SELECT count(*) FROM message_key AS k"
    f" WHERE segment IS NULL AND NOT EXISTS (SELECT FROM held AS h WHERE h.id = k.id) AND (NOT $1 OR {OF_SCHEDULE})"
)
_SOON: Final = f"""
SELECT count(*)
FROM lane AS l
CROSS JOIN LATERAL (
    SELECT FROM message WHERE lane = l.number AND due_at < $1 AND (key IS NULL OR $3 AND NOT {OF_SCHEDULE}) LIMIT $2
) AS soonest
"""


async def count(connection: Connection, soon_ms: int, *, keys_too: bool = False) -> DrainBacklog:
    """Count the backlog on one snapshot. A drain leaves rows due before ``soon_ms`` (epoch ms), rows with a key
    unless ``keys_too``, and occurrences of schedules. Raises the driver's errors."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        kinds = await counters(connection)
        keyed = await connection.fetchval(_KEYED, keys_too)
        soon = await connection.fetchval(_SOON, soon_ms, SOON_MOST, keys_too)
        packed = await catalog.count(connection)
    inbox = await count_inbox(connection)
    whole = packed.messages - packed.broken_messages
    return DrainBacklog(
        waiting_of(kinds), keyed, soon, kinds["held"], whole, packed.broken_messages, inbox and inbox.messages
    )


class LockedRows(NamedTuple):
    """The rows locked by a portion of a drain. ``unsound`` rows stay and must not be sent: their checksum is wrong,
    their format unknown here, or their properties do not fit in an envelope."""

    sound: Sequence[Due]
    unsound: int


@asynccontextmanager
async def drain_rows(
    connection: Connection, places: Sequence[Place], log_id: int, max_properties: int, *, keys_too: bool = False
) -> AsyncIterator[LockedRows]:
    """Yield the messages still at these places; those with a key only if ``keys_too``. If the block succeeds, sound
    messages are deleted and count as released; else they stay. Properties over ``max_properties`` bytes are unsound.
    Raises the driver's errors."""
    async with pool.transaction(connection):
        rows = await connection.fetch(_LOCK, *Places.of(places), keys_too)
        found = [read_row(row) for row in rows]
        sound = [one for one in found if one.sound and len(one.parcel.properties) <= max_properties]
        reach("drain.taken")
        yield LockedRows(sound, len(found) - len(sound))
        reach("drain.published")
        ids = {one.id for one in sound}
        gone = await connection.fetch(DELETE_ROWS, *Places.of(place for place in places if place.id in ids))
        if keyed := [(one.parcel.key, one.id) for one in sound if one.parcel.key is not None]:
            await forget(connection, keyed)
        await audit_log.add(connection, log_id, len(gone))
        await add_counts(connection, Counter((row["lane"], "released") for row in gone))
    reach("drain.committed")
