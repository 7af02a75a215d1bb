"""Compacting: rows that are due in the far future become segments, one transaction each.

Each transaction locks its rows first and deletes them last. So two compactions at once, a cancel, or a crash at any
step leave every message either a row or in exactly one segment. Traffic waits for none of its locks, except for a
moment for the counter ``compacted`` of the lane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import asyncpg
import structlog

from delayer.core.faultpoint import reach
from delayer.core.filters import MAX_ID
from delayer.core.segment import FORMAT
from delayer.store import pool, statements
from delayer.store.admin.traffic import Traffic
from delayer.store.errors import describe, translated
from delayer.store.rows import partitions
from delayer.store.rows.days import DAY_MS, bounds_of, existing, name_of
from delayer.store.rows.partitions import DAYS_AHEAD

if TYPE_CHECKING:
    from delayer.store.segments.codec import Packed

ROWS: Final = 10_000
"""Messages of a segment at most."""
BYTES: Final = 8 << 20
"""Bytes of bodies and properties in a segment at most. The daemon that restores it has several copies in memory for a
moment."""
LARGEST: Final = 1 << 20
"""Bytes of a message's body and properties, above which it stays a row: Postgres keeps it out of line, compressed, and
restoring it from a segment would take a daemon twenty times its size in memory."""
SPAN_MS: Final = 7 * DAY_MS
"""The longest window where few messages are due. A segment is restored as a whole, so it must not span more."""
SETTINGS: Final = (
    # The rows of a segment are kept at hand while they are summed up.
    "SET LOCAL work_mem = '64MB'; "
    # The plan must be an index range, also with wrong statistics of a partition that has just changed.
    "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off"
)


class Window(NamedTuple):
    """A piece of a lane: its rows due from ``first_ms`` to ``last_ms``, both included (epoch milliseconds).

    A cut may go through an instant. Then the window has only ids from ``first_id`` on at ``first_ms``, and only ids
    below ``end_id`` at ``last_ms``. ``rows`` is about the number of rows: counted without locks, rows with a key
    included.
    """

    lane: int
    first_ms: int
    last_ms: int
    rows: int
    first_id: int = -MAX_ID
    end_id: int | None = None

    @property
    def end(self) -> tuple[int, int]:
        """The first place (due instant, id) behind it."""
        return (self.last_ms + 1, -MAX_ID) if self.end_id is None else (self.last_ms, self.end_id)


class Compacted(NamedTuple):
    """A segment that was committed. ``more``: the window may have rows left, as a limit was met."""

    segment: int
    messages: int
    raw_bytes: int
    packed_bytes: int
    more: bool


async def windows(connection: asyncpg.Connection, after_ms: int, rows: int = ROWS) -> list[Window]:
    """Cut the messages due after ``after_ms`` (epoch ms) into windows of ``rows`` rows at most, by lane and due
    instant.

    It works partition by partition, because one statement over all of them would sort them. Raises the driver's errors.
    """
    found: list[Window] = []
    by_day = "date_trunc('day', due_at)"
    places = [("message_default", by_day, f", {by_day}")]
    for day in sorted(await existing(connection)):
        if (day + 1) * DAY_MS > after_ms:
            places.append((name_of(day), f"'{bounds_of(day)[0]}'::timestamptz", ""))
    for name, day_of_row, of_day in places:
        statement = statements.RUNS.format(partition=name, day=day_of_row, of_day=of_day)
        with suppress(asyncpg.UndefinedTableError):  # It was empty, and another session dropped it.
            found += _cut(await connection.fetch(statement, after_ms, rows, timeout=None))
    return _joined(found, rows)


def _cut(starts: Sequence[tuple[int, int, int, int, int]]) -> list[Window]:
    """Windows from the beginnings of runs (lane, due instant, id, end of the day, rows), in this order."""
    cut = []
    for position, (lane, first_ms, first_id, day_end_ms, rows) in enumerate(starts):
        window = Window(lane, first_ms, day_end_ms - 1, rows, first_id)
        if position + 1 < len(starts):
            next_lane, next_ms, next_id, next_day_end_ms, _ = starts[position + 1]
            if (next_lane, next_day_end_ms) == (lane, day_end_ms):
                window = window._replace(last_ms=next_ms, end_id=next_id)
        cut.append(window)
    return cut


def _joined(found: Iterable[Window], rows: int) -> list[Window]:
    """Sorted, and neighbours of one lane made one where they fit into ``rows`` and SPAN_MS together."""
    joined: list[Window] = []
    for window in sorted(found, key=lambda window: (window.lane, window.first_ms, window.first_id)):
        last = joined[-1] if joined else window
        fits = last.rows + window.rows <= rows and window.last_ms - last.first_ms < SPAN_MS
        if joined and last.lane == window.lane and fits:
            joined[-1] = last._replace(last_ms=window.last_ms, end_id=window.end_id, rows=last.rows + window.rows)
        else:
            joined.append(window)
    return joined


async def compact_one(
    connection: asyncpg.Connection,
    window: Window,
    *,
    rows: int = ROWS,
    max_bytes: int = BYTES,
    portion: int | None = None,
    pause: float = 0.0,
) -> Compacted | None:
    """Pack the first rows of ``window`` into a segment, in one transaction; None when no row is left there.

    Call it again while ``more``. Rows with a key, rows of more than LARGEST bytes and locked rows stay rows. It locks
    and reads ``portion`` rows at a time, with ``pause`` seconds after each; None: all at once. Raises the driver's
    errors, and SegmentBroken if the written segment does not read back; then nothing is committed.
    """
    from delayer.store.segments import codec  # noqa: PLC0415 - pyarrow

    end_ms, end_id = window.end
    bounds = (window.lane, window.first_ms, window.first_id, end_ms, end_id, window.last_ms + 1)
    async with pool.transaction(connection):
        await connection.execute(SETTINGS)
        rows = min(rows, await _fitting(connection, bounds, max_bytes))
        table, more = await _lock(connection, bounds, (rows, max_bytes), portion or rows, pause)
        if table is None:
            return None
        reach("compact.locked")
        packed = codec.pack(table)
        segment = await _insert(connection, window.lane, packed)
        reach("compact.written")
        await _verify(connection, segment, packed)
        reach("compact.verified")
        ids = table["id"].to_pylist()
        status = await connection.execute(statements.DELETE_RUN, window.lane, window.first_ms, window.last_ms + 1, ids)
        if status != f"DELETE {packed.messages}":
            raise RuntimeError(f"segment of lane {window.lane}: {packed.messages} messages packed, but {status}")
        await connection.execute(statements.COUNT, [window.lane], ["compacted"], [packed.messages])
        reach("compact.deleted")
    reach("compact.committed")
    return Compacted(segment, packed.messages, packed.raw_bytes, len(packed.packed), more)


async def _lock(
    connection: asyncpg.Connection, bounds: Sequence[int], limits: tuple[int, int], portion: int, pause: float
) -> tuple[Any, bool]:
    """The first rows of a window, locked, up to ``limits`` of rows and bytes, as a table (None without rows); and
    whether a limit was reached."""
    import pyarrow as pa  # noqa: PLC0415

    from delayer.store.segments import codec  # noqa: PLC0415 - pyarrow

    lane, first_ms, first_id, *others = bounds
    rows, room = limits
    begin_us, tables, more = first_ms * 1000, list[Any](), True
    while more and rows > 0 and room > 0:
        wanted = min(portion, rows)
        run = await connection.fetchrow(
            statements.LOCK_RUN, lane, first_ms, first_id, *others, wanted, room, begin_us, LARGEST
        )
        more = run["locked"] == wanted
        if not run["locked"]:
            break
        tables.append(table := codec.table_of(run))
        if len(table) < run["locked"]:
            more = True
            break
        rows, room = rows - wanted, room - codec.content_bytes(table)
        begin_us, first_id = codec.place_behind(table)
        await asyncio.sleep(pause)
    return (pa.concat_tables(tables).combine_chunks() if tables else None), more


async def _fitting(connection: asyncpg.Connection, bounds: Sequence[int], max_bytes: int) -> int:
    """The number of rows that fit ``max_bytes``, and some more, from the size of the first ones of a window. Without
    it, large messages would lock ten thousand rows for each hundred that fit."""
    mean = await connection.fetchval(statements.MEAN_SIZE, *bounds)
    return int(max_bytes / mean * 1.5) + 1 if mean else 1 << 31


async def _insert(connection: asyncpg.Connection, lane: int, packed: Packed) -> int:
    segment: int = await connection.fetchval(
        statements.INSERT_SEGMENT,
        lane,
        packed.first_due_us,
        packed.last_due_us,
        packed.first_id,
        packed.last_id,
        packed.messages,
        packed.raw_bytes,
        FORMAT,
        packed.digest,
        packed.packed,
    )
    return segment


async def _verify(connection: asyncpg.Connection, segment: int, packed: Packed) -> None:
    """Read the segment back from the store, and compare it with the packed one. Raises SegmentBroken."""
    from delayer.store.segments import codec  # noqa: PLC0415 - pyarrow

    stored, format, messages, digest = await connection.fetchrow(
        "SELECT packed, format, messages, digest FROM segment WHERE id = $1", segment
    )
    if (messages, digest) != (packed.messages, packed.digest):
        raise codec.SegmentBroken(f"expected {packed.messages} messages, found {messages}, or another digest")
    codec.unpack(stored, format, packed.messages, packed.digest)


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
"""Milliseconds that VACUUM waits behind another one; the traffic passes meanwhile. Postgres ends its own autovacuum for
a waiter after deadlock_timeout (1 s). Without the wait, a job on five million rows left a partition of 80 MB."""
COST_DELAY_MS = 2.0
"""VACUUM's pauses beside traffic: what autovacuum makes. Elsewhere none."""

SETTLED = timedelta(days=35)
"""The age at which the VACUUM of a day need not be repeated, counted from its newest segment. A job may have died, or
an older snapshot kept its rows. A clean partition takes milliseconds."""
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
    """Vacuum the partitions of the days ``touched`` (from 1970) and of those that an earlier job left unfinished. Drop
    all that are empty and later than the days that upkeep makes ahead of ``today``. ``say`` hears the number of
    finished partitions, and of all.

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
    days = await existing(connection)
    names = {day: name_of(day) for day in sorted(days)}
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
    """Drop those of ``names`` that are empty, if they need no VACUUM. Returns the dropped ones, and the others."""
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
        return True  # Another session dropped it, which returns even more room.
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
    """Whether ``name``, just seen to be empty, was dropped without a VACUUM. All its pages are in the server's memory
    then, and the second look under the lock takes 20 ms for a day with 80,000 dead rows."""
    try:
        dropped = await partitions.drop_empty(connection, name, LOCK_MS, LOOK_SECONDS)
    except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
        return False  # The caller tries it again after VACUUM.
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
