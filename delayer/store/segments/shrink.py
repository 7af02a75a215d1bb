"""What compaction leaves behind: partitions that are empty by now, and dead rows. Gives their room back to the disk.

A partition that lost all of its rows is dropped; the others are vacuumed, and their tail of empty pages goes back too:
they are made with ``vacuum_truncate = off``, as it would lock out the traffic of the near days, but these are far.

A job that dies before this leaves its pages as they are, and one beside an older snapshot (a dump, an audit, a
replica's query) finds rows there that it may not remove. So the days that segments reach over are looked at too: where
the newest of these segments is not weeks older than the last VACUUM, this one does it again.

A daemon that knew the partition does not hear of it: its rows for that day go to the default one, where they are found
as well, until its next upkeep reads the catalog. So the days that upkeep makes ahead are left alone, empty or not.

Dropping locks everything for a moment. It is tried with a timeout that is shorter than anybody would notice; where
there is traffic with pauses, and after VACUUM has cut the partition to nothing: looking at it once more, under the
lock, then takes no time. Without traffic VACUUM is left out where it can be: it was most of the time that this took.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import asyncpg
import structlog

from delayer.store import pool
from delayer.store.admin.traffic import Traffic
from delayer.store.errors import describe, translated
from delayer.store.rows import partitions
from delayer.store.rows.partitions import DAYS_AHEAD

log = structlog.get_logger()

LOCK_MS = 50
"""How long the traffic may stand behind a drop that waits for a release, a park or a pack."""
LOOK_SECONDS = 0.05
"""And behind one that looks through the pages of an empty partition, before there was a VACUUM."""
TRIES = 5
PAUSE_SECONDS = 0.25
"""Between drops beside traffic: lateness of some milliseconds, four times a second, is less than one message in a
hundred. And before another try."""
VACUUM_LOCK_MS = 5_000
"""How long VACUUM waits behind another one; the traffic passes meanwhile. Postgres ends an autovacuum of its own for
whoever waits for deadlock_timeout (1 s): not waiting left a partition of 80 MB in a job on five million rows."""
COST_DELAY_MS = 2.0
"""VACUUM's pauses beside traffic: what autovacuum makes. Elsewhere none."""

SETTLED = timedelta(days=35)
"""How much later than its newest segment the VACUUM of a day is that need not be done again: a job may have died, or an
older snapshot kept its rows. What is clean already takes milliseconds."""
DEAD_ROWS = 1_000
"""Fewer are those of traffic that went on meanwhile."""

# Each day that segments reach over, with the newest of them.
_MADE = """
SELECT day, max(made_at) AS made_at
FROM segment CROSS JOIN LATERAL generate_series(
    floor(extract(epoch FROM first_due) / 86400)::int, floor(extract(epoch FROM last_due) / 86400)::int
) AS day
GROUP BY day
"""
_VACUUMED = """
SELECT s.relname::text, s.last_vacuum
FROM pg_inherits AS i JOIN pg_stat_all_tables AS s ON s.relid = i.inhrelid
WHERE i.inhparent = 'message'::regclass
"""
_DEAD = "SELECT n_dead_tup FROM pg_stat_all_tables WHERE relid = to_regclass($1)"
_SIZE = "SELECT coalesce(sum(pg_total_relation_size(relid)), 0)::bigint FROM pg_partition_tree('message') WHERE isleaf"


@dataclass(frozen=True, slots=True)
class Shrunk:
    """What :func:`shrink` did. Bytes are of all partitions with their indexes and TOAST."""

    dropped: tuple[str, ...]
    vacuumed: tuple[str, ...]
    left: tuple[str, ...]
    """There was no moment to vacuum or to drop them; the next time comes."""
    bytes_before: int
    bytes_after: int


async def size(url: str) -> int:
    """Bytes of all waiting rows on disk, indexes, TOAST and dead ones included. Raises StoreLost."""
    connection = await pool.connect(url, "delayer shrink")
    try:
        with translated("size"):
            return int(await connection.fetchval(_SIZE))
    finally:
        await pool.close(connection)


async def shrink(
    url: str, touched: Collection[int], today: int, say: Callable[[int, int], None] = lambda _done, _of: None
) -> Shrunk:
    """Vacuum the partitions of the days ``touched`` (from 1970) and of those that an earlier job left unfinished, and
    drop all that are empty and later than the days that upkeep makes ahead of ``today``. ``say`` hears how many
    partitions are done, of how many.

    Raises StoreLost.
    """
    connection = await pool.connect_plain(url, "delayer shrink", {"statement_timeout": "0"}, command_seconds=None)
    try:
        with translated("shrink"):
            return await _shrink(connection, touched, today, say)
    finally:
        await pool.close(connection)


async def _shrink(
    connection: asyncpg.Connection, touched: Collection[int], today: int, say: Callable[[int, int], None]
) -> Shrunk:
    before = int(await connection.fetchval(_SIZE))
    days = await partitions.existing(connection)
    names = {day: partitions.name_of(day) for day in sorted(days)}
    seen = Traffic()
    far = [name for day, name in names.items() if day > today + DAYS_AHEAD]
    dropped, emptied = await _dropped_at_once(connection, far, seen)
    made = {day: at for day, at in await connection.fetch(_MADE) if day > today}
    vacuumed = dict(map(tuple, await connection.fetch(_VACUUMED)))
    worked = [names.get(day, "message_default") for day in {*touched, *unfinished(made, names, vacuumed)}]
    vacuum = sorted({*emptied, *worked} - {*dropped})
    left = []
    for done, name in enumerate(vacuum):
        say(done, len(vacuum))
        await connection.execute(f"SET vacuum_cost_delay = {COST_DELAY_MS if await seen.look(connection) else 0}")
        if not await _vacuum(connection, name) and name not in emptied:
            left.append(name)
    for name in emptied:
        gone = await _drop(connection, name, PAUSE_SECONDS if await seen.look(connection) else 0.0)
        if gone is None:
            left.append(name)
        elif gone:
            dropped.append(name)
    say(len(vacuum), len(vacuum))
    after = int(await connection.fetchval(_SIZE))
    kept = tuple(name for name in vacuum if name not in {*dropped, *left})
    return Shrunk(tuple(sorted(dropped)), kept, tuple(left), before, after)


async def _dropped_at_once(
    connection: asyncpg.Connection, names: Sequence[str], seen: Traffic
) -> tuple[list[str], list[str]]:
    """Drop those of ``names`` that are empty, as far as that needs no VACUUM. Those dropped, and those to be."""
    dropped: list[str] = []
    emptied: list[str] = []
    for name in names:
        if await _empty(connection, name):
            at_once = not await seen.look(connection) and await _drop_at_once(connection, name)
            (dropped if at_once else emptied).append(name)
    return dropped, emptied


def unfinished(
    made: Mapping[int, datetime], names: Mapping[int, str], vacuumed: Mapping[str, datetime | None]
) -> set[int]:
    """The days whose rows went into segments (the newest ``made`` then) and were not vacuumed for good since. ``names``
    of the partitions of days; ``vacuumed`` is when, by partition: None where it never was, or the server forgot; those
    that are gone are not in it. Pure."""
    never = datetime.min.replace(tzinfo=UTC)
    last = {day: vacuumed.get(names.get(day, "message_default"), datetime.max.replace(tzinfo=UTC)) for day in made}
    return {day for day, at in made.items() if (last[day] or never) - at < SETTLED}


async def _empty(connection: asyncpg.Connection, name: str) -> bool:
    try:
        return not await connection.fetchval(f"SELECT EXISTS (SELECT FROM {name})")
    except asyncpg.UndefinedTableError:
        return False


async def _vacuum(connection: asyncpg.Connection, name: str) -> bool:
    """Whether ``name`` was vacuumed to some purpose, or is gone."""
    await connection.execute(f"SET lock_timeout = '{VACUUM_LOCK_MS}ms'")
    try:
        await connection.execute(f"VACUUM (TRUNCATE, ANALYZE) {name}")
    except asyncpg.UndefinedTableError:
        return True  # somebody else dropped it, which returns even more
    except asyncpg.LockNotAvailableError as error:
        log.info("partition not vacuumed", partition=name, reason=describe(error))
        return False
    finally:
        await connection.execute("SET lock_timeout = 0")
    dead = await connection.fetchval(_DEAD, name)
    if dead is not None and dead > DEAD_ROWS:
        log.info("partition not vacuumed", partition=name, reason=f"an older snapshot still sees {dead} of its rows")
        return False
    return True


async def _drop_at_once(connection: asyncpg.Connection, name: str) -> bool:
    """Whether ``name``, just seen to be empty, was dropped without a VACUUM: all of its pages are in the server's
    memory then, and looking at them again under the lock takes 20 ms of a day with 80,000 dead rows."""
    try:
        dropped = await partitions.drop_empty(connection, name, LOCK_MS, LOOK_SECONDS)
    except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
        return False  # tried again, after VACUUM
    if dropped:
        log.info("partition dropped", partition=name)
    return dropped


async def _drop(connection: asyncpg.Connection, name: str, pause: float) -> bool | None:
    """Whether ``name`` was dropped, after ``pause`` seconds; None if there was no moment for it."""
    for attempt in range(1, TRIES + 1):
        await asyncio.sleep(pause if attempt == 1 else PAUSE_SECONDS * attempt)
        try:
            dropped = await partitions.drop_empty(connection, name, LOCK_MS)
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError) as error:
            if attempt == TRIES:
                log.info("partition not dropped", partition=name, reason=describe(error))
        else:
            if dropped:
                log.info("partition dropped", partition=name)
            return dropped
    return None
