"""Imports in the store: the state of a run, the records of its file, and batches committed with both.

Each batch goes to the next lane, and messages of limited routes to their lanes. The owners are notified, so they
release messages due soon on time, even during the import. Without a daemon the messages wait. A message that waits
under a key stays, because an imported message with that key is no newer. The imported message is not parked but counted
as superseded, and the audit log names its key.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Final

import asyncpg
from asyncpg import Connection

from delayer.core.errors import StoreLost
from delayer.core.faultpoint import reach
from delayer.core.importing import ImportBatch, ImportItem, Phase, Run
from delayer.core.message import Parcel, is_occurrence
from delayer.core.operations import fold
from delayer.core.units import DAY_MS
from delayer.format import lines
from delayer.schedule.record import ScheduleRecord, key_of, name_of
from delayer.store import pool, postgres, schema
from delayer.store.admin import audit_log
from delayer.store.errors import translate_errors
from delayer.store.postgres import Placement
from delayer.store.rows import history, keys, partitions
from delayer.store.rows.counters import Changes
from delayer.store.rows.partitions import Days, read_days
from delayer.store.schedules import changes, table
from delayer.store.session import LONG_SECONDS

_LOCK: Final = "pg_try_advisory_lock('import_run'::regclass::oid::int, 1)"
_TOKEN: Final = "token"
"""Stored among the parameters in the table only. No source has a parameter of any of these names."""
_COLUMNS: Final = "id, source, parameters, phase, who, began_at, staged, parked, held, superseded, progress"
_COMMIT: Final = (
    "UPDATE import_run SET parked = parked + $2, held = held + $3, superseded = superseded + $4, progress = $5"
    " WHERE id = $1 AND phase = 'running' AND progress IS NOT DISTINCT FROM $6 RETURNING parked, held, superseded"
)
_WAITING: Final = """
SELECT key FROM message_key AS k WHERE key = ANY($1) AND (
    EXISTS (SELECT FROM message AS m WHERE m.lane = k.lane AND m.due_at = k.due_at AND m.id = k.id)
    OR EXISTS (SELECT FROM held WHERE held.id = k.id) OR k.segment IS NOT NULL
)
"""
SUPERSEDED: Final = "import superseded"
"""The audit log verb for messages not imported because others wait under their keys."""
NAMED: Final = 50
"""Maximum number of keys named by one audit log entry."""


class ImportBusy(Exception):
    """Another import is running in this store."""


class ImportStore:
    """The state of imports over one connection, which holds the lock of imports. Created by :meth:`open`. Each method
    may raise StoreLost, without committing. If the connection broke at the commit, :meth:`find_unfinished` shows the
    outcome."""

    def __init__(self, connection: Connection, days: Days) -> None:
        self._connection = connection
        self._days = days
        self._turn = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str) -> AsyncIterator[ImportStore]:
        """Raises StoreLost, BadStoreUrl, SchemaOutdated, ImportBusy."""
        connection = await pool.connect(url, "delayer import")
        try:
            with translate_errors("import"):
                await schema.check(connection)
                if not await connection.fetchval(f"SELECT {_LOCK}"):
                    raise ImportBusy("another `delayer import` is running in this store")
                days = Days(await read_days(connection))
            yield cls(connection, days)
        finally:
            await pool.close(connection)

    async def now_ms(self) -> int:
        """The store's clock."""
        with translate_errors("import"):
            now: int = await self._connection.fetchval("SELECT clock_timestamp()")
        return now

    async def find_unfinished(self) -> Run | None:
        """The unfinished run, if any."""
        with translate_errors("import"):
            row = await self._connection.fetchrow(f"SELECT {_COLUMNS} FROM import_run WHERE ended_at IS NULL")
        return None if row is None else _run(row)

    async def begin(self, source: str, parameters: Mapping[str, object], who: str) -> Run:
        """Record the start of a run, with a new token. No run may be unfinished."""
        text = json.dumps({**parameters, _TOKEN: uuid.uuid4().hex[:12]}, sort_keys=True, ensure_ascii=True)
        with translate_errors("import"):
            row = await self._connection.fetchrow(
                "INSERT INTO import_run (who, source, parameters, phase) VALUES ($1, $2, $3, 'staging')"
                f" RETURNING {_COLUMNS}",
                who,
                source,
                text,
            )
        return _run(row)

    async def finish_staging(self, run: Run, messages: int | None) -> Run:
        """Record the end of staging. ``messages``: how many are to come; None if the source cannot know."""
        with translate_errors("import"):
            await self._connection.execute(
                "UPDATE import_run SET phase = 'running', staged = $2 WHERE id = $1", run.id, messages
            )
        return replace(run, phase=Phase.RUNNING, staged=messages)

    async def commit(self, run: Run, batch: ImportBatch) -> tuple[Run, Sequence[ImportItem]]:
        """Park and hold the whole batch, with its progress, or nothing. Returns the messages added."""
        days = {item.parcel.due_ms // DAY_MS for item in batch.items if item.hold is None}
        with translate_errors("make partitions"):
            await partitions.make_missing(self._connection, days, partitions.MAINTAIN_SECONDS, self._days)
        with translate_errors("import"):
            (parked, held, superseded), items = await pool.retry_conflicts(partial(self._transact, run, batch))
        reach("import.committed")
        return replace(run, parked=parked, held=held, superseded=superseded, progress=batch.progress), items

    async def finish(self, run: Run, phase: Phase) -> Run:
        """Record that the run is done or aborted."""
        with translate_errors("import"):
            async with pool.transaction(self._connection):
                await self._connection.execute("TRUNCATE import_item")  # No other run is open.
                await self._connection.execute(
                    "UPDATE import_run SET phase = $2, ended_at = now() WHERE id = $1", run.id, phase.value
                )
        return replace(run, phase=phase)

    async def _transact(self, run: Run, batch: ImportBatch) -> tuple[tuple[int, int, int], Sequence[ImportItem]]:
        """Commit one transaction. Returns how many messages the run has parked, held and superseded so far, and those
        added. Raises StoreLost, the driver's errors."""
        self._turn += 1
        place = await choose_placement(self._connection, self._turn)
        async with pool.transaction(self._connection):
            now_ms = await self._connection.fetchval("SELECT statement_timestamp()")
            items, superseded = await self._not_waiting(batch.items)
            messages = [item for item in items if item.schedule is None]
            parcels = [_parked_before(item.parcel, now_ms) for item in messages if item.hold is None]
            held = [(item.parcel, item.hold) for item in messages if item.hold is not None]
            records = [_record(item) for item in items if item.schedule is not None]
            counts = len(parcels) + len(records), len(held), len(superseded)
            row = await self._connection.fetchrow(_COMMIT, run.id, *counts, batch.progress, run.progress)
            if row is None:
                raise StoreLost(f"import {run.id}: another process continued it")
            if superseded:
                named = [key.decode(errors="replace") for key in superseded[:NAMED]]
                log_id = await audit_log.begin(self._connection, run.who, SUPERSEDED, {"import": run.id, "keys": named})
                await audit_log.add(self._connection, log_id, len(superseded))
            counted: Changes = await changes.insert_imported(self._connection, records)
            if held:
                counted.update((await postgres.hold_new(self._connection, place, held, now_ms))[1])
            await postgres.apply_batch(self._connection, place, fold(parcels), more=counted)
        return tuple(row), items

    async def _not_waiting(self, items: Sequence[ImportItem]) -> tuple[list[ImportItem], list[bytes]]:
        """Split ``items`` into those to add, and the keys of the rest. A waiting or held message, a schedule of that
        name or id, or an earlier item, already has each of these keys. Locks the keys against parks by other
        transactions until the end of this transaction. An occurrence without its schedule becomes an ordinary message.
        """
        items = [
            item._replace(parcel=item.parcel._replace(key=None)) if is_occurrence(item.parcel.key) else item
            for item in items
        ]
        keyed = {key for item in items if (key := _key_of(item)) is not None}
        if not keyed:
            return items, []
        await keys.lock_keys(self._connection, keyed)
        taken = await find_used_keys(self._connection, keyed)
        names = [name_of(key) for key in keyed if is_occurrence(key)]
        taken |= set(map(key_of, await table.read(self._connection, names))) if names else set()
        ids = {_record(item).schedule.id: item for item in items if item.schedule is not None}
        used = await table.find_ids(self._connection, ids) if ids else set()
        kept: list[ImportItem] = []
        superseded: list[bytes] = []
        for item in items:
            key = _key_of(item)
            id_ = None if item.schedule is None else _record(item).schedule.id
            if key is not None and (key in taken or id_ in used):
                superseded.append(key)
                continue
            if id_ is not None:
                used.add(id_)
            if key is not None:
                taken.add(key)
            kept.append(item)
        return kept, superseded

    async def find_finished(self, source: str, sha256: str) -> list[tuple[int, int]]:
        """Finished imports of the same bytes: the number of each, and how many messages it added."""
        with translate_errors("import"):
            rows = await self._connection.fetch(
                "SELECT id, parked + held AS messages FROM import_run WHERE ended_at IS NOT NULL AND source = $1"
                " AND parked + held > 0 AND strpos(parameters, $2) > 0 ORDER BY id",
                source,
                f'"sha256": "{sha256}"',  # As written by begin(). A file name may not be valid in jsonb.
            )
        return [(row["id"], row["messages"]) for row in rows]

    async def write_items(self, run: Run, items: Iterable[tuple[int, int, int]]) -> int:
        """Replace the records to read, as (due instant, offset, length). Returns their number."""
        with translate_errors("import"):
            async with pool.transaction(self._connection):
                await self._connection.execute("TRUNCATE import_item; SET LOCAL statement_timeout = 0")
                status: str = await self._connection.copy_records_to_table(
                    "import_item",
                    records=((run.id, *one) for one in items),
                    columns=("run", "due_ms", "position", "size"),
                    timeout=LONG_SECONDS,
                )
        return int(status.removeprefix("COPY "))

    async def read_items(self, run: Run, after: tuple[int, int], limit: int) -> list[tuple[int, int, int]]:
        """The next records after ``after`` (due instant, position), soonest due first."""
        with translate_errors("import"):
            rows = await self._connection.fetch(
                "SELECT due_ms, position, size FROM import_item WHERE run = $1 AND (due_ms, position) > ($2, $3)"
                " ORDER BY due_ms, position LIMIT $4",
                run.id,
                *after,
                limit,
            )
        return [tuple(row) for row in rows]


def _key_of(item: ImportItem) -> bytes | None:
    """The key of a message, or that of a schedule's occurrence."""
    return item.parcel.key if item.schedule is None else key_of(_record(item).name)


def _record(item: ImportItem) -> ScheduleRecord:
    """The schedule of an item, with its destination as renamed."""
    found = lines.parse_line(item.schedule or b"")
    assert isinstance(found, ScheduleRecord)
    return found._replace(schedule=replace(found.schedule, target=item.parcel.target))


def _parked_before(parcel: Parcel, now_ms: int) -> Parcel:
    """The parcel, without the start of its burst if it is overdue, because this store did not delay it."""
    since = 0 <= (parcel.since_ms or 0) <= now_ms < parcel.due_ms
    return parcel if since else parcel._replace(since_ms=None)


def _run(row: asyncpg.Record) -> Run:
    values = dict(row)
    began_ms = values.pop("began_at")
    values["parameters"] = json.loads(values["parameters"])
    values["token"] = values["parameters"].pop(_TOKEN, "")
    values["phase"] = Phase(values["phase"])
    return Run(**values, began_ms=began_ms)


async def find_used_keys(connection: Connection, keys: Collection[bytes]) -> set[bytes]:
    """Return those of ``keys`` that belong to a waiting or held message. Raises the driver's errors."""
    return {key for (key,) in await connection.fetch(_WAITING, list(keys))}


async def choose_placement(connection: Connection, turn: int) -> Placement:
    """Pick the next ordinary lane, and the lanes of routes, for a process without lanes. Raises StoreLost, driver's
    errors."""
    rows = await connection.fetch("SELECT number, route FROM lane ORDER BY number")
    numbers = [number for number, route in rows if route is None]
    if not numbers:
        raise StoreLost("the store has no lanes", "run `delayer db upgrade`")
    return Placement(
        numbers[turn % len(numbers)],
        {route: number for number, route in rows if route is not None},
        history=await history.is_kept(connection),
    )
