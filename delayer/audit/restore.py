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
from delayer.audit.tasks import Say, Turns
from delayer.core.errors import StoreLost
from delayer.core.segment import Broken, Restored
from delayer.store import pool, schema
from delayer.store.errors import DAMAGED, DRIVER_ERRORS, WORTH_REPEATING, describe, translated
from delayer.store.rows import partitions
from delayer.store.rows.days import DAY_MS, existing
from delayer.store.segments import catalog as segments
from delayer.store.segments.catalog import Listed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Back(NamedTuple):
    """The result of a segment. ``gone``: a daemon or another job was quicker. ``lost``, ``broken``: reasons."""

    segment: int
    messages: int
    gone: bool = False
    lost: str | None = None
    broken: str | None = None

    @property
    def restored(self) -> bool:
        return not (self.gone or self.lost or self.broken)


def work(url: str, portion: Iterable[tuple[int, int]]) -> list[Back]:
    """On an executor: restore segments (id, first due instant) one after the other. Segments that are due soon take no
    turns."""
    return asyncio.run(_work(url, list(portion)))


async def _work(url: str, portion: Sequence[tuple[int, int]]) -> list[Back]:
    try:
        connection = await pool.connect(url, "delayer restore", {**tasks.SESSION, **tasks.LAZY})
    except StoreLost as error:
        return [Back(one, 0, lost=str(error)) for one, _ in portion]
    back: list[Back] = []
    try:
        for one, first_due_ms in portion:
            soon = first_due_ms < time.time() * 1000 + 600_000  # This machine's clock is exact enough for that.
            back.append(await restore_segment(connection, one, Turns(connection, hurried=soon)))
        await tasks.flush(connection)
    except DRIVER_ERRORS as error:  # Mostly of the flush: the last restores may be undone.
        return [_perhaps(one, describe(error)) if one.restored else one for one in back]
    else:
        return back
    finally:
        await pool.close(connection)


async def restore_segment(connection: asyncpg.Connection, segment: int, ours: Turns | None = None) -> Back:
    """Restore one segment. A transaction that lost against another one is tried again."""
    lost = ""
    ours = ours or Turns(connection, hurried=True)
    for _ in range(5):
        try:
            async with ours.turn() as beside_traffic:
                found = await _restored(connection, segment, beside_traffic)
            return Back(segment, 0, gone=True) if found is None else _back(segment, found)
        except WORTH_REPEATING as error:
            lost = describe(error)
        except DAMAGED as error:  # One damaged segment does not end the others' work.
            return Back(segment, 0, broken=f"the store cannot read it, or write its rows: {describe(error)}")
        except DRIVER_ERRORS as error:
            return Back(segment, 0, lost=describe(error))
        except StoreLost as error:  # The store is gone.
            return Back(segment, 0, lost=str(error))
    return Back(segment, 0, lost=lost)


async def _restored(connection: asyncpg.Connection, segment: int, beside_traffic: bool) -> Restored | Broken | None:
    """Restore a segment at once, or beside traffic in small portions with pauses, as daemons do."""
    if not beside_traffic:
        return await segments.restore(connection, segment)
    return await segments.restore(connection, segment, portion_bytes=segments.SMALL_PORTION_BYTES, pause=0.005)


def _perhaps(one: Back, reason: str) -> Back:
    """A segment whose commit is uncertain counts in no total."""
    return Back(one.segment, 0, lost=f"{reason}; perhaps its {one.messages} messages are restored")


def _back(segment: int, found: Restored | Broken) -> Back:
    match found:
        case Broken():
            return Back(segment, 0, broken=found.reason)
        case Restored():
            return Back(segment, found.messages)


class Plan(NamedTuple):
    """The segments to restore, soonest first. ``now_ms``: by the store's clock, epoch milliseconds."""

    now_ms: int
    segments: Sequence[Listed]

    @property
    def messages(self) -> int:
        return sum(one.messages for one in self.segments)


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a job. ``seconds`` without the start of Spark."""

    back: Sequence[Back]
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


async def plan(url: str, within_ms: int | None) -> Plan:
    """The segments that are due within ``within_ms`` from now, or all. Raises StoreLost, BadStoreUrl,
    SchemaOutdated."""
    connection = await pool.connect(url, "delayer restore plan")
    try:
        with translated("plan"):
            await schema.check(connection)
            now_ms = await connection.fetchval("SELECT statement_timestamp()")
            before = None if within_ms is None else now_ms + within_ms
            return Plan(now_ms, await segments.listed(connection, before))
    finally:
        await pool.close(connection)


def run(spark: SparkSession, url: str, planned: Plan, say: Say) -> Done:
    """Restore the ``planned`` segments, some hundred at a time, until the store is lost. ``say`` hears the progress in
    segments. Raises JobFailed, StoreLost."""
    began = time.monotonic()
    back: list[Back] = []
    for start in range(0, len(planned.segments), 240):
        part = planned.segments[start : start + 240]
        asyncio.run(_make_days(url, part))
        portions = tasks.portions([(one.id, one.first_due_ms) for one in part], 4)

        def told(name: str, done: int, of: int, start: int = start, count: int = len(part)) -> None:
            say(name, start + count * done // max(of, 1), len(planned.segments))

        back += tasks.run(spark, "restoring", portions, partial(work, url), told)
        if any(one.lost for one in back):
            break
    return Done(back, time.monotonic() - began)


async def _make_days(url: str, part: Sequence[Listed]) -> None:
    """Make partitions for restored rows. A row of a day without one goes into the default partition."""
    wanted = {day for one in part for day in range(one.first_due_ms // DAY_MS, one.last_due_ms // DAY_MS + 1)}
    connection = await pool.connect(url, "delayer restore plan")
    try:
        with translated("make partitions"):
            today = await connection.fetchval("SELECT statement_timestamp()") // DAY_MS
            days = partitions.Days(await existing(connection))
            until = time.monotonic() + 20.0
            # One at a time, with a pause, because each stops the traffic for as long as a release takes.
            while (now := time.monotonic()) < until and (missing := days.missing(wanted, today, now)):
                await days.make(connection, missing[:1], today, now, until - now)
                await asyncio.sleep(0.1)
    finally:
        await pool.close(connection)
