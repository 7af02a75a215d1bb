"""`delayer restore`: segments become rows again, in bulk, without waiting for the daemons to do it.

Executors restore each segment into the lane that it came from (:func:`work`), and notify the lane's owner. The work
goes in rounds of some hundred segments.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import asyncpg

from delayer.audit import tasks
from delayer.audit.tasks import ExecutorTurns
from delayer.core.errors import StoreLost
from delayer.core.readable import Say
from delayer.core.segment import Broken, Restored
from delayer.core.units import DAY_MS
from delayer.store.admin.actions import make_missing
from delayer.store.admin.listing import looking
from delayer.store.errors import DAMAGED, DRIVER_ERRORS, WORTH_REPEATING, describe
from delayer.store.segments import catalog as segments
from delayer.store.segments.catalog import SegmentEntry

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SegmentRestore(NamedTuple):
    """The result of a segment. ``gone``: a daemon or another job was quicker. ``lost``, ``broken``: reasons."""

    segment: int
    messages: int
    gone: bool = False
    lost: str | None = None
    broken: str | None = None

    @property
    def restored(self) -> bool:
        return not (self.gone or self.lost or self.broken)


def work(url: str, portion: Iterable[tuple[int, int]]) -> list[SegmentRestore]:
    """On an executor: restore segments (id, first due instant) one after the other. Segments that are due soon take no
    turns."""
    return asyncio.run(tasks.each(url, "delayer restore", list(portion), restore_segment, _lost))


def _lost(of: tuple[int, int], one: SegmentRestore | None, reason: str) -> SegmentRestore:
    """A segment that was not begun, or whose commit is uncertain: it counts in no total."""
    if one is not None and not one.restored:
        return one
    perhaps = f"; perhaps its {one.messages} messages are restored" if one is not None else ""
    return SegmentRestore(of[0], 0, lost=reason + perhaps)


async def restore_segment(connection: asyncpg.Connection, of: tuple[int, int]) -> SegmentRestore:
    """Restore a segment (id, first due instant). A transaction that lost against another one is tried again."""
    segment, first_due_ms = of
    lost = ""
    # This machine's clock is exact enough for that.
    ours = ExecutorTurns(connection, hurried=first_due_ms < time.time() * 1000 + 600_000)
    for _ in range(5):
        try:
            async with ours.turn() as beside_traffic:
                found = await _restored(connection, segment, beside_traffic)
            if found is None:
                return SegmentRestore(segment, 0, gone=True)
            return (
                SegmentRestore(segment, 0, broken=found.reason)
                if isinstance(found, Broken)
                else SegmentRestore(segment, found.messages)
            )
        except WORTH_REPEATING as error:
            lost = describe(error)
        except DAMAGED as error:  # One damaged segment does not end the others' work.
            return SegmentRestore(segment, 0, broken=f"the store cannot read it, or write its rows: {describe(error)}")
        except DRIVER_ERRORS as error:
            return SegmentRestore(segment, 0, lost=describe(error))
        except StoreLost as error:  # The store is gone.
            return SegmentRestore(segment, 0, lost=str(error))
    return SegmentRestore(segment, 0, lost=lost)


async def _restored(connection: asyncpg.Connection, segment: int, beside_traffic: bool) -> Restored | Broken | None:
    """Restore a segment at once, or beside traffic in small portions with pauses, as daemons do."""
    from delayer.store.segments import restore  # noqa: PLC0415 - pyarrow

    if not beside_traffic:
        return await restore.restore(connection, segment)
    return await restore.restore(connection, segment, portion_bytes=restore.SMALL_PORTION_BYTES, pause=0.005)


class RestorePlan(NamedTuple):
    """The segments to restore, soonest first. ``now_ms``: by the store's clock, epoch milliseconds."""

    now_ms: int
    segments: Sequence[SegmentEntry]

    @property
    def messages(self) -> int:
        return sum(one.messages for one in self.segments)


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """The result of a job. ``seconds`` without the start of Spark."""

    back: Sequence[SegmentRestore]
    seconds: float

    @property
    def messages(self) -> int:
        return sum(one.messages for one in self.back)

    @property
    def segments(self) -> int:
        return sum(one.restored for one in self.back)

    @property
    def gone(self) -> int:
        return sum(one.gone for one in self.back)

    @property
    def lost(self) -> list[str]:
        return [one.lost for one in self.back if one.lost is not None]

    @property
    def broken(self) -> list[str]:
        return [f"segment {one.segment}: {one.broken}" for one in self.back if one.broken is not None]


async def plan(url: str, within_ms: int | None) -> RestorePlan:
    """The segments that are due within ``within_ms`` from now, or all. Raises StoreLost, BadStoreUrl,
    SchemaOutdated."""
    async with looking(url, "plan", "delayer restore plan") as connection:
        now_ms = await connection.fetchval("SELECT statement_timestamp()")
        before = None if within_ms is None else now_ms + within_ms
        return RestorePlan(now_ms, await segments.listed(connection, before))


def run(spark: SparkSession, url: str, planned: RestorePlan, say: Say) -> RestoreResult:
    """Restore the ``planned`` segments, some hundred at a time, until the store is lost. ``say`` hears the progress in
    segments. Raises JobFailed, StoreLost."""
    began = time.monotonic()
    back: list[SegmentRestore] = []
    for start in range(0, len(planned.segments), 240):
        part = planned.segments[start : start + 240]
        asyncio.run(_make_days(url, part))
        portions = tasks.portions([(one.id, one.first_due_ms) for one in part], 4)

        def told(name: str, done: int, of: int | None, start: int = start, count: int = len(part)) -> None:
            say(name, start + count * done // (of or 1), len(planned.segments))

        back += tasks.run(spark, "restoring", portions, partial(work, url), told)
        if any(one.lost for one in back):
            break
    return RestoreResult(back, time.monotonic() - began)


async def _make_days(url: str, part: Sequence[SegmentEntry]) -> None:
    """Make partitions for restored rows."""
    wanted = {day for one in part for day in range(one.first_due_ms // DAY_MS, one.last_due_ms // DAY_MS + 1)}
    async with looking(url, "make partitions", "delayer restore plan", {}) as connection:
        # With pauses, because each one stops the traffic for as long as a release takes.
        await make_missing(connection, wanted, 20.0, pause=0.1)
