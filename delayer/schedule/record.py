"""A schedule as the store has it: what it is, and how far it has come. Pure.

A record changes in two ways: its waiting occurrence is over, or an operator changes it. Both end with the search for
the next occurrence. A schedule whose rhythm has none, because its expression or its zone cannot be read, has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

from delayer.core.message import OCCURRENCE, Parcel
from delayer.schedule.cron import BadCron
from delayer.schedule.missed import Following, find_anew, find_first, find_next
from delayer.schedule.occurrence import due_ms, occurrence
from delayer.schedule.schedule import Schedule, ScheduleState, next_time
from delayer.schedule.wall import UnknownZone


class Fate(Enum):
    """What became of an occurrence."""

    SENT = "sent"
    """It was published or held, or an operator rescheduled it, so that it is an ordinary message from now on."""
    MISSED = "missed"
    """It expired."""
    CANCELLED = "cancelled"


class ScheduleRecord(NamedTuple):
    """``why``: the reason of the states ended and failed. ``made`` and ``missed``: how many occurrences were sent, and
    never were. ``settled_ms`` and ``waiting_ms``: the rhythm's times of the last occurrence that is over, and of the
    one that waits. ``waiting_id``: the message that waits. ``made_ms``: when the last one was sent, ``late_ms`` after
    it could be. ``added_ms`` and ``changed_ms``: when an operator added the schedule, and last changed it."""

    schedule: Schedule
    state: ScheduleState = ScheduleState.ACTIVE
    why: str = ""
    made: int = 0
    missed: int = 0
    settled_ms: int | None = None
    waiting_ms: int | None = None
    waiting_id: int | None = None
    made_ms: int | None = None
    late_ms: int | None = None
    added_ms: int = 0
    changed_ms: int = 0

    @property
    def name(self) -> str:
        return self.schedule.name

    @property
    def due_ms(self) -> int | None:
        """When the waiting occurrence is due, with its jitter; None if none waits."""
        return None if self.waiting_ms is None else due_ms(self.schedule, self.waiting_ms)


class PlannedRecord(NamedTuple):
    """A record to write, and its next occurrence; None if no occurrence is to wait."""

    record: ScheduleRecord
    parcel: Parcel | None


def key_of(name: str) -> bytes:
    """The key of the waiting occurrence of the schedule of this name."""
    return OCCURRENCE + name.encode("utf-8", "surrogateescape")


def name_of(key: bytes) -> str:
    """The name of the schedule whose occurrence waits under this key."""
    return key.removeprefix(OCCURRENCE).decode("utf-8", "replace")


def next_times(record: ScheduleRecord, now_ms: int, most: int) -> list[int]:
    """Find the next times of the rhythm, beginning with the waiting occurrence. For a paused schedule, find the times
    after a resume now. Raises BadCron and UnknownZone."""
    schedule, left = record.schedule, record.schedule.max_occurrences
    if record.state is ScheduleState.ENDED:
        return []
    at_ms = record.waiting_ms
    if at_ms is None:
        at_ms = next_time(schedule, max(now_ms, record.settled_ms or 0))
    found: list[int] = []
    while at_ms is not None and len(found) < (most if left is None else min(most, left - record.made)):
        found.append(at_ms)
        at_ms = next_time(schedule, at_ms)
    return found


def step_on(record: ScheduleRecord, fate: Fate, now_ms: int, sent_ms: int | None = None) -> PlannedRecord:
    """The record once its waiting occurrence is over. ``sent_ms``: when it was sent, if known."""
    at_ms = record.waiting_ms
    assert at_ms is not None, record.name
    over = record._replace(
        made=record.made + (fate is Fate.SENT), missed=record.missed + (fate is Fate.MISSED), settled_ms=at_ms
    )
    if sent_ms is not None:
        over = over._replace(made_ms=sent_ms, late_ms=sent_ms - _sendable_ms(record, at_ms))
    return plan(over, lambda: find_next(over.schedule, at_ms, now_ms, over.made))


def _sendable_ms(record: ScheduleRecord, at_ms: int) -> int:
    """When the occurrence of the rhythm's time ``at_ms`` can be sent: once it is due, and the one before can be. With
    the jitter of a cron expression the one before may be due later."""
    due = due_ms(record.schedule, at_ms)
    if record.made_ms is None or record.late_ms is None:
        return due
    return max(due, record.made_ms - record.late_ms)


def begin(record: ScheduleRecord, now_ms: int) -> PlannedRecord:
    """The record of a schedule that is added or resumed. An occurrence that is over does not come again."""
    return plan(record, lambda: find_first(record.schedule, max(now_ms, record.settled_ms or 0), record.made))


def revise(record: ScheduleRecord, schedule: Schedule, now_ms: int) -> PlannedRecord:
    """The record after an edit to ``schedule``, or, if it is equal, after a change of the zone data. A paused schedule
    stays paused; one that ended or failed may become active again."""
    settled_ms = _settled_by(schedule, record, now_ms)
    edited = record._replace(schedule=schedule, settled_ms=settled_ms)
    if record.state is ScheduleState.PAUSED:
        return PlannedRecord(edited, None)
    waiting_ms = now_ms + 1 if record.waiting_ms is None else record.waiting_ms
    after_ms = max(now_ms, settled_ms or 0)
    return plan(
        edited, lambda: find_anew(schedule, waiting_ms=waiting_ms, after_ms=after_ms, now_ms=now_ms, made=record.made)
    )


def _settled_by(schedule: Schedule, record: ScheduleRecord, now_ms: int) -> int | None:
    """The time of the last settled occurrence by the rhythm of ``schedule``. Occurrences that were cancelled or moved
    before they were due are settled. A new rhythm is not silent until the last of them, though: of its times from now
    on, only the first ones that are settled times of the old rhythm are over. None if its next time is not."""
    settled_ms, old = record.settled_ms, record.schedule
    if settled_ms is None or schedule.rhythm == old.rhythm:
        return settled_ms
    found = None
    with suppress(BadCron, UnknownZone):
        at_ms = next_time(schedule, now_ms)
        while at_ms is not None and at_ms <= settled_ms and next_time(old, at_ms - 1) == at_ms:
            found = at_ms
            at_ms = next_time(schedule, at_ms)
    return found


def stop(record: ScheduleRecord, state: ScheduleState, why: str = "") -> ScheduleRecord:
    """The record without a waiting occurrence, in this state."""
    return record._replace(state=state, why=why, waiting_ms=None, waiting_id=None)


def plan(record: ScheduleRecord, find: Callable[[], Following]) -> PlannedRecord:
    """The record with the occurrence that ``find`` finds. Raises OSError if zone data that are there cannot be read."""
    try:
        found = find()
    except (BadCron, UnknownZone) as wrong:
        return PlannedRecord(stop(record, ScheduleState.FAILED, str(wrong)), None)
    record = record._replace(missed=record.missed + found.missed)
    if found.at_ms is None:
        return PlannedRecord(stop(record, ScheduleState.ENDED, found.why), None)
    parcel = occurrence(record.schedule, found.at_ms)
    active = record._replace(state=ScheduleState.ACTIVE, why="", waiting_ms=found.at_ms)
    return PlannedRecord(active, parcel._replace(key=key_of(record.name)))
