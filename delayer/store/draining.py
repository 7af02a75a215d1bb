"""Taking waiting rows out of the store, to where something else keeps them: gone when that is sure, or there again."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import asyncpg

from delayer.core.message import Due
from delayer.store import acts, envelope, session, statements
from delayer.store.listing import Place

_TAKE: Final = """
DELETE FROM message AS m
USING unnest($1::smallint[], $2::bigint[], $3::bigint[]) AS w (lane, due_us, id)
WHERE m.lane = w.lane AND m.due_at = 'epoch'::timestamptz + w.due_us * interval '1 microsecond' AND m.id = w.id
  AND m.due_at >= $4 AND m.due_at < $5 AND m.key IS NULL
RETURNING m.id, m.due_at, m.checksum, m.format, m.route, m.exchange, m.routing_key,
          m.to_exchange, m.to_key, m.properties, m.body, m.key, m.lane
"""


class Unsound(Exception):
    """The messages of these ids do not fit their checksum, or their format is not known here: nobody may send them."""

    def __init__(self, ids: frozenset[int]) -> None:
        super().__init__(f"{len(ids)} messages do not fit their checksum")
        self.ids = ids


@asynccontextmanager
async def taken(connection: asyncpg.Connection, places: Sequence[Place], act: int) -> AsyncIterator[list[Due]]:
    """The messages at these places that are still there and have no key: deleted, and counted as released, when the
    block ends well; else they are there again. Raises Unsound, the driver's errors."""
    dues = [place.due_us for place in places]
    async with session.transaction(connection):
        rows = await connection.fetch(
            _TAKE, [place.lane for place in places], dues, [place.id for place in places],
            min(dues) // 1000, max(dues) // 1000 + 1,
        )  # fmt: skip
        found = [envelope.read(row) for row in rows]
        unsound = frozenset(one.id for one in found if not one.sound)
        if unsound:
            raise Unsound(unsound)
        yield found
        by_lane = Counter(row["lane"] for row in rows)
        await acts.add(connection, act, len(rows))
        if by_lane:
            lanes = sorted(by_lane)
            await connection.execute(
                statements.COUNT, lanes, ["released"] * len(lanes), [by_lane[lane] for lane in lanes]
            )


async def keyed(connection: asyncpg.Connection) -> int:
    """How many messages wait under a key. Raises the driver's errors."""
    count: int = await connection.fetchval("SELECT count(*) FROM message_key")
    return count
