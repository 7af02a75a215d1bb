"""Keys: a later message with the same key replaces the waiting message, and a cancel removes it. Few messages have
keys.

To avoid deadlocks, all transactions take locks in this order:

1. the keys' advisory locks, by number. From here on, transactions on the same key take turns, as do some on different
   keys. A batch takes at most :data:`LOCKS`. With one lock per key they filled the lock table of the whole cluster.
   The keys of occurrences share one separate lock, so a large change of schedules does not delay parks.
2. the old messages' rows, by lane, due instant and id, like a release; then held rows, by id. This waits for a release
   in flight, which either published the old message (too late) or rolled back, so that the message is ours to cancel.
3. the rows of segments with old messages, by id. This waits for a restore, which turns the messages into rows.
4. the rows of message_key, by key. The holder of such a row never waits for a message's row.
5. the rows of schedule, by name. A transaction that ends a waiting occurrence has locked its message's row
   (schedules/occurrences.py). The key of the next one is a new row, which only this transaction writes.
6. the row of store, by a park with keys.
7. the rows of lane whose watermark falls, by number (lanes/notify.py). A park locks its own lane only with step 8, so
   next to limited routes it may lose a deadlock, and is repeated.
8. the counters, by lane and kind.

A release, a compaction and a restore take no advisory locks. They change a key only while it points at their message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from zlib import crc32

from asyncpg import Connection, Record

from delayer.core.errors import Rejected
from delayer.core.message import OCCURRENCES, KeyGroup, is_occurrence
from delayer.store import pool
from delayer.store.rows.counters import Changes
from delayer.store.rows.history import OF_HELD
from delayer.store.rows.places import AT, DELETE_ROWS, WANTED
from delayer.store.segments import catalog

OF_SCHEDULE: Final = "(key >= '{}' AND key < '{}')".format(*(one.decode() for one in OCCURRENCES))
"""Whether a key is that of a schedule's occurrence."""
LOCKS: Final = 64
"""The number of advisory locks for the keys of publishers. The next number is the lock for those of occurrences."""
MOST_FOUND: Final = 1_000
"""Maximum number of keys that the groups of one transaction contain. Each takes about 20 µs and 1 KB of memory, and
for N refused messages they are read 2N times."""
_OF_SEGMENT: Final = "segment, position, parked_at, route, to_exchange, to_key, size"
_OF_ROW: Final = f"({_OF_SEGMENT}) = ROW(NULL, NULL, NULL, NULL, NULL, NULL, NULL)"
_WAITING: Final = (
    f"SELECT lane, due_at, id, key, {_OF_SEGMENT}, xmin FROM message_key WHERE key = ANY($1) ORDER BY lane, due_at, id"
)
# Only a nested loop over these deletes the rows in the order of their places.
_IN_ORDER: Final = "; ".join(f"SET LOCAL {name} = {value}" for name, value in pool.INDEX_ONLY.items())
_POINT: Final = (
    "INSERT INTO message_key AS k (key, lane, due_at, id)"
    " SELECT key, lane, due_at, id FROM unnest($1::bytea[], $2::smallint[], $3::timestamptz[], $4::bigint[])"
    " AS new (key, lane, due_at, id) ORDER BY key"
    " ON CONFLICT (key) DO UPDATE SET lane = excluded.lane, due_at = excluded.due_at, id = excluded.id,"
    f" {_OF_ROW}"
)
_ENTER: Final = f"""
UPDATE message_key AS k
SET ({_OF_SEGMENT}) = ROW($1, p.position, p.parked_at, p.route, p.to_exchange, p.to_key, p.size)
FROM unnest($2::bytea[], $3::bigint[], $4::int[], $5::timestamptz[], $6::bytea[], $7::bytea[], $8::bytea[], $9::int[])
     AS p (key, id, position, parked_at, route, to_exchange, to_key, size)
WHERE k.key = p.key AND k.id = p.id
"""
_LEAVE: Final = f"UPDATE message_key SET {_OF_ROW} WHERE key = ANY($1) AND segment = $2"
# Locks each row as a DELETE of it would.
_LOCK_ROWS: Final = (
    f"SELECT m.id FROM message AS m JOIN {WANTED} ON {AT} ORDER BY m.lane, m.due_at, m.id FOR UPDATE OF m"
)
_OF_GROUP: Final = "SELECT key FROM message_key WHERE key >= $1 AND key < $2 LIMIT $3"
_LOCK_HELD: Final = "SELECT id FROM held WHERE id = ANY($1) ORDER BY id FOR UPDATE"
DELETE_HELD: Final = (
    "DELETE FROM held WHERE id IN (SELECT id FROM held WHERE id = ANY($1) ORDER BY id FOR UPDATE)"
    f" RETURNING id, lane, key, {OF_HELD}"
)


@dataclass(slots=True)
class Cancelled:
    """The messages that a transaction removed by their keys."""

    known: bool = False
    """Whether any key pointed at a message, even if the message has left by now."""
    messages: Counter[int] = field(default_factory=Counter)
    """Messages removed, by lane."""
    held: Counter[int] = field(default_factory=Counter)
    """The number of held messages among them, by lane."""
    packed: Counter[int] = field(default_factory=Counter)
    """The number of messages in segments among them, by lane."""
    keys: set[bytes] = field(default_factory=set)
    rows: list[Record] = field(default_factory=list)
    """For the history: the messages' rows, or those of message_key if in segments."""
    spared: set[bytes] = field(default_factory=set)
    """The keys to spare under which a message waits or is held. It stays there until the transaction ends."""

    @property
    def changes(self) -> Changes:
        """The changes of the counters."""
        changes: Changes = Counter()
        for lane, n in self.messages.items():
            changes[lane, "cancelled"] += n
        for lane, n in self.held.items():
            changes[lane, "held"] -= n
        for lane, n in self.packed.items():  # As if restored for its cancel.
            changes[lane, "restored"] += n
        return changes


async def lock_keys(connection: Connection, keys: Collection[bytes]) -> None:
    """Keep other transactions from changing these keys until the end of this transaction. Step 1."""
    await connection.execute(
        "SELECT pg_advisory_xact_lock('message_key'::regclass::oid::int, number) FROM unnest($1::int[]) AS number",
        # Keys that share a lock take turns.
        sorted({LOCKS if is_occurrence(key) else crc32(key) % LOCKS for key in keys}),
    )


async def find_keys(connection: Connection, groups: Sequence[KeyGroup]) -> set[bytes]:
    """The keys in use that begin like one of ``groups``. Runs before step 1 and misses keys that another transaction is
    parking, which cannot happen in one lane of one process. Raises Rejected for more than MOST_FOUND keys."""
    found: set[bytes] = set()
    for group in groups:
        after = group[:-1] + bytes((group[-1] + 1,)) if group[-1] < 0xFF else group + b"\xff" * 255
        found |= {key for (key,) in await connection.fetch(_OF_GROUP, bytes(group), after, MOST_FOUND + 1)}
        if len(found) > MOST_FOUND:
            raise Rejected(f"expected at most {MOST_FOUND:,} messages to cancel, found more: use `delayer cancel`")
    return found


async def cancel_waiting(
    connection: Connection, keys: Collection[bytes], spare: Collection[bytes] = frozenset()
) -> Cancelled:
    """Remove the messages that ``keys`` point at, but only lock those of ``spare``. Steps 1 to 3. Raises the driver's
    errors."""
    cancelled = Cancelled()
    await lock_keys(connection, keys)
    left, seen, same = list(keys), [0], 0
    # A row may be moving out of the default partition, into ``held``, or into a segment and back. Only the last writes
    # a new version of its key's row. So the message is gone if two reads find the same version.
    while places := {place["id"]: place for place in await connection.fetch(_WAITING, left)}:
        versions = [place["xmin"] for place in places.values()]
        same, seen = same + 1 if versions == seen else 0, versions
        if same == 2:
            break
        if not cancelled.known:
            cancelled.known = True
            await connection.execute(_IN_ORDER)
        if as_rows := [place for place in places.values() if place["segment"] is None]:
            await _delete_rows(connection, cancelled, places, as_rows, spare)
        if packed := [place for place in places.values() if place["segment"] is not None]:
            for place in await catalog.remove(connection, packed, spare):
                if place["key"] in spare:
                    cancelled.spared.add(places.pop(place["id"])["key"])
                    continue
                cancelled.packed[place["lane"]] += 1
                _note(cancelled, places, place)
        if not (left := [place["key"] for place in places.values()]):
            break
    return cancelled


async def _delete_rows(
    connection: Connection,
    cancelled: Cancelled,
    places: dict[int, Record],
    wanted: Sequence[Record],
    spare: Collection[bytes],
) -> None:
    """Delete the waiting or held rows ``wanted``, or spare them, and remove them from ``places`` (by id)."""
    ids = [place["id"] for place in wanted]
    to_delete = [place for place in wanted if place["key"] not in spare]
    if len(to_delete) < len(wanted):  # Lock all keys in one order before deleting any.
        _note_spared(cancelled, places, await connection.fetch(_LOCK_ROWS, *_places(wanted)), spare)
    if to_delete:
        for row in await connection.fetch(DELETE_ROWS, *_places(to_delete)):
            _note(cancelled, places, row)
    if left := [number for number in ids if number in places]:
        if len(to_delete) < len(wanted):
            _note_spared(cancelled, places, await connection.fetch(_LOCK_HELD, left), spare)
        left = [place["id"] for place in to_delete if place["id"] in places]
        for row in await connection.fetch(DELETE_HELD, left):
            cancelled.held[row["lane"]] += 1
            _note(cancelled, places, row)


def _places(rows: Sequence[Record]) -> tuple[object, ...]:
    """The parameters of DELETE_ROWS and _LOCK_ROWS."""
    lanes, dues, ids = zip(*(tuple(row)[:3] for row in rows), strict=True)
    return lanes, dues, ids, min(dues), max(dues) + 1


def _note_spared(
    cancelled: Cancelled, places: dict[int, Record], locked: Sequence[Record], spare: Collection[bytes]
) -> None:
    """Note which of the ``locked`` rows are to stay."""
    for (number,) in locked:
        if places[number]["key"] in spare:
            cancelled.spared.add(places.pop(number)["key"])


def _note(cancelled: Cancelled, places: dict[int, Record], row: Record) -> None:
    cancelled.keys.add(places.pop(row["id"])["key"])
    cancelled.messages[row["lane"]] += 1
    cancelled.rows.append(row)


async def lock_pointers(connection: Connection, keys: Collection[bytes]) -> None:
    """Lock the rows of message_key. Step 4."""
    await connection.execute("SELECT FROM message_key WHERE key = ANY($1) ORDER BY key FOR UPDATE", list(keys))


class PackedKey(NamedTuple):
    """A key whose message is in a segment, with the columns of message_key."""

    key: bytes
    id: int
    position: int
    parked_at: int
    route: bytes
    to_exchange: bytes
    to_key: bytes
    size: int


async def enter_segment(connection: Connection, segment: int, packed: Sequence[PackedKey]) -> None:
    """Point the keys of these messages at their segment. Step 4."""
    if packed:
        await lock_pointers(connection, [one.key for one in packed])
        await connection.execute(_ENTER, segment, *map(list, zip(*packed, strict=True)))


async def leave_segment(connection: Connection, segment: int, keys: Collection[bytes]) -> None:
    """Point the keys among ``keys`` whose messages are in ``segment`` at rows again. Step 4."""
    if keys:
        await lock_pointers(connection, keys)
        await connection.execute(_LEAVE, keys, segment)


async def point(
    connection: Connection, cancelled: Collection[bytes], parked: Sequence[tuple[bytes, int, int, int]]
) -> None:
    """Point the keys of ``parked`` (key, lane, due_ms, id) at these messages; delete the ``cancelled`` rest. Step 4."""
    ordered = sorted(parked)
    if cancelled:
        await lock_pointers(connection, {*cancelled, *(key for key, *_ in ordered)})
    if gone := set(cancelled).difference(key for key, *_ in ordered):
        await connection.execute("DELETE FROM message_key WHERE key = ANY($1)", list(gone))
    if ordered:
        await connection.execute(_POINT, *map(list, zip(*ordered, strict=True)))


async def forget(connection: Connection, keyed: Collection[tuple[bytes, int]]) -> None:
    """Remove the keys of these messages (key, id), unless they point at newer messages by now. Step 4."""
    keys, ids = zip(*keyed, strict=True)
    await lock_pointers(connection, keys)
    await connection.execute("DELETE FROM message_key WHERE key = ANY($1) AND id = ANY($2)", keys, ids)
