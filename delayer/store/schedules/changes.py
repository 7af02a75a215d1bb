"""Changes of schedules by operators. Each is one transaction, with its entry in the audit log.

A change first cancels the waiting occurrences of its schedules, as a cancel by key does, and locks in the order of
keys.py. So it waits for a release under way, and no other transaction changes these schedules until it commits. Then it
writes the schedules with their next occurrences. The old occurrences count as cancelled.

Every function raises ScheduleRefused if it cannot do what was asked, StoreLost, and the driver's errors; then nothing
is changed. ``who`` is for the audit log. Instants come from the store's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, Final, NamedTuple
from zlib import crc32

from asyncpg import Connection

from delayer.core.errors import StoreLost
from delayer.core.faultpoint import reach
from delayer.core.units import DAY_MS
from delayer.schedule import zone_data
from delayer.schedule.missed import Following
from delayer.schedule.occurrence import extra_message
from delayer.schedule.record import PlannedRecord, ScheduleRecord, begin, key_of, plan, revise, stop
from delayer.schedule.rhythm import Cron
from delayer.schedule.schedule import Schedule, ScheduleState, problems
from delayer.store import held_messages, pool
from delayer.store.admin import audit_log
from delayer.store.errors import ScheduleRefused, ScheduleUnknown
from delayer.store.lanes.notify import notify, soonest
from delayer.store.rows import history, keys
from delayer.store.rows.counters import Changes, add_counts
from delayer.store.rows.partitions import PARK_SECONDS, make_missing
from delayer.store.rows.places import new_ids
from delayer.store.schedules import occurrences, reading, table

_LANES: Final = "SELECT number FROM lane WHERE route IS NULL ORDER BY number"
_NOW: Final = "SELECT statement_timestamp()"
_LOWER_ZONE_VERSION: Final = """
UPDATE store SET zone_version = least(split_part(zone_version, $2, 1) COLLATE "C", $1)
WHERE split_part(zone_version, $2, -1) COLLATE "C" > $1
"""


class LogEntry(NamedTuple):
    """An entry for the audit log: who did what, and the request."""

    who: str
    verb: str
    asked: Mapping[str, Any]


Revision = Callable[[ScheduleRecord | None, int], PlannedRecord | None]
"""Returns the new record of a schedule, or None to delete it. Its arguments are the old record (None if the schedule
does not exist) and the time, in epoch ms. It is pure, because it is called more than once: to find the days that need a
partition, and in each attempt of the transaction. Raises ScheduleRefused."""


async def add(connection: Connection, schedule: Schedule, *, paused: bool = False, who: str) -> ScheduleRecord:
    """Add a schedule, active or paused. Refuses a name that is taken."""

    def added(there: ScheduleRecord | None, now_ms: int) -> PlannedRecord:
        if there is not None:
            raise ScheduleRefused([f"name: expected a new one, found the schedule {schedule.name}; edit it instead"])
        return _plan_new(schedule, now_ms, paused=paused)

    [record] = await _change(connection, {schedule.name: added}, _entry(who, "add", schedule.name))
    return record


async def edit(
    connection: Connection, name: str, change: Callable[[Schedule], Schedule], *, who: str
) -> ScheduleRecord:
    """Replace a schedule by the result of ``change``, a pure function; name, id and state stay. The waiting occurrence
    is rewritten: for the same time if that has come, otherwise for the next time of the new rhythm."""

    def edited(there: ScheduleRecord | None, now_ms: int) -> PlannedRecord:
        there = _require(there, name)
        return _plan_edit(there, change(there.schedule), now_ms)

    [record] = await _change(connection, {name: edited}, _entry(who, "edit", name))
    return record


async def pause(connection: Connection, name: str, *, who: str) -> ScheduleRecord:
    """Cancel the waiting occurrence until :func:`resume`. A paused schedule misses nothing, and stays as it is."""

    def paused(there: ScheduleRecord | None, _now_ms: int) -> PlannedRecord:
        there = _require(there, name)
        if there.state is ScheduleState.ENDED:
            raise _without_next(there)
        return PlannedRecord(stop(there, ScheduleState.PAUSED), None)

    already = {ScheduleState.PAUSED}
    [record] = await _change(connection, {name: paused}, _entry(who, "pause", name), unless=already)
    return record


async def resume(connection: Connection, name: str, *, who: str) -> ScheduleRecord:
    """Let a paused or failed schedule go on with the first time of its rhythm after now. An active one stays as it
    is."""

    def resumed(there: ScheduleRecord | None, now_ms: int) -> PlannedRecord:
        there = _require(there, name)
        if there.state is ScheduleState.ACTIVE:
            return PlannedRecord(there, None)  # Not written: ``unless`` ends the transaction first.
        planned = begin(there, now_ms)
        if planned.record.state is ScheduleState.ENDED:
            raise _without_next(planned.record)
        return planned

    active = {ScheduleState.ACTIVE}
    [record] = await _change(connection, {name: resumed}, _entry(who, "resume", name), unless=active)
    return record


async def remove(connection: Connection, name: str, *, who: str) -> int:
    """Delete a schedule with its waiting occurrence. Occurrences that are held, or that an operator rescheduled, stay.
    Returns how many of its messages are held."""

    def removed(there: ScheduleRecord | None, _now_ms: int) -> None:
        _require(there, name)

    held = await held_messages.count_by_schedule(connection)
    await _change(connection, {name: removed}, _entry(who, "remove", name))
    return held.get(name, 0)


async def run_now(connection: Connection, name: str, *, who: str) -> int:
    """Park one more message of a schedule, due now, in any state. It does not count as an occurrence, and the waiting
    one stays. Returns the message's id."""

    async def run() -> int:
        async with pool.transaction(connection):
            there = _require((await table.read(connection, [name])).get(name), name)
            now_ms: int = await connection.fetchval(_NOW)
            [id_] = await new_ids(connection, 1)
            parcel = extra_message(there.schedule, id_, now_ms)
            [lane] = await _lanes(connection, [name])
            log_id = await audit_log.begin(connection, *_entry(who, "run", name))
            await audit_log.add(connection, log_id, 1)
            await occurrences.copy(connection, [(parcel, lane)], [id_])
            await notify(connection, {lane: now_ms}, {})
            await add_counts(connection, Counter({(lane, "parked"): 1}))
        return id_

    return await pool.retry_conflicts(run)


class ScheduleDifference(NamedTuple):
    """What a set of schedules changes in the store, by name. ``changed``: before and after. ``same``: the rest of the
    set. ``removed`` is empty without ``prune``."""

    added: list[Schedule]
    changed: list[tuple[Schedule, Schedule]]
    removed: list[Schedule]
    same: list[ScheduleRecord]


async def apply(
    connection: Connection,
    wanted: Sequence[Schedule],
    *,
    who: str,
    prune: bool = False,
    only_new: bool = False,
    dry_run: bool = False,
) -> ScheduleDifference:
    """Add and edit schedules in one transaction, so that the store has all of ``wanted``. Ids and states in the store
    stay, so a paused schedule stays paused. ``prune``: remove all other schedules. ``only_new``: refuse to edit one.
    ``dry_run``: change nothing. Returns the difference before the change."""
    there = await table.read(connection, [one.name for one in wanted])
    if prune:
        there = {record.name: record async for page in reading.pages(connection) for record in page}
    names = Counter(one.name for one in wanted)
    if twice := [f"name: expected {name} once, found it {n} times" for name, n in names.items() if n > 1]:
        raise ScheduleRefused(twice)
    now_ms = await connection.fetchval(_NOW)
    found = ScheduleDifference([], [], [record.schedule for name, record in there.items() if name not in names], [])
    for one in wanted:
        if (record := there.get(one.name)) is None:
            found.added.append(one)
        elif (after := _as_edit_of(record.schedule, one)) != record.schedule:
            found.changed.append((record.schedule, after))
        else:
            found.same.append(record)
    wrong = [what for before, after in found.changed if only_new for what in _differs(before, after)]
    wrong += [
        f"{one.name}: {what}"
        for one in (*found.added, *(after for _, after in found.changed))
        for what in problems(one, now_ms)
    ]
    if wrong:
        raise ScheduleRefused(wrong)
    if not dry_run:
        await _carry_out(connection, found, who, only_new=only_new)
    return found


async def _carry_out(connection: Connection, difference: ScheduleDifference, who: str, *, only_new: bool) -> None:
    def to(schedule: Schedule) -> Revision:
        def revision(there: ScheduleRecord | None, now_ms: int) -> PlannedRecord:
            if there is None:
                return _plan_new(schedule, now_ms)
            if only_new and (wrong := _differs(there.schedule, schedule)):
                raise ScheduleRefused(wrong)
            return _plan_edit(there, schedule, now_ms)

        return revision

    revisions: dict[str, Revision] = {one.name: to(one) for one in difference.added}
    revisions |= {after.name: to(after) for _, after in difference.changed}
    revisions |= {one.name: lambda _there, _now_ms: None for one in difference.removed}
    asked = {
        "added": [one.name for one in difference.added],
        "changed": [one.name for _, one in difference.changed],
        "removed": [one.name for one in difference.removed],
    }
    if revisions:
        await _change(connection, revisions, LogEntry(who, "schedule apply", asked))


async def renew(connection: Connection, names: Collection[str]) -> None:
    """Find the next occurrences of these schedules again, because the zone data has changed. No operator did it, so the
    audit log has no entry."""

    def renewed(there: ScheduleRecord | None, now_ms: int) -> PlannedRecord | None:
        return None if there is None else revise(there, there.schedule, now_ms)

    await _change(connection, dict.fromkeys(names, renewed), None)


async def lower_zone_version(connection: Connection, version: str) -> None:
    """Record that a waiting occurrence may have been computed by this version of the zone data, if it is the oldest. A
    daemon with newer data then computes all of them again (zones.py). Raises the driver's errors."""
    if version != zone_data.UNKNOWN:
        await connection.execute(_LOWER_ZONE_VERSION, version, reading.RENEWING)


async def insert_imported(connection: Connection, records: Sequence[ScheduleRecord]) -> Changes:
    """Insert schedules of another store, in the open transaction of an import, which has locked their keys. None of
    their names is taken. Each continues with the occurrence that waited there. Returns what to count. Raises Rejected,
    the driver's errors."""
    if not records:
        return Counter()
    lanes = await _lanes(connection, [record.name for record in records])
    planned = [
        (
            PlannedRecord(record, None)
            if record.waiting_ms is None
            else plan(record, partial(Following, record.waiting_ms))
        )
        for record in records
    ]
    _, written = await occurrences.write(connection, list(zip(planned, lanes, strict=True)), table.put)
    if any(isinstance(rhythm := one.schedule.rhythm, Cron) and rhythm.zone != "UTC" for one in records):
        await lower_zone_version(connection, "")  # By any zone data: a daemon computes them again.
    await notify(connection, soonest((one.lane, one.due_ms) for one in written), {})
    return Counter((one.lane, "parked") for one in written)


async def _change(
    connection: Connection,
    revisions: Mapping[str, Revision],
    entry: LogEntry | None,
    *,
    unless: Collection[ScheduleState] = (),
) -> list[ScheduleRecord]:
    """Carry out these revisions, by name, in one transaction, and return the new records. ``entry``: for the audit log;
    without it, write only the progress of the schedules. ``unless``: if all are in one of these states, change nothing.
    """
    now_ms = await connection.fetchval(_NOW)
    there = await table.read(connection, revisions)
    # A first call, to find the days that need a partition. The transaction calls the revisions again.
    planned = [revision(there.get(name), now_ms) for name, revision in revisions.items()]
    days = {one.parcel.due_ms // DAY_MS for one in planned if one is not None and one.parcel is not None}
    await make_missing(connection, days, PARK_SECONDS)
    written = await pool.retry_conflicts(partial(_transact, connection, revisions, entry, unless))
    reach("schedule.committed")
    return written


async def _transact(
    connection: Connection, revisions: Mapping[str, Revision], entry: LogEntry | None, unless: Collection[ScheduleState]
) -> list[ScheduleRecord]:
    async with pool.transaction(connection):
        names = sorted(revisions)
        used = [key_of(name) for name in names]
        await keys.lock_keys(connection, used)
        if unless:
            there = await table.read(connection, names)
            if there and all(record.state in unless for record in there.values()):
                return list(there.values())
        cancelled = await keys.cancel_waiting(connection, used)
        await keys.point(connection, used, ())
        there = await table.read(connection, names, lock=True)
        now_ms: int = await connection.fetchval(_NOW)
        lanes = zip(names, await _lanes(connection, names), strict=True)
        planned = [
            (one, lane)
            async for name, lane in pool.in_turns(connection, lanes)
            if (one := revisions[name](there.get(name), now_ms)) is not None
        ]
        put = table.write_progress if entry is None else table.put
        records, written = await occurrences.write(connection, planned, put)
        if entry is None:
            occurrences.log_failed(records)
        else:
            _check_written(records, is_one="schedule" in entry.asked)
            await table.delete(connection, there.keys() - {record.name for record in records})
            asked = {**entry.asked, **_changed_fields(there, records)}
            log_id = await audit_log.begin(connection, entry.who, entry.verb, asked)
            await audit_log.add(connection, log_id, len(cancelled.rows))
            await lower_zone_version(connection, zone_data.installed_version())
        if await history.is_kept(connection):
            await history.write(connection, [history.of_row(row, now_ms) for row in cancelled.rows])
        await notify(connection, soonest((one.lane, one.due_ms) for one in written), {})
        changes = cancelled.changes
        changes.update((one.lane, "parked") for one in written)
        await add_counts(connection, changes)
        return list((await table.read(connection, names)).values())


def _check_written(records: Sequence[ScheduleRecord], *, is_one: bool) -> None:
    """Raise ScheduleRefused if a schedule has failed just now. ``is_one``: whether the change is of one schedule, so
    that its name is known."""
    wanted = "state: expected a schedule with a next occurrence"
    failed = [
        f"{'' if is_one else f'{one.name}: '}{wanted}, found none: {one.why}; correct the schedule, or what rejects it"
        for one in records
        if one.state is ScheduleState.FAILED
    ]
    if failed:
        raise ScheduleRefused(failed)


def _changed_fields(there: Mapping[str, ScheduleRecord], records: Sequence[ScheduleRecord]) -> dict[str, list[str]]:
    """The fields in which these schedules differ from before, and "state" if that does, for the audit log."""
    pairs = [(there[one.name], one) for one in records if one.name in there]
    names = [one.name for one in fields(Schedule)]
    found = [name for name in names if any(getattr(a.schedule, name) != getattr(b.schedule, name) for a, b in pairs)]
    found += ["state"] if any(a.state is not b.state for a, b in pairs) else []
    return {"fields": found} if found else {}


async def _lanes(connection: Connection, names: Sequence[str]) -> list[int]:
    """The lanes for the occurrences of these schedules, spread evenly."""
    lanes = [number for (number,) in await connection.fetch(_LANES)]
    if not lanes:
        raise StoreLost("the store has no lanes", "run `delayer db upgrade`")
    return [lanes[crc32(name.encode()) % len(lanes)] for name in names]


def _plan_new(schedule: Schedule, now_ms: int, *, paused: bool = False) -> PlannedRecord:
    _check(schedule, now_ms)
    record = ScheduleRecord(schedule)
    return PlannedRecord(stop(record, ScheduleState.PAUSED), None) if paused else begin(record, now_ms)


def _plan_edit(there: ScheduleRecord, schedule: Schedule, now_ms: int) -> PlannedRecord:
    after = _as_edit_of(there.schedule, schedule)
    _check(after, now_ms)
    return revise(there, after, now_ms)


def _as_edit_of(there: Schedule, schedule: Schedule) -> Schedule:
    """``schedule`` with what an edit does not change."""
    return replace(schedule, id=there.id, name=there.name)


def _differs(there: Schedule, wanted: Schedule) -> list[str]:
    if _as_edit_of(there, wanted) == there:
        return []
    return [f"name: expected a new one, found the schedule {there.name}, which is another one; use --prefix"]


def _check(schedule: Schedule, now_ms: int) -> None:
    if wrong := problems(schedule, now_ms):
        raise ScheduleRefused(wrong)


def _require(there: ScheduleRecord | None, name: str) -> ScheduleRecord:
    if there is None:
        raise ScheduleUnknown(name)
    return there


def _without_next(record: ScheduleRecord) -> ScheduleRefused:
    found = f"{record.name}, which ended: {record.why}; edit its last time or its maximum"
    return ScheduleRefused([f"state: expected a schedule with a next time, found {found}"])


def _entry(who: str, verb: str, name: str) -> LogEntry:
    return LogEntry(who, f"schedule {verb}", {"schedule": name})
