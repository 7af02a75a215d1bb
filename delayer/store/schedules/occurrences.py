"""Occurrences: the waiting messages of schedules, one of each, and the next one, written when the last one is over.

An occurrence waits under the key ``delayer.schedule/NAME``, so no two occurrences of a schedule can wait. Whichever
transaction takes it away (a release, a hold, a cancel, a reschedule) also writes the next one. So a schedule and its
occurrence agree after a crash at any point. The row of a schedule changes only with the message ``waiting_id``, or by
an operator, who first cancels that message (changes.py). Transactions without occurrences run no statement for this.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

from asyncpg import Connection

from delayer.core.errors import Rejected
from delayer.core.faultpoint import reach
from delayer.core.message import Due, Parcel, is_occurrence
from delayer.format.rows import COLUMNS_WITH_ID, reason_text, stored_row
from delayer.schedule.missed import LATE_MS, is_expired
from delayer.schedule.record import Fate, PlannedRecord, ScheduleRecord, name_of, step_on, stop
from delayer.schedule.schedule import ScheduleState
from delayer.store import pool
from delayer.store.errors import describe
from delayer.store.rows import keys
from delayer.store.rows.places import new_ids
from delayer.store.schedules import table

log = logging.getLogger(__name__)  # Not structlog: see partitions.py.

_CORRECT: Final = "correct the schedule, or what rejects it, and run `delayer schedule resume`; all others go on"
NEXT_STEP: Final = "correct what the error names, or report it with its traceback; the daemon tries again until then"


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


async def write_next(connection: Connection, over: Sequence[EndedOccurrence]) -> list[WaitingOccurrence]:
    """Write what follows these occurrences, each into the same lane; their messages and keys are deleted. Steps 4 and 5
    of keys.py. The caller counts the new ones as parked, and wakes their lanes. Raises Rejected if one cannot be
    computed or written, and the driver's other errors."""
    by_id: dict[int | None, EndedOccurrence] = {one.id: one for one in over}
    names = {name_of(one.key) for one in over}
    records, now_ms = await table.read_waiting(connection, names, [one.id for one in over], lock=True)
    planned = []
    async for record in pool.in_turns(connection, records):
        one = by_id[record.waiting_id]
        try:
            planned.append((step_on(record, one.fate, now_ms, one.sent_ms), one.lane))
        except Exception as wrong:
            # Not the fault of the schedule: no file can be opened, or a bug. The occurrence comes again.
            log.exception("schedule not computed", extra={"schedule": record.name, "next_step": NEXT_STEP})
            raise Rejected(f"schedule {record.name}: {describe(wrong)}") from wrong
    if not planned:
        return []
    records, written = await write(connection, planned, table.write_progress)
    log_failed(records)
    return written


def log_failed(records: Iterable[ScheduleRecord]) -> None:
    """Log those of these records that have just failed."""
    for record in records:
        if record.state is ScheduleState.FAILED:
            log.error("schedule failed", extra={"schedule": record.name, "reason": record.why, "next_step": _CORRECT})


Planned = tuple[PlannedRecord, int]
"""A planned record, and the lane of its next occurrence."""
Put = Callable[[Connection, Sequence[ScheduleRecord]], Awaitable[None]]


async def write(
    connection: Connection, planned: Sequence[Planned], put: Put
) -> tuple[list[ScheduleRecord], list[WaitingOccurrence]]:
    """Write the next occurrences, and their schedules by ``put``. If the database rejects one of these, only its own
    schedule fails. Returns the schedules as written. Raises Rejected if even that is rejected, and the driver's other
    errors."""
    try:
        found = await pool.in_savepoint(connection, partial(_write, connection, planned, put))
    except Rejected as rejected:
        if len(planned) > 1:
            middle = len(planned) // 2
            halves = [await write(connection, half, put) for half in (planned[:middle], planned[middle:])]
            return [one for records, _ in halves for one in records], [one for _, new in halves for one in new]
        [(one, _)] = planned
        why = reason_text(f"the database rejects its next occurrence: {rejected}")
        failed = stop(one.record, ScheduleState.FAILED, why)
        await pool.in_savepoint(connection, partial(put, connection, [failed]))
        return [failed], []
    reach("schedule.copied")
    return found


async def _write(
    connection: Connection, planned: Sequence[Planned], put: Put
) -> tuple[list[ScheduleRecord], list[WaitingOccurrence]]:
    parcels = [(one.parcel, lane) for one, lane in planned if one.parcel is not None]
    ids = await new_ids(connection, len(parcels))
    await copy(connection, parcels, ids)
    written = [WaitingOccurrence(lane, parcel.due_ms, new) for (parcel, lane), new in zip(parcels, ids, strict=True)]
    pointers = [(p.key, *one) for (p, _), one in zip(parcels, written, strict=True) if p.key is not None]
    await keys.point(connection, (), pointers)
    numbers = iter(ids)
    records = [
        one.record if one.parcel is None else one.record._replace(waiting_id=next(numbers)) for one, _ in planned
    ]
    await put(connection, records)
    return records, written


async def copy(connection: Connection, parcels: Sequence[tuple[Parcel, int]], ids: Sequence[int]) -> None:
    """Write messages, each into its lane. Raises the driver's errors."""
    rows = [(*stored_row(parcel, lane), new) for (parcel, lane), new in zip(parcels, ids, strict=True)]
    if rows:
        await connection.copy_records_to_table("message", records=rows, columns=COLUMNS_WITH_ID)


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
