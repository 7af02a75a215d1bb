"""Another due instant for messages that wait, wherever they are: rows, messages in segments, and held ones, which are
tried again then. Exact against whatever moves them meanwhile, by the rules and in the order of locks of cancelling.py.

A message that is on its way out is waited for: it is gone then, or ours to move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import asyncpg

from delayer.store import acts, cancelling, segments, session, statements, telling, unpacking
from delayer.store.cancelling import LOOKS, NO_DUES, Changes, Dues, Found

# An imported message may be held before it is due: then the new instant is its due instant as well. Where a person
# decides there is no retry_at: "later by" counts from now, or from the due instant.
_HELD = (
    "UPDATE held SET retry_at = coalesce($2::timestamptz, coalesce(retry_at, greatest(due_at, statement_timestamp()))"
    " + $3::bigint * interval '1 millisecond'),"
    " due_at = CASE WHEN due_at > statement_timestamp()"
    " THEN coalesce($2::timestamptz, due_at + $3::bigint * interval '1 millisecond') ELSE due_at END"
    " WHERE id IN (SELECT id FROM held WHERE id = ANY($1) ORDER BY id FOR UPDATE) RETURNING id, lane, retry_at"
)
# Without their bytes: see unpacking.live.
_LOCK_SEGMENTS = (
    "SELECT id, lane, messages, cancelled, format, digest FROM segment WHERE id = ANY($1) ORDER BY id FOR UPDATE"
)


class When(NamedTuple):
    """The new instant: ``at_ms`` (epoch ms), or ``by_ms`` later than before (earlier, where it is negative). What would
    be due before now is due now."""

    at_ms: int | None = None
    by_ms: int = 0


class _Work:
    """What one transaction found and changed."""

    def __init__(self, when: When, dues: Dues, ids: Collection[int]) -> None:
        self.when = when
        self.dues = dues
        self.found = dict.fromkeys(ids, Found.NOWHERE)
        self.changes: Changes = Counter()
        self.waiting: dict[int, int] = {}
        """The soonest new due instant of each lane."""
        self.held: dict[int, int] = {}

    def missing(self) -> list[int]:
        return [number for number, where in self.found.items() if where in (Found.NOWHERE, Found.UNREADABLE)]

    @property
    def done(self) -> int:
        return len(self.found) - len(self.missing())


async def reschedule(
    connection: asyncpg.Connection,
    ids: Collection[int],
    when: When,
    dues: Dues = NO_DUES,
    act: int | None = None,
) -> dict[int, Found]:
    """Give messages another due instant, in one transaction; where each was met. ``dues`` and ``act`` as in
    cancelling.cancel. Raises the driver's errors; then nothing is changed."""
    work = _Work(when, dues, ids)
    async with session.transaction(connection):
        for _ in range(LOOKS):
            missing = work.missing()
            if not missing or await _look(connection, missing, work):
                break
        if act is not None:
            await acts.add(connection, act, work.done)
        await telling.tell(connection, work.waiting, work.held)
        await cancelling.count(connection, work.changes)
    return work.found


async def _look(connection: asyncpg.Connection, missing: Sequence[int], work: _Work) -> bool:
    """Move what is found of ``missing``. Whether the rest is nowhere: nothing moved while we looked."""
    before = await cancelling.segments_seen(connection)
    quiet = await _move_rows(connection, missing, work)
    left = [number for number in missing if work.found[number] not in (Found.WAITING, Found.HELD)]
    if left and before.segments:
        quiet &= await _move_out_of_segments(connection, left, work)
    return quiet and await cancelling.segments_seen(connection) == before


async def _move_rows(connection: asyncpg.Connection, ids: Sequence[int], work: _Work) -> bool:
    """Waiting and held rows. Whether none slipped away between the looking and the locking."""
    places = await cancelling.find_rows(connection, ids, work.dues)
    held = [number for (number,) in await connection.fetch("SELECT id FROM held WHERE id = ANY($1) ORDER BY id", ids)]
    moved: list[asyncpg.Record] = []
    if places is not None:
        await cancelling.lock_keys_of(connection, places)
        moved = await connection.fetch(statements.MOVE_ROWS, *places[:3], *work.when, *places.bounds, timeout=None)
    keyed = []
    for number, lane, due_ms, key in moved:
        work.found[number] = Found.WAITING
        _sooner(work.waiting, lane, due_ms)
        if key is not None:
            keyed.append((key, number, due_ms))
    again = await connection.fetch(_HELD, held, *work.when) if held else []
    for number, lane, retry_ms in again:
        work.found[number] = Found.HELD
        _sooner(work.held, lane, retry_ms)
    if keyed:
        await _point(connection, sorted(keyed))
    return len(moved) + len(again) == (0 if places is None else len(places.ids)) + len(held)


async def _point(connection: asyncpg.Connection, keyed: Sequence[tuple[bytes, int, int]]) -> None:
    """Keys that stand for moved messages say where these are now."""
    keys, ids, dues = map(list, zip(*keyed, strict=True))
    await connection.execute("SELECT FROM message_key WHERE key = ANY($1) ORDER BY key FOR UPDATE", keys)
    await connection.execute(
        "UPDATE message_key AS k SET due_at = now.due_at"
        " FROM unnest($1::bytea[], $2::bigint[], $3::timestamptz[]) AS now (key, id, due_at)"
        " WHERE k.key = now.key AND k.id = now.id",
        keys,
        ids,
        dues,
    )


async def _move_out_of_segments(connection: asyncpg.Connection, ids: Sequence[int], work: _Work) -> bool:
    """Messages in segments become rows. Whether every segment that was found to hold one was there when locked."""
    holding, unreadable = await cancelling.find(connection, ids, work.dues)
    for number in ids:
        doubtful = any(first <= number <= last for first, last in unreadable.values())
        work.found[number] = Found.UNREADABLE if doubtful else Found.NOWHERE
    locked = await connection.fetch(_LOCK_SEGMENTS, sorted(holding))
    for segment in locked:
        await _move_out(connection, segment, holding[segment["id"]], work)
    return len(locked) == len(holding)


async def _move_out(connection: asyncpg.Connection, segment: asyncpg.Record, ids: Sequence[int], work: _Work) -> None:
    import pyarrow.compute as pc  # noqa: PLC0415 - pyarrow, once there is something to read

    from delayer.store.packing import SegmentBroken  # noqa: PLC0415

    number, lane = segment["id"], segment["lane"]
    try:
        table = await unpacking.live(connection, segment)
    except SegmentBroken:
        work.found.update(dict.fromkeys(ids, Found.UNREADABLE))
        return
    table = table.filter(pc.is_in(table["id"], value_set=_ints(ids)))
    moved = table["id"].to_pylist()
    if not moved:
        return
    now_ms = await connection.fetchval("SELECT date_trunc('milliseconds', now())")
    new = _rescheduled(table, work.when, now_ms * 1000)
    await segments.write_rows(connection, new, lane)
    await connection.fetch(statements.ADD_CANCELLED, number, sorted(moved))
    if segment["cancelled"] + len(moved) == segment["messages"]:
        await segments.delete(connection, number)
    else:
        await connection.execute("UPDATE segment SET cancelled = cancelled + $2 WHERE id = $1", number, len(moved))
    work.changes[lane, "compacted"] -= len(moved)
    work.found.update(dict.fromkeys(moved, Found.SEGMENT))
    _sooner(work.waiting, lane, min(due_us for due_us in _micros(new)) // 1000)


def _ints(ids: Sequence[int]) -> Any:
    import pyarrow as pa  # noqa: PLC0415

    return pa.array(ids, pa.int64())


def _micros(table: Any) -> list[int]:
    micros: list[int] = table["due_at"].cast("int64").to_pylist()
    return micros


def _rescheduled(table: Any, when: When, now_us: int) -> Any:
    """The same messages with their new due instants, in the order of rows. Into the past is now: see move_rows.sql."""
    import pyarrow as pa  # noqa: PLC0415

    due = [
        max(old + when.by_ms * 1000 if when.at_ms is None else when.at_ms * 1000, min(old, now_us))
        for old in _micros(table)
    ]
    position = table.schema.get_field_index("due_at")
    field = table.schema.field("due_at")
    return table.set_column(position, field, pa.array(due, pa.int64()).cast(field.type)).sort_by(
        [("due_at", "ascending"), ("id", "ascending")]
    )


def _sooner(soonest: dict[int, int], lane: int, at_ms: int) -> None:
    soonest[lane] = min(at_ms, soonest.get(lane, at_ms))
