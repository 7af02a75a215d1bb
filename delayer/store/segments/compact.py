"""Compacting: rows that are due in the far future become segments, one transaction each.

Two at once, a cancel, or a crash at any step leave every message either a row or in exactly one segment: the rows are
locked first and deleted last, in one transaction. None of it takes a lock that traffic waits for, but for a moment that
of the counter ``compacted`` of the lane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import asyncpg

from delayer.core.faultpoint import reach
from delayer.core.segment import FORMAT
from delayer.store import pool, statements
from delayer.store.rows import days

if TYPE_CHECKING:
    from delayer.store.segments.codec import Packed

ROWS: Final = 10_000
"""Messages of a segment at most."""
BYTES: Final = 8 << 20
"""Bodies and properties of a segment at most, in bytes: the daemon that restores it has several copies of them in its
memory for a moment."""
LARGEST: Final = 1 << 20
"""Bytes of a message's body and properties, above which it stays a row: Postgres keeps it out of line, compressed, and
restoring it from a segment would take a daemon twenty times its size in memory."""
SPAN_MS: Final = 7 * days.DAY_MS
"""Where little is due, one window reaches over several days, but not more: a segment comes back as a whole."""
SETTINGS: Final = (
    # The rows of a segment are kept at hand while they are summed up.
    "SET LOCAL work_mem = '64MB'; "
    # The plan must be an index range, whatever the statistics say of a partition that has just changed.
    "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off"
)
_FIRST_ID: Final = -(1 << 63)


class Window(NamedTuple):
    """A piece of a lane: its rows due from ``first_ms`` to ``last_ms``, both included (epoch milliseconds).

    Where a cut goes through an instant: of those due at ``first_ms`` only ids from ``first_id`` on, and of those due at
    ``last_ms`` only ids below ``end_id``, where there is one. ``rows`` is how many there are about: counted without
    locks, and rows with a key among them.
    """

    lane: int
    first_ms: int
    last_ms: int
    rows: int
    first_id: int = _FIRST_ID
    end_id: int | None = None

    @property
    def end(self) -> tuple[int, int]:
        """The first place (due instant, id) behind it."""
        return (self.last_ms + 1, _FIRST_ID) if self.end_id is None else (self.last_ms, self.end_id)


class Compacted(NamedTuple):
    """A segment that was committed. ``more``: the window may have rows left, as a limit was met."""

    segment: int
    messages: int
    raw_bytes: int
    packed_bytes: int
    more: bool


async def windows(connection: asyncpg.Connection, after_ms: int, rows: int = ROWS) -> list[Window]:
    """Cut what is due after ``after_ms`` (epoch ms) into windows of ``rows`` rows at most, by lane and due instant.

    Partition by partition, as one statement over all of them would sort them. Raises the driver's errors.
    """
    found: list[Window] = []
    by_day = "date_trunc('day', due_at)"
    places = [("message_default", by_day, f", {by_day}")]
    for day in sorted(await days.existing(connection)):
        if (day + 1) * days.DAY_MS > after_ms:
            places.append((days.name_of(day), f"'{days.bounds_of(day)[0]}'::timestamptz", ""))
    for name, day_of_row, of_day in places:
        statement = statements.RUNS.format(partition=name, day=day_of_row, of_day=of_day)
        with suppress(asyncpg.UndefinedTableError):  # it was empty, and somebody dropped it
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
    """One segment from the first rows of ``window``, in one transaction of its own; None when nothing is left there.

    Call it again while ``more``. Rows with a key, those of more than LARGEST bytes and rows that somebody has locked
    stay rows. They are locked and read ``portion`` rows at a time, with ``pause`` seconds after each; all of them at
    once where it is None. Raises the driver's errors, and SegmentBroken when what was written does not read back: then
    nothing is committed.
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
    """The first rows of a window, locked, up to ``limits`` of rows and bytes: as a table, None where there is none; and
    whether a limit was met."""
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
    """How many rows fit ``max_bytes``, and some more, by the first ones of a window: so that of large messages not ten
    thousand are locked for each hundred that fit."""
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
    """Read back what the store has now, and compare it with what was packed. Raises SegmentBroken."""
    from delayer.store.segments import codec  # noqa: PLC0415 - pyarrow

    stored, format, messages, digest = await connection.fetchrow(
        "SELECT packed, format, messages, digest FROM segment WHERE id = $1", segment
    )
    if (messages, digest) != (packed.messages, packed.digest):
        raise codec.SegmentBroken(f"expected {packed.messages} messages, found {messages}, or another digest")
    codec.unpack(stored, format, packed.messages, packed.digest)
