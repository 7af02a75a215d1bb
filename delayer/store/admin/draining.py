"""The store's part of a drain: rows are deleted in a transaction that commits only after their publish succeeded."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from asyncpg import Connection

from delayer.core.faultpoint import reach
from delayer.core.message import Due
from delayer.store import pool
from delayer.store.admin import actions, audit_log
from delayer.store.admin.stats import counters, waiting
from delayer.store.rows import envelope, keys
from delayer.store.rows.places import Place, Places
from delayer.store.segments import catalog

_TAKE: Final = """
DELETE FROM message AS m
USING unnest($1::smallint[], $2::timestamptz[], $3::bigint[]) AS w (lane, due, id)
WHERE m.lane = w.lane AND m.due_at >= w.due AND m.due_at < w.due + interval '1 millisecond' AND m.id = w.id
  AND m.due_at >= $4 AND m.due_at < $5 AND (m.key IS NULL OR $6)
RETURNING m.id, m.due_at, m.checksum, m.format, m.route, m.exchange, m.routing_key,
          m.to_exchange, m.to_key, m.properties, m.body, m.key, m.lane
"""


class Unsound(Exception):
    """The messages of these ids must not be sent: their checksum is wrong, their format is unknown here, or their
    properties do not fit in an envelope."""

    def __init__(self, ids: frozenset[int]) -> None:
        super().__init__(f"{len(ids)} messages must not be sent")
        self.ids = ids


class DrainBacklog(NamedTuple):
    """How many messages a drain can move, and how many it leaves and why.

    ``keyed`` and ``soon`` are parts of ``rows`` without overlap, unless rows with a key are drained too. ``soon``
    counts at most SOON_MOST rows of each lane. ``packed`` are messages in segments, ``broken`` in damaged ones.
    """

    rows: int
    keyed: int
    soon: int
    held: int
    packed: int
    broken: int


SOON_MOST: Final = 1_000_000
_KEYED: Final = (
    "SELECT count(*) FROM message_key AS k"
    " WHERE segment IS NULL AND NOT EXISTS (SELECT FROM held AS h WHERE h.id = k.id)"
)
_SOON: Final = """
SELECT count(*)
FROM lane AS l
CROSS JOIN LATERAL (
    SELECT FROM message WHERE lane = l.number AND due_at < $1 AND (key IS NULL OR $3) LIMIT $2
) AS soonest
"""


async def standing(connection: Connection, soon_ms: int, *, keys_too: bool = False) -> DrainBacklog:
    """Count the backlog on one snapshot. A drain leaves rows due before ``soon_ms`` (epoch ms), and rows with a key
    unless ``keys_too``. Raises the driver's errors."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        kinds = await counters(connection)
        keyed = await connection.fetchval(_KEYED)
        soon = await connection.fetchval(_SOON, soon_ms, SOON_MOST, keys_too)
        packed = await catalog.count(connection)
    return DrainBacklog(
        waiting(kinds), keyed, soon, kinds["held"], packed.messages - packed.broken_messages, packed.broken_messages
    )


@asynccontextmanager
async def taken(
    connection: Connection, places: Sequence[Place], log_id: int, max_properties: int, *, keys_too: bool = False
) -> AsyncIterator[list[Due]]:
    """Yields the messages that are still at these places; those with a key only if ``keys_too``. They are deleted, and
    count as released, if the block ends well; otherwise they stay. Raises Unsound, also for properties of more than
    ``max_properties`` bytes, and the driver's errors."""
    async with pool.transaction(connection):
        rows = await connection.fetch(_TAKE, *Places.of(places), keys_too)
        found = [envelope.read(row) for row in rows]
        unsound = frozenset(one.id for one in found if not one.sound or len(one.parcel.properties) > max_properties)
        if unsound:
            raise Unsound(unsound)
        reach("drain.taken")
        yield found
        reach("drain.published")
        if keyed := [(one.parcel.key, one.id) for one in found if one.parcel.key is not None]:
            await keys.forget(connection, keyed)
        await audit_log.add(connection, log_id, len(rows))
        await actions.write_counters(connection, Counter((row["lane"], "released") for row in rows))
    reach("drain.committed")
