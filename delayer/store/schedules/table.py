"""The table of schedules: its rows, read and written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final
from uuid import UUID

from asyncpg import Connection, Record

from delayer.core.message import Target
from delayer.schedule.record import ScheduleRecord
from delayer.schedule.rhythm import Cron, Every, Rhythm
from delayer.schedule.schedule import Schedule, ScheduleState, is_name

_RHYTHM: Final = "cron, zone, period_ms, first_at, last_at, catch_up, jitter_ms, max"
_DEFINITION: Final = f"name, id, {_RHYTHM}, to_exchange, to_key, properties, body"
_PROGRESS: Final = "state, why, made, missed, settled_at, waiting_at, waiting_id, made_at, late_ms"
COLUMNS: Final = f"{_DEFINITION}, {_PROGRESS}, added_at, changed_at"
"""The columns for :func:`record_of`."""
_READ: Final = f"SELECT {COLUMNS} FROM schedule WHERE name = ANY($1) ORDER BY name"
_WAITING: Final = (
    f"SELECT {COLUMNS}, statement_timestamp() AS now FROM schedule WHERE name = ANY($1) AND waiting_id = ANY($2)"
    " ORDER BY name"
)
_STEP: Final = f"""
UPDATE schedule AS s SET ({_PROGRESS}) =
    ROW(n.state, n.why, n.made, n.missed, n.settled_at, n.waiting_at, n.waiting_id, n.made_at, n.late_ms)
FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::timestamptz[], $7::timestamptz[],
            $8::bigint[], $9::timestamptz[], $10::bigint[]) AS n (name, {_PROGRESS})
WHERE s.name = n.name
"""
_COLUMNS: Final = f"{_DEFINITION}, {_PROGRESS}".split(", ")
_PUT: Final = (
    f"INSERT INTO schedule ({', '.join(_COLUMNS)})"
    f" VALUES ({', '.join(f'${number}' for number in range(1, len(_COLUMNS) + 1))})"
    f" ON CONFLICT (name) DO UPDATE SET changed_at = now(),"
    f" {', '.join(f'{column} = excluded.{column}' for column in _COLUMNS[1:])}"
)


def record_of(row: Record) -> ScheduleRecord:
    """Parse a row that begins with COLUMNS."""
    (name, id_, cron, zone, period_ms, first_ms, last_ms, catch_up, jitter_ms, most, exchange, key, properties, body,
     state, why, made, missed, settled_ms, waiting_ms, waiting_id, made_ms, late_ms, added_ms, changed_ms, *_,
    ) = row  # fmt: skip
    rhythm: Rhythm = Every(period_ms, first_ms) if cron is None else Cron(cron, zone, first_ms)
    schedule = Schedule(
        UUID(int=id_.int), name, Target(exchange, key), rhythm, properties, body, last_ms, catch_up, jitter_ms, most
    )  # fmt: skip
    return ScheduleRecord(
        schedule,
        ScheduleState(state),
        why,
        made,
        missed,
        settled_ms,
        waiting_ms,
        waiting_id,
        made_ms,
        late_ms,
        added_ms,
        changed_ms,
    )


async def read(connection: Connection, names: Collection[str], *, lock: bool = False) -> dict[str, ScheduleRecord]:
    """The schedules of these names, locked until the transaction ends if ``lock``. Raises the driver's errors."""
    possible = list(filter(is_name, names))  # The database would reject a NUL, or what is not UTF-8.
    rows = await connection.fetch(f"{_READ}{' FOR UPDATE' if lock else ''}", possible)
    return {record.name: record for record in map(record_of, rows)}


async def find_ids(connection: Connection, ids: Collection[UUID]) -> set[UUID]:
    """Those of these ids that a schedule has. Raises the driver's errors."""
    rows = await connection.fetch("SELECT id FROM schedule WHERE id = ANY($1)", list(ids))
    return {UUID(int=id_.int) for (id_,) in rows}


async def read_waiting(
    connection: Connection, names: Collection[str], ids: Collection[int], *, lock: bool = False
) -> tuple[list[ScheduleRecord], int]:
    """The schedules among ``names`` whose waiting occurrence is one of ``ids``, locked until the transaction ends if
    ``lock``; and the store's time, unless there are none. Raises the driver's errors."""
    rows = await connection.fetch(f"{_WAITING}{' FOR UPDATE' if lock else ''}", list(names), list(ids))
    return [record_of(row) for row in rows], rows[0]["now"] if rows else 0


async def write_progress(connection: Connection, records: Iterable[ScheduleRecord]) -> None:
    """Write how far these schedules have come; their rows are locked. Raises the driver's errors."""
    if values := [(record.name, *_progress(record)) for record in records]:
        await connection.execute(_STEP, *map(list, zip(*values, strict=True)))


async def put(connection: Connection, records: Sequence[ScheduleRecord]) -> None:
    """Insert these schedules, or overwrite those of their names. Raises the driver's errors."""
    await connection.executemany(_PUT, [(*_definition(one.schedule), *_progress(one)) for one in records])


async def delete(connection: Connection, names: Collection[str]) -> None:
    """Delete the schedules of these names; their rows are locked. Raises the driver's errors."""
    if names:
        await connection.execute("DELETE FROM schedule WHERE name = ANY($1)", list(names))


def _definition(schedule: Schedule) -> tuple[Any, ...]:
    rhythm = schedule.rhythm
    times = (None, None, rhythm.period_ms) if isinstance(rhythm, Every) else (rhythm.expression, rhythm.zone, None)
    return (
        schedule.name, schedule.id, *times, rhythm.first_ms, schedule.last_ms, schedule.catch_up, schedule.jitter_ms,
        schedule.max_occurrences, *schedule.target, schedule.properties, schedule.body,
    )  # fmt: skip


def _progress(record: ScheduleRecord) -> tuple[Any, ...]:
    return (
        record.state, record.why, record.made, record.missed, record.settled_ms, record.waiting_ms,
        record.waiting_id, record.made_ms, record.late_ms,
    )  # fmt: skip
