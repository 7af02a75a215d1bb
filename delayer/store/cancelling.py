"""Cancelling by id: rows that wait, held ones, and messages in segments, exact against whatever moves them meanwhile.

A message is in one place at any moment, but may go from one to the next between two of our statements: compacted,
restored, held, moved to another partition. Whoever moves it has its row, or its segment, locked: so what we have locked
stays, and what slipped away was seen going, or the list of segments changed. Then we look again.

Locks are taken in the order of keys.py, and those of segments after the held rows: keys' advisory locks, messages'
rows, held rows, segments by id, rows of message_key, the counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

import asyncpg

from delayer.store import acts, segments, session, statements, unpacking
from delayer.store.errors import DAMAGED
from delayer.store.keys import forget, lock_keys

LOOKS: Final = 10
"""How often everything is looked through for messages that slip away. Twice is rare."""
AT_ONCE: Final = 64
"""Segments whose ids are read by one statement: some 4 MB."""


class Found(Enum):
    """Where a cancel met a message."""

    WAITING = "waiting"
    HELD = "held"
    UNSURE = "perhaps delivered"
    """It was held for want of an answer. It is not tried again, but its destination perhaps has it."""
    SEGMENT = "segment"
    NOWHERE = "nowhere"
    UNREADABLE = "unreadable"
    """Nowhere else; but a segment whose ids do not read back may hold it."""


class InSegments(NamedTuple):
    """The segments that hold messages which were asked for, each with these, and those that do not say."""

    holding: dict[int, list[int]]
    unreadable: dict[int, tuple[int, int]]
    """Lowest and highest id of each."""


_SEEN: Final = """
SELECT coalesce(max(id), 0), count(*), (SELECT coalesce(sum(n), 0)::bigint FROM counter WHERE kind = 'restored')
FROM segment
"""
Changes = Counter[tuple[int, str]]

_LANES = "SELECT array(SELECT number FROM lane)"
_DELETE_HELD = (
    "DELETE FROM held WHERE id IN (SELECT id FROM held WHERE id = ANY($1) ORDER BY id FOR UPDATE)"
    " RETURNING id, lane, key, may_be_delivered"
)
# As in sql/candidates.sql, without a look at their bytes.
_RANGES = (
    "SELECT s.id, s.first_id, s.last_id FROM segment AS s WHERE s.id > $2 AND s.first_due <= $5 AND s.last_due >= $4"
    " AND EXISTS (SELECT FROM unnest($1::bigint[]) AS wanted WHERE wanted BETWEEN s.first_id AND s.last_id)"
    " ORDER BY s.id LIMIT $3"
)


Dues = Mapping[int, int]
"""When messages are due (epoch ms), by id, of those of which that is known: they are found by it, or not at all."""
NO_DUES: Final[Dues] = {}


async def cancel(
    connection: asyncpg.Connection, ids: Collection[int], dues: Dues = NO_DUES, act: int | None = None
) -> dict[int, Found]:
    """Cancel messages by id, in one transaction; where each was met.

    Finding a row by its id alone reads the index of every partition, and the ids of every segment whose range it is in:
    ask for many at once, or say in ``dues`` when they are due. A message that is being released is waited for, and then
    found NOWHERE, or waiting again. ``act``: what they are added to in the audit trail (acts.py).
    Raises the driver's errors; then nothing is cancelled.
    """
    found = dict.fromkeys(ids, Found.NOWHERE)
    async with session.transaction(connection):
        changes: Changes = Counter()
        for _ in range(LOOKS):
            missing = [number for number, where in found.items() if where in (Found.NOWHERE, Found.UNREADABLE)]
            if not missing or await _look(connection, missing, dues, found, changes):
                break
        if act is not None:
            await acts.add(connection, act, sum(changes[one] for one in changes if one[1] == "cancelled"))
        await count(connection, changes)
    return found


async def count(connection: asyncpg.Connection, changes: Changes) -> None:
    """Add to the counters: the last statement before the commit."""
    if changed := sorted((lane, kind, n) for (lane, kind), n in changes.items() if n):
        await connection.execute(statements.COUNT, *map(list, zip(*changed, strict=True)))


async def _look(
    connection: asyncpg.Connection, missing: Sequence[int], dues: Dues, found: dict[int, Found], changes: Changes
) -> bool:
    """Cancel what is found of ``missing``. Whether the rest is nowhere: nothing moved while we looked."""
    before = await segments_seen(connection)
    quiet = await _cancel_rows(connection, missing, dues, found, changes)
    left = [number for number in missing if found[number] not in (Found.WAITING, Found.HELD, Found.UNSURE)]
    if left and before.segments:
        quiet &= await _cancel_in_segments(connection, left, dues, found, changes)
    return quiet and await segments_seen(connection) == before


class Seen(NamedTuple):
    """Which segments there are. Another one whenever a segment came or went in between, also one that came *and* went:
    ids are never used again, and who restores counts."""

    newest: int
    segments: int
    restored: int


async def segments_seen(connection: asyncpg.Connection) -> Seen:
    """Raises the driver's errors."""
    return Seen(*await connection.fetchrow(_SEEN))


class Places(NamedTuple):
    """Where rows wait, as the statements take it: in the order that a release locks them in. Due instants travel as
    milliseconds, and a row that somebody wrote by hand may lie between two of them; ``bounds`` of all of them."""

    lanes: list[int]
    dues: list[int]
    ids: list[int]
    bounds: tuple[int, int]


async def find_rows(connection: asyncpg.Connection, ids: Sequence[int], dues: Dues) -> Places | None:
    """Where the rows among ``ids`` wait; None where none does. Raises the driver's errors."""
    known = [number for number in ids if number in dues]
    unknown = [number for number in ids if number not in dues]
    found = await connection.fetch(statements.FIND_ROWS, unknown, timeout=None) if unknown else []
    if known:
        at = [dues[number] for number in known]
        lanes = await connection.fetchval(_LANES)
        found += await connection.fetch(statements.FIND_ROWS_AT, known, at, min(at), max(at) + 1, lanes)
    if not found:
        return None
    of_lanes, due_ms, numbers = map(list, zip(*sorted(map(tuple, found)), strict=True))
    return Places(of_lanes, due_ms, numbers, (min(due_ms), max(due_ms) + 1))


async def lock_keys_of(connection: asyncpg.Connection, places: Places, more: Sequence[bytes] = ()) -> None:
    """Take turns with everybody else about the keys of these rows, and ``more``. Raises the driver's errors."""
    rows = await connection.fetch(statements.KEYS_OF_ROWS, *places[:3], *places.bounds)
    if keys := [*more, *(key for (key,) in rows)]:
        await lock_keys(connection, keys)


async def _cancel_rows(
    connection: asyncpg.Connection, ids: Sequence[int], dues: Dues, found: dict[int, Found], changes: Changes
) -> bool:
    """Waiting and held rows. Whether none slipped away between the looking and the locking."""
    places = await find_rows(connection, ids, dues)
    held = await connection.fetch("SELECT id, key FROM held WHERE id = ANY($1) ORDER BY id", ids)
    keys = [key for _, key in held if key is not None]
    gone = []
    if places is not None:
        await lock_keys_of(connection, places, keys)
        rows = await connection.fetch(statements.DELETE_ROWS, *places[:3], *places.bounds, timeout=None)
        gone += [(*row, Found.WAITING) for row in rows]
    elif keys:
        await lock_keys(connection, keys)
    for number, lane, key, unsure in await connection.fetch(_DELETE_HELD, [number for number, _ in held]):
        gone.append((number, lane, key, Found.UNSURE if unsure else Found.HELD))
    for number, lane, _, where in gone:
        found[number] = where
        changes[lane, "cancelled"] += 1
        changes[lane, "held"] -= where is not Found.WAITING
    if keyed := [(key, number) for number, _, key, _ in gone if key is not None]:
        await forget(connection, keyed)
    return len(gone) == (0 if places is None else len(places.ids)) + len(held)


async def _cancel_in_segments(
    connection: asyncpg.Connection, ids: Sequence[int], dues: Dues, found: dict[int, Found], changes: Changes
) -> bool:
    """Messages in segments. Whether every segment that was found to hold one was still there when it was locked."""
    holding, unreadable = await find(connection, ids, dues)
    for number in ids:
        doubtful = any(first <= number <= last for first, last in unreadable.values())
        found[number] = Found.UNREADABLE if doubtful else Found.NOWHERE
    locked = await connection.fetch(
        "SELECT id, lane, messages, cancelled FROM segment WHERE id = ANY($1) ORDER BY id FOR UPDATE", sorted(holding)
    )
    for segment, lane, messages, cancelled in locked:
        new = await connection.fetch(statements.ADD_CANCELLED, segment, sorted(holding[segment]))
        for (number,) in new:
            found[number] = Found.SEGMENT
        if cancelled + len(new) == messages:
            await segments.delete(connection, segment)
        elif new:
            await connection.execute("UPDATE segment SET cancelled = cancelled + $2 WHERE id = $1", segment, len(new))
        changes[lane, "compacted"] -= len(new)
        changes[lane, "cancelled"] += len(new)
    return len(locked) == len(holding)


async def find(connection: asyncpg.Connection, ids: Collection[int], dues: Dues = NO_DUES) -> InSegments:
    """Which segments hold which of the messages ``ids``, those included that were cancelled there.

    Reads some 70 KB of every segment whose range of ids one of them is in; where ``dues`` has all of them, only of
    those that reach over such an instant. Raises the driver's errors.
    """
    wanted, last = set(ids), 0
    at = [dues[number] for number in wanted if number in dues]
    known = bool(at) and len(at) == len(wanted)
    first_ms, last_ms = (min(at), max(at) + 1) if known else (session.BEGINNING_MS, segments.FOREVER_MS)
    found = InSegments({}, {})
    while wanted:
        from delayer.store import packing  # noqa: PLC0415 - pyarrow, once there may be something to read

        rows, damaged = await _candidates(connection, list(wanted), last, (first_ms, last_ms))
        found.unreadable.update(damaged)
        for row in rows:
            try:
                ids_there = packing.ids_of(row["head"], row["tail"], row["size"], row["format"])
                if ids_there is None and (packed := await unpacking.bytes_of(connection, row["id"])) is not None:
                    ids_there = packing.ids_of(packed, b"", len(packed), row["format"])
            except packing.SegmentBroken:
                found.unreadable[row["id"]] = (row["first_id"], row["last_id"])
                continue
            if here := wanted.intersection(ids_there or ()):
                found.holding[row["id"]] = list(here)
        if len(rows) + len(damaged) < AT_ONCE:
            break
        last = max([*(row["id"] for row in rows), *damaged])
    return found


async def _candidates(
    connection: asyncpg.Connection, wanted: list[int], last: int, dues: tuple[int, int]
) -> tuple[list[asyncpg.Record], dict[int, tuple[int, int]]]:
    """The next candidates, AT_ONCE together; and of those that the store cannot read, the ranges of ids."""
    try:
        return await _heads(connection, wanted, last, AT_ONCE, dues), {}
    except DAMAGED:
        pass  # one by one: it is some of them
    rows: list[asyncpg.Record] = []
    damaged: dict[int, tuple[int, int]] = {}
    for number, first, highest in await connection.fetch(_RANGES, wanted, last, AT_ONCE, *dues, timeout=None):
        try:
            rows += await _heads(connection, wanted, number - 1, 1, dues)
        except DAMAGED:
            damaged[number] = (first, highest)
    return rows, damaged


async def _heads(
    connection: asyncpg.Connection, wanted: list[int], last: int, count: int, dues: tuple[int, int]
) -> list[asyncpg.Record]:
    from delayer.store import packing  # noqa: PLC0415 - pyarrow

    async with session.transaction(connection):  # a savepoint: the damage ends what is inside, and no more
        rows: list[asyncpg.Record] = await connection.fetch(
            statements.CANDIDATES, wanted, packing.HEAD, packing.TAIL, last, count, *dues, timeout=None
        )
    return rows
