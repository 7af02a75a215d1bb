"""Occurrences: the waiting messages of schedules, one of each, and the next one, written when the last one is over.

An occurrence waits under the key ``delayer.schedule/NAME``, so no two occurrences of a schedule can wait. Whichever
transaction takes it away (a release, a hold, a cancel, a reschedule) also writes the next one. So a schedule and its
occurrence agree after a crash at any point. The row of a schedule changes only with the message ``waiting_id``, or by
an operator, who first cancels that message (changes.py). Transactions without occurrences run no statement for this.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from asyncpg import Connection

from delayer.core.faultpoint import reach
from delayer.core.message import Due, Parcel, is_occurrence
from delayer.format.rows import COLUMNS_WITH_ID, reason_text, stored_row
from delayer.schedule.missed import LATE_MS, is_expired
from delayer.schedule.record import Fate, PlannedRecord, name_of, step_on, stop
from delayer.schedule.schedule import ScheduleState
from delayer.store.errors import REJECTED, describe
from delayer.store.rows import keys
from delayer.store.rows.places import new_ids
from delayer.store.schedules import table

log = logging.getLogger(__name__)  # Not structlog: see partitions.py.

_CORRECT: Final = "correct the schedule (`delayer schedule edit`), and it goes on; all others do"
AT_ONCE: Final = 32
"""How many next occurrences are computed, at some 100 us each, before the event loop turns to due messages."""


class EndedOccurrence(NamedTuple):
    """An occurrence that waited until this transaction. ``sent_ms``: when it was sent, if known."""

    key: bytes
    id: int
    lane: int
    fate: Fate
    sent_ms: int | None = None


class WaitingOccurrence(NamedTuple):
    """An occurrence that waits from now on."""

    lane: int
    due_ms: int
    id: int


async def follow(connection: Connection, over: Sequence[EndedOccurrence]) -> list[WaitingOccurrence]:
    """Write what follows these occurrences, each into the same lane; their messages and keys are deleted. Steps 4 and 5
    of keys.py. The caller counts the new ones as parked, and wakes their lanes. Raises the driver's errors."""
    by_name = {name_of(one.key): one for one in over}
    ids = [one.id for one in over]
    records, now_ms = await table.read_waiting(connection, by_name, ids, lock=True)
    planned = []
    for number, record in enumerate(records):
        if number % AT_ONCE == 0:
            # Also keeps the server from ending the transaction as idle, while hundreds of schedules are computed.
            await connection.fetchval("SELECT 1")
        one = by_name[record.name]
        if one.id == record.waiting_id:
            planned.append((step_on(record, one.fate, now_ms, one.sent_ms), one.lane))
    if not planned:
        return []
    placed, written = await write(connection, planned)
    await table.write_progress(connection, [one.record for one, _ in placed])
    for (record, _), _ in placed:
        if record.schedule.state is ScheduleState.FAILED:
            log.error("schedule failed", extra={"schedule": record.name, "reason": record.why, "next_step": _CORRECT})
    return written


Placed = tuple[PlannedRecord, int]
"""A planned record, and the lane of its next occurrence."""


async def write(connection: Connection, planned: Sequence[Placed]) -> tuple[list[Placed], list[WaitingOccurrence]]:
    """Write the next occurrences. Returns the records with their ids. If the database rejects an occurrence, only
    its own schedule fails. Raises the driver's other errors."""
    await connection.execute("SAVEPOINT occurrences")
    try:
        found = await _write(connection, planned)
    except REJECTED as error:
        await connection.execute("ROLLBACK TO occurrences; RELEASE occurrences")
        if len(planned) == 1:
            [(one, lane)] = planned
            why = reason_text(f"the database rejects its next occurrence: {describe(error)}")
            return [(PlannedRecord(stop(one.record, ScheduleState.FAILED, why), None), lane)], []
        alone = [await write(connection, [one]) for one in planned]
        return [one for records, _ in alone for one in records], [one for _, written in alone for one in written]
    await connection.execute("RELEASE occurrences")
    reach("schedule.copied")
    return found


async def _write(connection: Connection, planned: Sequence[Placed]) -> tuple[list[Placed], list[WaitingOccurrence]]:
    parcels = [(one.parcel, lane) for one, lane in planned if one.parcel is not None]
    ids = await copy(connection, parcels)
    written = [WaitingOccurrence(lane, parcel.due_ms, new) for (parcel, lane), new in zip(parcels, ids, strict=True)]
    pointers = [(p.key, *one) for (p, _), one in zip(parcels, written, strict=True) if p.key is not None]
    await keys.point(connection, (), pointers)
    numbers = iter(ids)
    placed = [
        (one if one.parcel is None else one._replace(record=one.record._replace(waiting_id=next(numbers))), lane)
        for one, lane in planned
    ]
    return placed, written


async def copy(connection: Connection, parcels: Sequence[tuple[Parcel, int]]) -> list[int]:
    """Write messages, each into its lane, and return their ids. Raises the driver's errors."""
    ids = await new_ids(connection, len(parcels))
    rows = [(*stored_row(parcel, lane), new) for (parcel, lane), new in zip(parcels, ids, strict=True)]
    if rows:
        await connection.copy_records_to_table("message", records=rows, columns=COLUMNS_WITH_ID)
    return ids


async def find_expired(connection: Connection, rows: Iterable[Due], now_ms: int) -> set[int]:
    """Return the ids of the claimed rows that are late occurrences and not to be sent (is_expired). LATE_MS only spares
    the query for those that are not late. ``now_ms``: lower bound of the store's clock. Raises the driver's errors."""
    late = {
        due.id: name_of(due.parcel.key)
        for due in rows
        if now_ms - due.due_ms > LATE_MS and due.parcel.key is not None and is_occurrence(due.parcel.key)
    }
    if not late:
        return set()
    records, _ = await table.read_waiting(connection, set(late.values()), late)
    return {
        record.waiting_id
        for record in records
        if record.waiting_id is not None
        and record.waiting_ms is not None
        and is_expired(record.schedule, record.waiting_ms, now_ms)
    }
