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
from typing import Final, NamedTuple
from zlib import crc32

from asyncpg import Connection, Record

from delayer.core.message import KeyGroup
from delayer.store.rows.history import OF_HELD, OF_MESSAGE

LOCKS: Final = 64
"""Advisory locks of all keys together."""
_DELETE_HELD = f"DELETE FROM held WHERE id = $1 RETURNING id, {OF_HELD}"
_DELETE = f"DELETE FROM message WHERE lane = $1 AND due_at = $2 AND id = $3 RETURNING id, {OF_MESSAGE}"


class Cancelled(NamedTuple):
    """Messages that keyed transactions took out: how many of each lane, how many of these were held, their keys, and
    their rows, for the history."""

    messages: Counter[int]
    held: Counter[int]
    keys: set[bytes]
    rows: list[Record]


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
    cancelled = Cancelled(Counter(), Counter(), set(), [])
    await lock_keys(connection, keys)
    waiting = await connection.fetch(
        "SELECT lane, due_at, id, key FROM message_key WHERE key = ANY($1) ORDER BY lane, due_at, id", list(keys)
    )
    for lane, due_at, message_id, key in waiting:
        place = lane, due_at, message_id
        if (row := await connection.fetchrow(_DELETE, *place)) is not None:
            pass
        elif (row := await connection.fetchrow(_DELETE_HELD, message_id)) is not None:
            cancelled.held[lane] += 1
        elif (row := await connection.fetchrow(_DELETE, *place)) is None:
            # Else it was on its way out of the default partition when we looked first.
            continue
        cancelled.rows.append(row)
        cancelled.messages[lane] += 1
        cancelled.keys.add(key)
    return cancelled


async def point(
    connection: Connection, cancelled: Collection[bytes], parked: Sequence[tuple[bytes, int, int, int]]
) -> None:
    """Make the keys of ``parked`` (key, lane, due_ms, id) stand for these, the cancelled ones for nothing. Step 3."""
    keys = sorted({*cancelled, *(key for key, *_ in parked)})
    await connection.execute("SELECT FROM message_key WHERE key = ANY($1) ORDER BY key FOR UPDATE", keys)
    await connection.execute("DELETE FROM message_key WHERE key = ANY($1)", keys)
    if parked:
        ordered = sorted(parked)
        await connection.execute(
            "INSERT INTO message_key (key, lane, due_at, id)"
            " SELECT key, lane, due_at, id FROM unnest($1::bytea[], $2::smallint[], $3::timestamptz[], $4::bigint[])"
            " AS new (key, lane, due_at, id) ORDER BY key",
            *map(list, zip(*ordered, strict=True)),
        )


async def forget(connection: Connection, keyed: Collection[tuple[bytes, int]]) -> None:
    """Remove keys that stand for these messages (key, id), unless they stand for a newer one by now. Step 3."""
    keys, ids = zip(*keyed, strict=True)
    await connection.execute("SELECT FROM message_key WHERE key = ANY($1) ORDER BY key FOR UPDATE", keys)
    await connection.execute("DELETE FROM message_key WHERE key = ANY($1) AND id = ANY($2)", keys, ids)
