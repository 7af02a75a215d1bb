"""`delayer compact`: pack rows due in the far future into segments.

The driver cuts the backlog into windows, and executors pack them (:func:`work`). At the end, the partitions that lost
rows are shrunk (store/admin/shrink.py). All state is in the store, so a killed job or task is simply rerun.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from asyncpg import Connection

from delayer.audit import tasks
from delayer.audit.errors import JobMisused
from delayer.core.errors import StoreLost
from delayer.core.readable import Say
from delayer.core.segment import SegmentBroken
from delayer.core.units import DAY_MS, HOUR_MS
from delayer.store import pool
from delayer.store.admin import shrink
from delayer.store.admin.traffic import Traffic
from delayer.store.errors import DRIVER_ERRORS, WORTH_REPEATING, check_arrow, describe
from delayer.store.segments import compact
from delayer.store.segments.compact import Compacted, CompactionWindow
from delayer.store.session import read_connection

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from delayer.store.admin.shrink import ShrinkResult

_traffic = Traffic()
"""One per process, because a Spark worker runs many tasks in sequence."""


class PackedWindow(NamedTuple):
    """A window with the segments ``made`` of it. ``lost``: why the store was unreachable. ``broken``: why a segment
    failed verification and was dropped."""

    window: CompactionWindow
    made: Sequence[Compacted] = ()
    lost: str | None = None
    broken: str | None = None


def work(url: str, rows: int, fewest: int, windows: Iterable[CompactionWindow]) -> list[PackedWindow]:
    """Pack ``windows`` in sequence, on an executor."""
    return asyncio.run(_pack(url, rows, fewest, list(windows)))


async def _pack(url: str, rows: int, fewest: int, windows: Sequence[CompactionWindow]) -> list[PackedWindow]:
    """Pack ``windows`` on one store session."""
    try:
        connection = await pool.connect(url, "delayer compact", tasks.SESSION)
    except StoreLost as error:
        return [PackedWindow(window, lost=str(error)) for window in windows]
    try:
        return [await pack_window(connection, window, rows, fewest) for window in windows]
    finally:
        await pool.close(connection)


async def pack_window(connection: Connection, window: CompactionWindow, rows: int, fewest: int) -> PackedWindow:
    """Pack ``window`` in order of due times. Skips rows that a restore adds behind the current position, which the job
    would otherwise repack until shortly before they are due."""
    made: list[Compacted] = []
    lost = broken = None
    attempts, rest = 0, window
    # A window that loses against other transactions gets five attempts.
    while attempts < 5:
        try:
            async with tasks.turn(connection, _traffic) as beside_traffic:
                # Under load, lock 1,000 rows at a time: 10 ms of server time and 1 MB of WAL.
                portion = 1_000 if beside_traffic else None
                one = await compact.compact_one(connection, rest, rows=rows, fewest=fewest, portion=portion, pause=0.01)
                if one is not None:
                    made.append(one)  # Committed, even if ending the turn then fails.
        except WORTH_REPEATING as error:
            attempts += 1
            lost = describe(error)
            continue
        except DRIVER_ERRORS as error:
            lost = describe(error)
            break
        except SegmentBroken as error:
            broken = f"lane {window.lane}, due from {window.first_ms}: {error}"
            break
        lost, attempts = None, 0
        if one is None or not one.more:
            break
        rest = rest._replace(first_ms=one.last_due_ms)
    return PackedWindow(window, made, lost, broken)


_NUMBERS: Final = """
SELECT lane, floor(extract(epoch FROM due_at) / 3600)::int, count(*) FILTER (WHERE taken),
       coalesce(sum(size) FILTER (WHERE taken), 0)::bigint, coalesce(sum(stored) FILTER (WHERE taken), 0)::bigint,
       count(key) FILTER (WHERE taken), count(*) FILTER (WHERE NOT taken)
FROM (
    SELECT lane, due_at, key, size, stored, size <= $2 AS taken
    FROM message, LATERAL (
        SELECT octet_length(body) + octet_length(properties) AS size, pg_column_size(body) + pg_column_size(properties)
    ) AS sized (size, stored)
    WHERE due_at > $1
) AS looked_at GROUP BY 1, 2
"""
_MAY: Final = "SELECT has_table_privilege('segment', 'INSERT')"
_RIGHTS: Final = "run it with a URL of the role that owns the schema (docs/security.md, Postgres: two roles)"


_PATIENT: Final = {"statement_timeout": "0"}

# For the estimate of what a compaction saves and costs. bench/backlog.py measured these bytes.
ROW_BYTES: Final = 250
"""Bytes of a row on disk, not counting its body and properties: other columns, row header and index entry."""
LOG_BYTES: Final = 300
"""WAL bytes for packing or restoring a message, not counting its content as a row and its share of the segment.
Postgres logs each page in full when it first changes after a checkpoint, so packing logs the rows."""
SEGMENT_SHARE: Final = 1.08
"""Bytes on disk per byte of a segment, which Postgres stores in pieces of 2 kB."""
KEY_BYTES: Final = 70
"""Bytes that a row of message_key grows by when its message is packed, measured with 18-byte keys."""
KEY_LOG_BYTES: Final = 400
"""WAL bytes for that."""
LOG_KEPT_MS: Final = 7 * DAY_MS
"""How long archived WAL is kept, for :attr:`Gain.pays_after_ms`."""


class CompactionPlan(NamedTuple):
    """A job's plan. Instants are epoch milliseconds by the store's clock."""

    now_ms: int
    after_ms: int
    windows: Sequence[CompactionWindow]
    fewest: int
    """Minimum number of messages in a segment."""


class Gain(NamedTuple):
    """``packed_bytes``: of the segments. ``saved_bytes``: on disk, and in each backup that copies files. ``log_bytes``:
    WAL for packing, and about as much again for restoring. ``pays_after_ms``: the delay from which a message saves more
    bytes times days than its WAL costs, which is kept for LOG_KEPT_MS; None if segments are no smaller than rows."""

    packed_bytes: int
    saved_bytes: int
    log_bytes: int
    pays_after_ms: int | None


class Numbers(NamedTuple):
    """The figures of a dry run, counted row by row; ``segments`` is an estimate."""

    messages: int
    segments: int
    few: int
    """Rows left unpacked because too few are due together."""
    keyed: int
    """How many of ``messages`` have a key."""
    large: int
    """Rows of more than compact.LARGEST bytes, also left unpacked."""
    raw_bytes: int
    disk_bytes: int
    """Bytes of all waiting rows, including those due soon, and of their indexes."""
    gain: Gain


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """The result of a job. ``seconds``: time spent packing, without starting Spark and shrinking partitions."""

    packed: Sequence[PackedWindow]
    shrunk: ShrinkResult
    seconds: float
    shrink_seconds: float

    @property
    def totals(self) -> dict[str, int]:
        made = [one for window in self.packed for one in window.made]
        names = ("messages", "raw_bytes", "packed_bytes")
        return {"segments": len(made), **{name: sum(getattr(one, name) for one in made) for name in names}}

    @property
    def lost(self) -> list[str]:
        return [one.lost for one in self.packed if one.lost is not None]

    @property
    def broken(self) -> list[str]:
        return [one.broken for one in self.packed if one.broken is not None]


def check_after(after_ms: int, restore_ahead_ms: int) -> None:
    """Raise JobMisused if daemons would restore the segments at once."""
    from delayer.config.texts import duration_text  # noqa: PLC0415 - executors load this module, and need no settings

    if after_ms <= restore_ahead_ms:
        raise JobMisused(
            f"--after {duration_text(after_ms)}: expected more than store.restore_ahead, which is "
            f"{duration_text(restore_ahead_ms)}: daemons restore messages within it, and would undo the work at once"
        )


async def plan(url: str, after_ms: int, rows: int, fewest: int = 0) -> CompactionPlan:
    """Cut the messages due more than ``after_ms`` from now into windows, without a JVM. Raises BadStoreUrl,
    SchemaOutdated, and StoreLost, even if this role lacks the rights to compact."""
    async with read_connection(url, "plan", "delayer compact plan", _PATIENT) as connection:
        if not await connection.fetchval(_MAY):
            user = await connection.fetchval("SELECT current_user")
            raise StoreLost(f"the role {user} may not write segments", _RIGHTS)
        now_ms = await connection.fetchval("SELECT statement_timestamp()")
        windows = await compact.windows(connection, now_ms + after_ms, rows, fewest)
        return CompactionPlan(now_ms, now_ms + after_ms, windows, fewest)


async def numbers(url: str, planned: CompactionPlan, rows: int) -> Numbers:
    """Count the rows of ``planned``, and pack part of the fullest window without storing it. Raises StoreLost."""
    check_arrow()
    async with read_connection(url, "plan", "delayer compact plan", _PATIENT) as connection:
        found = await connection.fetch(_NUMBERS, planned.after_ms, compact.LARGEST, timeout=DAY_MS / 1000)
        disk_bytes = await shrink.size(connection)
        fullest = max(planned.windows, key=lambda window: window.rows, default=None)
        ratio = await compact.packed_share(connection, fullest, rows) if fullest else 0.0
    hours = {(lane, hour): figures for lane, hour, *figures in found}
    messages = segments = raw_bytes = stored_bytes = keyed = 0
    for window in planned.windows:
        span = range(window.first_ms // HOUR_MS, window.last_ms // HOUR_MS + 1)
        inside = [hours[window.lane, hour] for hour in span if (window.lane, hour) in hours]
        taken, size, stored, with_key = (sum(one[at] for one in inside) for at in (0, 1, 2, 3))
        if taken >= planned.fewest or size >= compact.BYTES:
            keyed += with_key
            messages, raw_bytes, stored_bytes = messages + taken, raw_bytes + size, stored_bytes + stored
            segments += -(-max(taken * compact.BYTES, size * rows) // (rows * compact.BYTES))
    whole, large = (sum(one[at] for one in hours.values()) for at in (0, 4))
    gain = estimated(messages, stored_bytes, round(raw_bytes * ratio), keyed)
    return Numbers(messages, segments, whole - messages, keyed, large, raw_bytes, disk_bytes, gain)


def estimated(messages: int, stored_bytes: int, packed_bytes: int, keyed: int = 0) -> Gain:
    """Estimate packing ``messages`` (``keyed`` with a key) whose bodies and properties take ``stored_bytes``."""
    saved = stored_bytes + messages * ROW_BYTES - round(packed_bytes * SEGMENT_SHARE) - keyed * KEY_BYTES
    log = stored_bytes + packed_bytes + messages * LOG_BYTES + keyed * KEY_LOG_BYTES
    pays = LOG_KEPT_MS * 2 * log // saved if saved > 0 else None
    return Gain(packed_bytes, saved, log, pays)


def run(spark: SparkSession, url: str, planned: CompactionPlan, rows: int, say: Say) -> CompactionResult:
    """Execute the plan. ``say`` gets the step and its progress. Raises JobFailed, StoreLost."""
    tasks.check_executor(spark, say)
    began = time.monotonic()
    # Windows repeated, at most, if a worker dies. A task costs about 50 ms of overhead, a window half a second.
    portions = [planned.windows[start : start + 4] for start in range(0, len(planned.windows), 4)]
    packed = tasks.run(spark, "packing", portions, partial(work, url, rows, planned.fewest), say)
    return finish(url, planned, packed, time.monotonic() - began, partial(say, "giving room back"))


def finish(
    url: str, planned: CompactionPlan, packed: Sequence[PackedWindow], seconds: float, say: Callable[[int, int], None]
) -> CompactionResult:
    """Shrink the partitions of ``packed`` windows, whose packing took ``seconds``. Raises StoreLost."""
    began = time.monotonic()
    windows = [one.window for one in packed if one.made or one.lost]  # A lost commit may have emptied a day.
    touched = {day for one in windows for day in range(one.first_ms // DAY_MS, one.last_ms // DAY_MS + 1)}
    shrunk = asyncio.run(shrink.shrink(url, touched, planned.now_ms // DAY_MS, say))
    return CompactionResult(packed, shrunk, seconds, time.monotonic() - began)
