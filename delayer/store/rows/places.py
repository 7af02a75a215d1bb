"""The places where messages wait, and the rows of messages known by id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from asyncpg import Connection

from delayer.core.filters import Token
from delayer.store import statements

AT_PLACES: Final = """
FROM unnest($1::smallint[], $2::timestamptz[], $3::bigint[]) AS wanted (of_lane, due, number)
CROSS JOIN LATERAL (
    SELECT * FROM message
    WHERE lane = of_lane AND due_at >= due AND due_at < due + interval '1 millisecond' AND id = number
      AND due_at >= $4 AND due_at < $5
) AS there
"""
"""Rows by the primary key, with :class:`Places` as arguments."""

Dues = Mapping[int, int]
"""Known due times (epoch ms) by id. If the due time of a message is known, only that time is searched."""
NO_DUES: Final[Dues] = {}


class Place(NamedTuple):
    """The place where a message waits. Lists are sorted by place."""

    due_us: int
    id: int
    lane: int
    segment: int | None = None

    @property
    def due_ms(self) -> int:
        return self.due_us // 1000

    @property
    def token(self) -> Token:
        return Token(self.id, self.due_ms)


class Places(NamedTuple):
    """The places of rows, as the statements take them, in the order in which a release locks them. Due instants are in
    milliseconds, though a row written by hand may lie between two. ``from_ms`` and ``before_ms`` bound all rows, to
    prune partitions while planning. :meth:`of` leaves out messages in segments."""

    lanes: list[int]
    dues: list[int]
    ids: list[int]
    from_ms: int
    before_ms: int

    @classmethod
    def of(cls, places: Iterable[Place]) -> Places:
        ordered = sorted((one for one in places if one.segment is None), key=lambda one: (one.lane, one.due_us, one.id))
        dues = [one.due_ms for one in ordered]
        lanes, ids = [one.lane for one in ordered], [one.id for one in ordered]
        return cls(lanes, dues, ids, min(dues, default=0), max(dues, default=-1) + 1)


async def find_rows(connection: Connection, ids: Sequence[int], dues: Dues) -> Places:
    """The places of the rows among ``ids``. Raises the driver's errors."""
    known = [number for number in ids if number in dues]
    unknown = [number for number in ids if number not in dues]
    found = await connection.fetch(statements.read("find_rows"), unknown) if unknown else []
    if known:
        at = [dues[number] for number in known]
        lanes = await connection.fetchval("SELECT array(SELECT number FROM lane)")
        found += await connection.fetch(statements.read("find_rows_at"), known, at, min(at), max(at) + 1, lanes)
    return Places.of(Place(due_ms * 1000, number, lane) for lane, due_ms, number in found)


async def new_ids(connection: Connection, count: int) -> list[int]:
    """Ids for messages that are about to be written with their keys. Raises the driver's errors."""
    if not count:
        return []
    rows = await connection.fetch("SELECT nextval('message_id') FROM generate_series(1, $1::int)", count)
    return [row[0] for row in rows]
