"""Cancelling by id: rows that wait, held ones, and messages in segments, exact against whatever moves them meanwhile.

A message is in one place at any moment, but may go from one to the next between two of our statements: compacted,
restored, held, moved to another partition. Whoever moves it has its row, or its segment, locked: so what we have locked
stays, and what slipped away was seen going, or the list of segments changed. Then we look again.

Locks are taken in the order of keys.py, and those of segments after the held rows: keys' advisory locks, messages'
rows, held rows, segments by id, rows of message_key, the counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from enum import Enum
from typing import Final, NamedTuple

import asyncpg

from delayer.store import segments, session, statements
from delayer.store.keys import forget, lock_keys

LOOKS: Final = 10
"""How often everything is looked through for messages that slip away. Twice is rare."""
AT_ONCE: Final = 64
"""Segments whose ids are read by one statement: some 4 MB."""


class Found(Enum):
    """Where a cancel met a message."""

    WAITING = "waiting"
    HELD = "held"
    SEGMENT = "segment"
    NOWHERE = "nowhere"
    UNREADABLE = "unreadable"
    """Nowhere else; but a segment whose ids do not read back may hold it."""


class InSegments(NamedTuple):
    """The segments that hold messages which were asked for, each with these, and those that do not say."""

    holding: dict[int, list[int]]
    unreadable: dict[int, tuple[int, int]]
    """Lowest and highest id of each."""


NO_SEGMENTS: Final = (0, 0)
Changes = Counter[tuple[int, str]]

# Due instants travel as milliseconds, and a row that somebody wrote by hand may lie between two of them.
_PLACE = "WHERE lane = $1 AND due_at >= $2 AND due_at < $3 AND id = $4"
_KEY = f"SELECT key FROM message {_PLACE}"
_DELETE_WAITING = f"DELETE FROM message {_PLACE} RETURNING id, lane, key"
_DELETE_HELD = (
    "DELETE FROM held WHERE id IN (SELECT id FROM held WHERE id = ANY($1) ORDER BY id FOR UPDATE)"
    " RETURNING id, lane, key"
)


async def cancel(connection: asyncpg.Connection, ids: Collection[int]) -> dict[int, Found]:
    """Cancel messages by id, in one transaction; where each was met.

    Finding a row by its id alone reads the index of every partition, and the ids of every segment whose range it is in:
    ask for many at once. A message that is being released is waited for, and then found NOWHERE, or waiting again.
    Raises the driver's errors; then nothing is cancelled.
    """
    found = dict.fromkeys(ids, Found.NOWHERE)
    async with session.transaction(connection):
        changes: Changes = Counter()
        for _ in range(LOOKS):
            missing = [number for number, where in found.items() if where in (Found.NOWHERE, Found.UNREADABLE)]
            if not missing or await _look(connection, missing, found, changes):
                break
        if changed := sorted((lane, kind, n) for (lane, kind), n in changes.items() if n):
            await connection.execute(statements.COUNT, *map(list, zip(*changed, strict=True)))
    return found


async def _look(
    connection: asyncpg.Connection, missing: Sequence[int], found: dict[int, Found], changes: Changes
) -> bool:
    """Cancel what is found of ``missing``. Whether the rest is nowhere: nothing moved while we looked."""
    before = await _segments(connection)
    quiet = await _cancel_rows(connection, missing, found, changes)
    left = [number for number in missing if found[number] not in (Found.WAITING, Found.HELD)]
    if left and before != NO_SEGMENTS:
        quiet &= await _cancel_in_segments(connection, left, found, changes)
    return quiet and await _segments(connection) == before


async def _segments(connection: asyncpg.Connection) -> tuple[int, int]:
    """Changes whenever a segment comes or goes: ids are never used again."""
    rows = await connection.fetchrow("SELECT coalesce(max(id), 0), count(*) FROM segment")
    return rows[0], rows[1]


async def _cancel_rows(
    connection: asyncpg.Connection, ids: Sequence[int], found: dict[int, Found], changes: Changes
) -> bool:
    """Waiting and held rows. Whether none slipped away between the looking and the locking."""
    places = await connection.fetch(statements.FIND_ROWS, ids, timeout=None)
    held = await connection.fetch("SELECT id, key FROM held WHERE id = ANY($1) ORDER BY id", ids)
    keys = [key for _, key in held if key is not None]
    for place in places:
        keys += [key for (key,) in await connection.fetch(_KEY, *place) if key is not None]
    if keys:
        await lock_keys(connection, keys)
    gone = []
    for place in places:
        gone += [(row, Found.WAITING) for row in await connection.fetch(_DELETE_WAITING, *place)]
    gone += [(row, Found.HELD) for row in await connection.fetch(_DELETE_HELD, [number for number, _ in held])]
    for (number, lane, _), where in gone:
        found[number] = where
        changes[lane, "cancelled"] += 1
        changes[lane, "held"] -= where is Found.HELD
    if keyed := [(key, number) for (number, _, key), _ in gone if key is not None]:
        await forget(connection, keyed)
    return len(gone) == len(places) + len(held)


async def _cancel_in_segments(
    connection: asyncpg.Connection, ids: Sequence[int], found: dict[int, Found], changes: Changes
) -> bool:
    """Messages in segments. Whether every segment that was found to hold one was still there when it was locked."""
    holding, unreadable = await find(connection, ids)
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


async def find(connection: asyncpg.Connection, ids: Collection[int]) -> InSegments:
    """Which segments hold which of the messages ``ids``, those included that were cancelled there.

    Reads some 70 KB of every segment whose range of ids one of them is in. Raises the driver's errors.
    """
    wanted, last = set(ids), 0
    found = InSegments({}, {})
    while wanted:
        from delayer.store import packing  # noqa: PLC0415 - pyarrow, once there may be something to read

        rows = await connection.fetch(
            statements.CANDIDATES, list(wanted), packing.HEAD, packing.TAIL, last, AT_ONCE, timeout=None
        )
        for row in rows:
            try:
                ids_there = packing.ids_of(row["head"], row["tail"], row["size"], row["format"])
                if ids_there is None and (packed := await _whole(connection, row["id"])) is not None:
                    ids_there = packing.ids_of(packed, b"", len(packed), row["format"])
            except packing.SegmentBroken:
                found.unreadable[row["id"]] = (row["first_id"], row["last_id"])
                continue
            if here := wanted.intersection(ids_there or ()):
                found.holding[row["id"]] = list(here)
        if len(rows) < AT_ONCE:
            break
        last = rows[-1]["id"]
    return found


async def _whole(connection: asyncpg.Connection, segment: int) -> bytes | None:
    """The packed bytes; None when the segment is gone."""
    packed: bytes | None = await connection.fetchval("SELECT packed FROM segment WHERE id = $1", segment)
    return packed
