"""The places where messages wait, and the rows of messages known by id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from asyncpg import Connection, Record

from delayer.core.filters import Token
from delayer.store import statements
from delayer.store.rows import of_schedule

WANTED: Final = "unnest($1::smallint[], $2::timestamptz[], $3::bigint[]) AS w (of_lane, due, number)"
AT: Final = (
    "m.lane = of_lane AND m.due_at >= due AND m.due_at < due + interval '1 millisecond' AND m.id = number"
    " AND m.due_at >= $4 AND m.due_at < $5"
)
"""Whether the row ``m`` of ``message`` is at the place of WANTED, by the primary key. The arguments are
:class:`Places`."""
AT_PLACES: Final = f"FROM {WANTED} CROSS JOIN LATERAL (SELECT * FROM message AS m WHERE {AT}) AS there"
DELETE_ROWS: Final = f"""
DELETE FROM message AS m USING {WANTED} WHERE {AT}
RETURNING m.id, m.lane, m.key, m.route, m.to_exchange, m.to_key, m.due_at, m.parked_at,
          octet_length(m.body) + octet_length(m.properties) AS size, {of_schedule.column("m.")}
"""
"""Delete the rows, in the order in which a release locks them."""
KEYS_OF_ROWS: Final = f"SELECT m.key FROM message AS m JOIN {WANTED} ON {AT} WHERE m.key IS NOT NULL"
MOVE_ROWS: Final = f"""
WITH moved AS (DELETE FROM message AS m USING {WANTED} WHERE {AT} RETURNING m.*)
INSERT INTO message (id, due_at, parked_at, checksum, lane, format, route, exchange, routing_key, to_exchange, to_key,
                     properties, body, key)
SELECT id, greatest(coalesce($6::timestamptz, due_at + $7::bigint * interval '1 millisecond'),
                    least(due_at, date_trunc('milliseconds', now()))), parked_at, checksum, lane, format,
       route, exchange, routing_key, to_exchange, to_key, properties, body, key
FROM moved
RETURNING id, lane, due_at, key
"""
"""Move the rows to due instant $6, or if that is null, by $7 milliseconds. An instant in the past becomes now, so that
late_limit does not hold the message. A message already due keeps its instant.

The rows are deleted and inserted again, with their id and instant of parking. An UPDATE into another partition makes
waiting transactions fail; after a DELETE they find no row."""
_FIND_ROWS_DUE: Final = (
    "SELECT lane, due_at, id FROM message WHERE id = ANY($1::bigint[]) AND due_at >= $2 AND due_at < $3"
)

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
    found: list[Record] = []
    if at := {number: dues[number] for number in ids if number in dues}:
        lanes = await connection.fetchval("SELECT array(SELECT number FROM lane)")
        given = list(at), list(at.values()), *_bounds(at)
        found = await connection.fetch(statements.read("find_rows_at"), *given, lanes)
    # Gone, in a segment, or in a lane that the table of lanes lacks.
    if left := at.keys() - {row["id"] for row in found}:
        rows = await connection.fetch(_FIND_ROWS_DUE, list(left), *_bounds({number: at[number] for number in left}))
        found += [row for row in rows if row["due_at"] == at[row["id"]]]
    if unknown := [number for number in ids if number not in dues]:
        found += await connection.fetch(statements.read("find_rows"), unknown)
    return Places.of(Place(due_ms * 1000, number, lane) for lane, due_ms, number in found)


def _bounds(dues: Dues) -> tuple[int, int]:
    return min(dues.values()), max(dues.values()) + 1


async def new_ids(connection: Connection, count: int) -> list[int]:
    """Ids for messages that are about to be written with their keys. Raises the driver's errors."""
    if not count:
        return []
    rows = await connection.fetch("SELECT nextval('message_id') FROM generate_series(1, $1::int)", count)
    return [row[0] for row in rows]
