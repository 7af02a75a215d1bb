"""The history: a row for each message released, held or cancelled, written in the transaction of that change.

It is off by default. Its table is partitioned by the day of the change. Daemons create the next days' partitions and
drop those older than ``store.history_days``. Rows of a day without a partition go to the default one, so a missing
partition fails no transaction. History is on while the table has the partition of any day, so commands that cancel
follow the daemons (:func:`is_kept`). It does not contain messages that never waited in the store, or were drained.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import asyncpg
from asyncpg import Connection

from delayer.core.message import Parcel
from delayer.core.units import DAY_MS
from delayer.format.reading import schedule_of
from delayer.store import pool
from delayer.store.errors import describe
from delayer.store.rows import of_schedule, partitions

log = logging.getLogger(__name__)  # Not structlog: see partitions.py.

DAYS_AHEAD: Final = 2
"""Days whose partitions are created ahead of need."""
RELEASED, HELD, CANCELLED = "released", "held", "cancelled"
_PARTITIONS: Final = "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'history'::regclass"
_KEPT: Final = (
    "SELECT EXISTS (SELECT FROM pg_inherits WHERE inhparent = 'history'::regclass"
    " AND inhrelid <> 'history_default'::regclass)"
)
_PURGE: Final = "DELETE FROM history_default WHERE at < $1"
_TURN: Final = "SELECT pg_advisory_xact_lock('history'::regclass::oid::int, 1)"
_THERE: Final = "SELECT to_regclass($1) IS NOT NULL"

OF_HELD: Final = (
    "route, to_exchange, to_key, due_at, NULL::timestamptz AS parked_at,"
    f" octet_length(body) + octet_length(properties) AS size, {of_schedule.column()}"
)
"""The columns of a row of ``held`` for :func:`of_row`, after its id. Its ``parked_at`` is when it was held. For a
waiting row, DELETE_ROWS (places.py) returns them."""


class HistoryEntry(NamedTuple):
    """A row, with fields named like the columns. The statement's instant is that of the change."""

    what: str
    id: int | None
    route: bytes
    to_exchange: bytes
    to_key: bytes
    due_at: int
    late_ms: int
    delay_ms: int | None
    size: int
    kind: str | None = None
    schedule: str | None = None


def of_parcel(
    what: str, id_: int | None, parcel: Parcel, now_ms: float, *, parked_ms: int | None, kind: str | None = None
) -> HistoryEntry:
    """The entry of a message. ``now_ms``: when it changed; ``parked_ms``: when it was parked, if known."""
    route, (exchange, key), due_ms = parcel.route, parcel.target, parcel.due_ms
    delay_ms = None if parked_ms is None else due_ms - parked_ms
    size = len(parcel.body) + len(parcel.properties)
    schedule = None if route else schedule_of(parcel.properties) or None
    return HistoryEntry(what, id_, route, exchange, key, due_ms, round(now_ms - due_ms), delay_ms, size, kind, schedule)


def of_row(row: Mapping[str, Any], now_ms: float) -> HistoryEntry:
    """The entry of a cancelled row, waiting or held (:data:`OF_HELD`), or of a keyed message in a segment, which no
    schedule made."""
    due_ms, parked_ms = row["due_at"], row["parked_at"]
    places = row["route"], row["to_exchange"], row["to_key"]
    delay_ms = None if parked_ms is None else due_ms - parked_ms
    schedule = of_schedule.name_in(row.get("of_schedule"))
    late_ms = round(now_ms - due_ms)
    return HistoryEntry(CANCELLED, row["id"], *places, due_ms, late_ms, delay_ms, row["size"], schedule=schedule)


async def write(connection: Connection, entries: Sequence[HistoryEntry]) -> None:
    """Write entries, in the open transaction. Raises the driver's errors."""
    if entries:
        await connection.copy_records_to_table("history", records=entries, columns=HistoryEntry._fields)


async def is_kept(connection: Connection) -> bool:
    """Whether the store keeps a history. Raises the driver's errors."""
    return bool(await connection.fetchval(_KEPT))


async def run_upkeep(connection: Connection, today: int, days: int) -> None:
    """Create partitions from ``today`` on (days since 1970), and drop those older than ``days``, or all if 0. Raises
    the driver's errors if they end the connection."""
    existing = {name for (name,) in await connection.fetch(_PARTITIONS)} - {"history_default"}
    if not days and not existing:
        return  # The role needs no rights for a history that is off.
    oldest = partitions.name_of(today - days, "history")
    for name in sorted(existing):
        if not days or name < oldest:
            await _change(connection, name, None)
    for day in range(today, today + DAYS_AHEAD + 1) if days else ():
        if (name := partitions.name_of(day, "history")) not in existing:
            await _change(connection, name, day)
    await connection.execute(_PURGE, (today - days if days else today + 2) * DAY_MS)


async def _change(connection: Connection, name: str, day: int | None) -> None:
    """Create the partition of ``day``; None drops it. Obstacles are logged, and the next round retries."""
    try:
        async with pool.transaction(connection):
            # Releases wait behind a drop that waits for a reader, so not for long.
            await connection.execute(f"SET LOCAL lock_timeout = '200ms'; {_TURN}")
            if await connection.fetchval(_THERE, name) is (day is not None):
                return  # Another daemon was faster.
            if day is None:
                await connection.execute(f"DROP TABLE {name}")
            else:
                await _make(connection, name, day)
    except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        if connection.is_closed():
            raise
        log.warning("history partition not changed", extra={"partition": name, "reason": describe(error)})
    else:
        change = "dropped" if day is None else "made"
        log.info("history partition changed", extra={"partition": name, "change": change})


async def _make(connection: Connection, name: str, day: int) -> None:
    low, high = partitions.bounds_of(day)
    await connection.execute(f"CREATE TABLE {name} (LIKE history INCLUDING ALL)")
    await partitions.hand_over(connection, name, "history")
    # Attaching locks only the default partition against writers.
    await connection.execute(f"ALTER TABLE history ATTACH PARTITION {name} FOR VALUES FROM ('{low}') TO ('{high}')")
