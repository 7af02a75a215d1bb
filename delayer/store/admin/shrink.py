"""Shrinking: vacuums the partitions that a compaction read, and drops those that are empty."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

import asyncpg
import structlog
from asyncpg import Connection

from delayer.store import pool
from delayer.store.admin.traffic import Traffic
from delayer.store.errors import describe, translate_errors
from delayer.store.rows import partitions
from delayer.store.rows.partitions import DAYS_AHEAD, name_of, read_days

log = structlog.get_logger()

LOCK_MS = 50
"""How long the traffic may wait behind a drop that waits for a release, a park or a pack."""
LONGEST_LOCK_SECONDS = 0.05
"""How long it may wait while a drop scans the pages of an empty partition that has not been vacuumed."""
TRIES = 5
PAUSE_SECONDS = 0.25
"""Pause between drops under load, and before a retry. A drop makes messages a few milliseconds late; four a second
affect less than one message in a hundred."""
VACUUM_LOCK_MS = 5_000
"""Milliseconds that VACUUM waits for a running VACUUM, while traffic continues. Postgres ends its own autovacuum for a
waiter after deadlock_timeout (1 s). Without the wait, a job on five million rows left a partition of 80 MB."""
COST_DELAY_MS = 2.0
"""VACUUM's pauses under load, as in autovacuum; otherwise it does not pause."""
DEAD_ROWS = 1_000
"""A partition with more dead rows is vacuumed: an earlier job died, or an old snapshot kept them. Fewer are from
traffic."""
_DEAD = """
SELECT s.relname::text, n_dead_tup FROM pg_inherits AS i JOIN pg_stat_all_tables AS s ON s.relid = i.inhrelid
WHERE i.inhparent = 'message'::regclass AND n_dead_tup > $1
"""
_SIZE = "SELECT coalesce(sum(pg_total_relation_size(relid)), 0)::bigint FROM pg_partition_tree('message') WHERE isleaf"


@dataclass(frozen=True, slots=True)
class ShrinkResult:
    """The result of :func:`shrink`: partitions, and the bytes of all of them with their indexes and TOAST. ``left``:
    not vacuumed or dropped, for lack of a moment; left for next time."""

    dropped: tuple[str, ...]
    vacuumed: tuple[str, ...]
    left: tuple[str, ...]
    bytes_before: int
    bytes_after: int


async def size(connection: Connection) -> int:
    """Bytes of all waiting rows on disk, including indexes, TOAST and dead rows. Raises the driver's errors."""
    return int(await connection.fetchval(_SIZE))


async def shrink(
    url: str, touched: Collection[int], today: int, say: Callable[[int, int], None], lock_ms: int = VACUUM_LOCK_MS
) -> ShrinkResult:
    """Vacuum the partitions of the days ``touched`` (since 1970), and later ones with many dead rows. Drop all empty
    ones past the days that upkeep creates ahead of ``today``. ``say`` gets the numbers of finished and of all
    partitions. ``lock_ms``: lock timeout of each VACUUM. Raises StoreLost."""
    connection = await pool.connect(url, "delayer shrink", plain=True)
    try:
        with translate_errors("shrink"):
            return await _shrink(connection, touched, today, say, lock_ms)
    finally:
        await pool.close(connection)


async def _shrink(
    connection: Connection, touched: Collection[int], today: int, say: Callable[[int, int], None], lock_ms: int
) -> ShrinkResult:
    before = await size(connection)
    names = {day: name_of(day) for day in await read_days(connection)}
    far = {name for day, name in names.items() if day > today + DAYS_AHEAD}
    empty = {name for name in far if await _empty(connection, name)}
    later = {"message_default", *(name for day, name in names.items() if day > today)}
    unfinished = later.intersection(await _dead(connection))
    work = sorted({*empty, *unfinished, *(names.get(day, "message_default") for day in touched)})
    seen = Traffic()
    dropped: list[str] = []
    vacuumed: list[str] = []
    left: list[str] = []
    for done, name in enumerate(work):
        say(done, len(work))
        busy = await seen.look(connection)
        # The check for emptiness loaded its pages, so the check under the lock takes 20 ms for a day with 80,000 dead
        # rows and saves the VACUUM.
        if name in empty and not busy and await _drop(connection, name, 1):
            dropped.append(name)
            continue
        await connection.execute(f"SET vacuum_cost_delay = {COST_DELAY_MS if busy else 0}")
        clean = await _vacuum(connection, name, lock_ms)
        if name in empty and await _drop(connection, name, TRIES, PAUSE_SECONDS if busy else 0.0):
            dropped.append(name)
        else:
            (vacuumed if clean and name not in empty else left).append(name)
    say(len(work), len(work))
    return ShrinkResult(tuple(dropped), tuple(vacuumed), tuple(left), before, await size(connection))


async def _dead(connection: Connection) -> dict[str, int]:
    """The partitions with many dead rows, and the number of these."""
    return dict(map(tuple, await connection.fetch(_DEAD, DEAD_ROWS)))


async def _empty(connection: Connection, name: str) -> bool:
    try:
        return not await connection.fetchval(f"SELECT EXISTS (SELECT FROM {name})")
    except asyncpg.UndefinedTableError:
        return False


async def _vacuum(connection: Connection, name: str, lock_ms: int) -> bool:
    """Vacuum ``name``. Returns whether it freed the dead rows, or is gone."""
    await connection.execute(f"SET lock_timeout = '{lock_ms}ms'")
    try:
        await connection.execute(f"VACUUM (TRUNCATE, ANALYZE) {name}")
    except asyncpg.UndefinedTableError:
        return True  # Another session dropped it, which frees even more room.
    except asyncpg.LockNotAvailableError as error:
        log.info("partition not vacuumed", partition=name, reason=describe(error))
        return False
    finally:
        await connection.execute("SET lock_timeout = 0")
    if dead := (await _dead(connection)).get(name):
        log.info("partition not vacuumed", partition=name, reason=f"an older snapshot still sees {dead} of its rows")
        return False
    return True


async def _drop(connection: Connection, name: str, attempts: int, pause: float = 0.0) -> bool:
    """Drop the empty partition ``name``, after ``pause`` seconds. Returns whether it did."""
    for attempt in range(attempts):
        await asyncio.sleep(PAUSE_SECONDS * attempt or pause)
        try:
            dropped = await partitions.drop_empty(connection, name, LOCK_MS, LONGEST_LOCK_SECONDS)
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError) as error:
            if attempt + 1 == TRIES:
                log.info("partition not dropped", partition=name, reason=describe(error))
        else:
            if dropped:
                log.info("partition dropped", partition=name)
            return dropped
    return False
