"""Keys: a later message with the same key replaces the waiting one, and a cancel removes it. Few messages have keys.

All transactions take locks in one order, so that they never wait for each other in a ring:

1. the keys' advisory locks, by number. From here on two transactions on the same key take turns, and some on different
   keys. A batch takes at most :data:`LOCKS` of them. One lock for each key filled the lock table of the whole cluster.
2. the old messages' rows, by lane, due instant and id, as a release takes them. This waits for a release in flight. It
   either published the old message (too late) or rolled back, and then the message is ours to cancel.
3. the rows of message_key, by key. The holder of such a row never waits for a message's row.
4. the counters, by lane and kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

from asyncpg import Connection, Record

from delayer.core.message import KeyGroup
from delayer.store import statements
from delayer.store.rows.history import OF_HELD

LOCKS: Final = 64
"""Advisory locks of all keys together."""
_WAITING: Final = "SELECT lane, due_at, id, key FROM message_key WHERE key = ANY($1) ORDER BY lane, due_at, id"
# The rows are deleted in the order of their places only by a nested loop over these.
_IN_ORDER: Final = (
    "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off;"
    " SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off"
)
_POINT: Final = (
    "INSERT INTO message_key AS k (key, lane, due_at, id)"
    " SELECT key, lane, due_at, id FROM unnest($1::bytea[], $2::smallint[], $3::timestamptz[], $4::bigint[])"
    " AS new (key, lane, due_at, id) ORDER BY key"
    " ON CONFLICT (key) DO UPDATE SET lane = excluded.lane, due_at = excluded.due_at, id = excluded.id"
)
_DELETE: Final = statements.read("delete_rows")
_DELETE_HELD: Final = (
    "DELETE FROM held WHERE id IN (SELECT id FROM held WHERE id = ANY($1) ORDER BY id FOR UPDATE)"
    f" RETURNING id, lane, key, {OF_HELD}"
)


@dataclass(slots=True)
class Cancelled:
    """The messages that a transaction took out by their keys."""

    known: bool = False
    """Whether any of the keys stood for a message, perhaps for one that is gone by now."""
    messages: Counter[int] = field(default_factory=Counter)
    """How many, by lane."""
    held: Counter[int] = field(default_factory=Counter)
    """How many of these were held, by lane."""
    keys: set[bytes] = field(default_factory=set)
    rows: list[Record] = field(default_factory=list)
    """Their rows, for the history."""


async def lock_keys(connection: Connection, keys: Collection[bytes]) -> None:
    """Step 1: until the end of the transaction no other one changes these keys."""
    await connection.execute(
        "SELECT pg_advisory_xact_lock('message_key'::regclass::oid::int, number) FROM unnest($1::int[]) AS number",
        sorted({crc32(key) % LOCKS for key in keys}),  # Keys that share a lock take turns.
    )


async def of_groups(connection: Connection, groups: Sequence[KeyGroup]) -> set[bytes]:
    """The keys in use that begin like one of ``groups``. This runs before step 1 and does not see keys that another
    transaction parks at this moment. In one lane of one process that does not happen."""
    found: set[bytes] = set()
    for group in groups:
        after = group[:-1] + bytes((group[-1] + 1,)) if group[-1] < 0xFF else group + b"\xff" * 255
        rows = await connection.fetch("SELECT key FROM message_key WHERE key >= $1 AND key < $2", bytes(group), after)
        found |= {row[0] for row in rows}
    return found


async def cancel_waiting(connection: Connection, keys: Collection[bytes]) -> Cancelled:
    """Take out the messages that ``keys`` stand for. Steps 1 and 2; raises the driver's errors."""
    cancelled = Cancelled()
    await lock_keys(connection, keys)
    places = {place[2]: place for place in await connection.fetch(_WAITING, list(keys))}
    cancelled.known = bool(places)
    if places:
        await connection.execute(_IN_ORDER)
        await _delete_waiting(connection, cancelled, places)
    if places:
        for row in await connection.fetch(_DELETE_HELD, list(places)):
            cancelled.held[row["lane"]] += 1
            _note(cancelled, places, row)
    if places:  # A row may have been on its way out of the default partition, or into ``held``, at the first look.
        await _delete_waiting(connection, cancelled, places)
    return cancelled


async def _delete_waiting(connection: Connection, cancelled: Cancelled, places: dict[int, Record]) -> None:
    """Delete the waiting rows at ``places`` (by id), and take them out of there."""
    lanes, dues, ids = zip(*(tuple(place)[:3] for place in places.values()), strict=True)
    for row in await connection.fetch(_DELETE, lanes, dues, ids, min(dues), max(dues) + 1):
        _note(cancelled, places, row)


def _note(cancelled: Cancelled, places: dict[int, Record], row: Record) -> None:
    cancelled.keys.add(places.pop(row["id"])["key"])
    cancelled.messages[row["lane"]] += 1
    cancelled.rows.append(row)


async def point(
    connection: Connection, cancelled: Collection[bytes], parked: Sequence[tuple[bytes, int, int, int]]
) -> None:
    """Make the keys of ``parked`` (key, lane, due_ms, id) stand for these, the other ``cancelled`` ones for nothing.
    Step 3."""
    ordered = sorted(parked)
    if cancelled:
        keys = sorted({*cancelled, *(key for key, *_ in ordered)})
        await connection.execute("SELECT FROM message_key WHERE key = ANY($1) ORDER BY key FOR UPDATE", keys)
    if gone := set(cancelled).difference(key for key, *_ in ordered):
        await connection.execute("DELETE FROM message_key WHERE key = ANY($1)", list(gone))
    if ordered:
        await connection.execute(_POINT, *map(list, zip(*ordered, strict=True)))


async def forget(connection: Connection, keyed: Collection[tuple[bytes, int]]) -> None:
    """Remove keys that stand for these messages (key, id), unless they stand for a newer one by now. Step 3."""
    keys, ids = zip(*keyed, strict=True)
    await connection.execute("SELECT FROM message_key WHERE key = ANY($1) ORDER BY key FOR UPDATE", keys)
    await connection.execute("DELETE FROM message_key WHERE key = ANY($1) AND id = ANY($2)", keys, ids)
