"""Compacting: rows due in the far future become segments, in one transaction each.

Each transaction locks its rows first and deletes them last. So after concurrent compactions, a cancel, or a crash at
any step, every message is either a row or in exactly one segment. Its key then names the segment. Compacting takes no
lock of keys.py before its rows: like a release, it changes a key only while that points at its message. Traffic waits
briefly for the lane's counter ``compacted``. A park that replaces or cancels one of the messages waits for the commit.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import asyncpg
from asyncpg import Connection

from delayer.core.faultpoint import reach
from delayer.core.filters import MAX_ID
from delayer.core.message import OCCURRENCES
from delayer.core.segment import FORMAT, SegmentBroken
from delayer.core.units import DAY_MS, HOUR_MS
from delayer.store import pool, statements
from delayer.store.rows import keys
from delayer.store.rows.counters import add_counts

ROWS: Final = 10_000
"""Maximum number of messages in a segment."""
FEWEST: Final = 300
"""Minimum number of messages, unless the segment is full by bytes. Segments of 5 needed more room than their rows."""
BYTES: Final = 8 << 20
"""Maximum bytes of bodies and properties in a segment, because a restore briefly needs several copies in memory."""
LARGEST: Final = 1 << 20
"""A message with more bytes of body and properties stays a row. Postgres stores it out of line, compressed, and
restoring it from a segment would take a daemon twenty times its size in memory."""
SPAN_MS: Final = 7 * DAY_MS
"""The longest window while few messages are due. A segment is restored as a whole, so it must not span more."""
SETTINGS: Final = (
    # Keep the rows of a segment in memory while they are summed up.
    "SET LOCAL work_mem = '64MB'; "
    # The plan must be an index range, even with wrong statistics of a partition that has just changed.
    "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; "
    # Find each key by its index.
    "SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off"
)


_HOURS: Final = """
SELECT lane, date_trunc('hour', due_at), count(*) FROM message WHERE due_at > $1 GROUP BY 1, 2 ORDER BY 1, 2
"""


class CompactionWindow(NamedTuple):
    """A piece of a lane: its rows due from ``first_ms`` to ``last_ms``, inclusive, in epoch milliseconds. ``rows``:
    their approximate number, counted without locks."""

    lane: int
    first_ms: int
    last_ms: int
    rows: int


class Compacted(NamedTuple):
    """A committed segment. ``last_due_ms``: of its last message. ``more``: a limit was met, so rows may be left."""

    segment: int
    messages: int
    last_due_ms: int
    raw_bytes: int
    packed_bytes: int
    more: bool


async def windows(connection: Connection, after_ms: int, rows: int = ROWS, fewest: int = 0) -> list[CompactionWindow]:
    """Cut the messages due after ``after_ms`` (epoch ms) into windows of whole hours, by lane. A window has at most
    ``rows`` rows, unless one hour has more; those below ``fewest`` are left out. Raises the driver's errors."""
    found: list[CompactionWindow] = []
    for lane, hour_ms, count in await connection.fetch(_HOURS, after_ms, timeout=DAY_MS / 1000):
        window = CompactionWindow(lane, max(hour_ms, after_ms + 1), hour_ms + HOUR_MS - 1, count)
        last = found[-1] if found else window
        fits = last.rows + count <= rows and window.last_ms - last.first_ms < SPAN_MS
        if found and last.lane == lane and fits:
            found[-1] = last._replace(last_ms=window.last_ms, rows=last.rows + count)
        else:
            found.append(window)
    return [window for window in found if window.rows >= fewest]


async def packed_share(connection: Connection, window: CompactionWindow, rows: int) -> float:
    """Estimate a segment's size as a share of its bodies and properties, from at most ``rows`` messages. Raises the
    driver's errors."""
    from delayer.store.segments import packing  # noqa: PLC0415 - pyarrow

    async with connection.transaction(readonly=True):
        await connection.execute(SETTINGS)
        rows = min(rows, await _fitting(connection, window, BYTES))
        unlocked = statements.read("lock_run").replace("FOR UPDATE SKIP LOCKED", "")
        bounds = (window.lane, window.first_ms, window.last_ms + 1, window.first_ms * 1000, -MAX_ID)
        found = await connection.fetch(unlocked, *bounds, rows, BYTES, LARGEST, *OCCURRENCES)
    if not found:
        return 0.0
    packed = packing.pack(packing.table_of(found))
    return len(packed.packed) / max(packed.raw_bytes, 1)


async def compact_one(
    connection: Connection,
    window: CompactionWindow,
    *,
    rows: int = ROWS,
    fewest: int = 0,
    max_bytes: int = BYTES,
    portion: int | None = None,
    pause: float = 0.0,
) -> Compacted | None:
    """Pack the first rows of ``window`` into a segment in one transaction; None if there are fewer than ``fewest``, or
    none. Call it again while ``more``, from the last due instant on. Locked rows, and rows of more than LARGEST bytes,
    stay rows. It locks and reads ``portion`` rows at a time, or all if None, pausing ``pause`` seconds after each.
    Raises the driver's errors, and SegmentBroken if the written segment is unreadable; then nothing is committed."""
    from delayer.store.segments import packing  # noqa: PLC0415 - pyarrow

    async with pool.transaction(connection):
        await connection.execute(SETTINGS)
        rows = min(rows, await _fitting(connection, window, max_bytes))
        found, more = await _lock(connection, window, (rows, max_bytes), portion or rows, pause)
        if not found or (len(found) < fewest and not more):
            return None
        reach("compact.locked")
        table = packing.table_of(found)
        packed = packing.pack(table)
        about = (packed.first_due_ms, packed.last_due_ms, packed.ids, packed.messages, packed.raw_bytes)
        segment: int = await connection.fetchval(
            statements.read("insert_segment"), window.lane, *about, FORMAT, packed.digest, packed.packed
        )
        reach("compact.written")
        await _verify(connection, segment, table)
        reach("compact.verified")
        ids = list(packed.ids)
        status = await connection.execute(
            statements.read("delete_run"), window.lane, window.first_ms, window.last_ms + 1, ids
        )
        if status != f"DELETE {packed.messages}":
            raise RuntimeError(f"segment of lane {window.lane}: {packed.messages} messages packed, but {status}")
        await keys.enter_segment(connection, segment, _keyed(found, ids))
        await add_counts(connection, Counter({(window.lane, "compacted"): packed.messages}))
        reach("compact.deleted")
    reach("compact.committed")
    return Compacted(segment, packed.messages, packed.last_due_ms, packed.raw_bytes, len(packed.packed), more)


def _keyed(found: Sequence[asyncpg.Record], ids: Sequence[int]) -> list[keys.PackedKey]:
    """The keys of the rows ``found``, packed in the order of ``ids``."""
    positions = {number: position for position, number in enumerate(ids)}
    return [
        keys.PackedKey(
            row["key"], row["id"], positions[row["id"]], row["parked_us"] // 1000, row["route"], row["to_exchange"],
            row["to_key"], len(row["properties"]) + len(row["body"]),
        )
        for row in found
        if row["key"] is not None
    ]  # fmt: skip


async def _lock(
    connection: Connection, window: CompactionWindow, limits: tuple[int, int], portion: int, pause: float
) -> tuple[list[asyncpg.Record], bool]:
    """Lock the first rows of a window, up to ``limits`` of rows and bytes. Also returns whether a limit was reached."""
    found: list[asyncpg.Record] = []
    rows, room = limits
    first_us, first_id = window.first_ms * 1000, -MAX_ID
    while rows > 0 and room > 0:
        wanted = min(portion, rows)
        bounds = (window.lane, first_us // 1000, window.last_ms + 1, first_us, first_id)
        some = await connection.fetch(statements.read("lock_run"), *bounds, wanted, room, LARGEST, *OCCURRENCES)
        found += some
        if not some or (some[-1]["locked"] < wanted and len(some) == some[-1]["locked"]):
            return found, False
        if len(some) < some[-1]["locked"]:
            break
        rows, room = rows - wanted, room - some[-1]["before"] - len(some[-1]["properties"]) - len(some[-1]["body"])
        first_us, first_id = some[-1]["due_us"], some[-1]["id"] + 1
        await asyncio.sleep(pause)
    return found, True


async def _fitting(connection: Connection, window: CompactionWindow, max_bytes: int) -> int:
    """Estimate generously how many rows fit ``max_bytes``, from the size of the window's first rows. Otherwise, large
    messages would lock ten thousand rows for each hundred that fit."""
    mean = await connection.fetchval(statements.read("mean_size"), window.lane, window.first_ms, window.last_ms + 1)
    return int(max_bytes / mean * 1.5) + 1 if mean else 1 << 31


async def _verify(connection: Connection, segment: int, table: Any) -> None:
    """Read the segment back from the store and compare its messages with ``table``. Raises SegmentBroken."""
    from delayer.store.segments import codec  # noqa: PLC0415 - pyarrow

    stored = await connection.fetchrow("SELECT packed, format, messages, digest FROM segment WHERE id = $1", segment)
    if not codec.unpack(*stored).equals(table):
        raise SegmentBroken("expected the messages that were packed, found others")
