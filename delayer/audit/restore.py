"""`delayer restore`: segments become rows again, in bulk, without waiting for the daemons to do it.

Executors restore each segment into the lane that it came from (:func:`work`), and notify the lane's owner. The work
goes in rounds, short ones for what is due soon.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import asyncpg

from delayer.audit import tasks
from delayer.audit.tasks import Say, Turns
from delayer.core.errors import StoreLost
from delayer.core.giving_way import Pace
from delayer.core.segment import Broken, Restored
from delayer.store import pagewise, schema, segments, session, traffic
from delayer.store.days import DAY_MS
from delayer.store.errors import DAMAGED, DRIVER_ERRORS, WORTH_REPEATING, describe, translated
from delayer.store.segments import Listed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PATIENCE: Final = 0.1
"""Seconds to wait for somebody else's lock, twice as long each time: 3 s in all."""


class Back(NamedTuple):
    """What became of a segment. ``gone``: a daemon, or another job, was quicker. ``locked``: another session has it,
    and whether that one restores it nobody knows yet. ``lost``, ``broken``: reasons."""

    segment: int
    messages: int
    gone: bool = False
    locked: bool = False
    lost: str | None = None
    broken: str | None = None

    @property
    def restored(self) -> bool:
        return not (self.gone or self.locked or self.lost or self.broken)


def work(url: str, ids: Iterable[int], *, soon: bool = False) -> list[Back]:
    """On an executor: restore the segments ``ids``, one after the other; in a hurry if they are due ``soon``."""
    return asyncio.run(_work(url, soon, list(ids)))


async def _work(url: str, soon: bool, ids: Sequence[int]) -> list[Back]:
    try:
        connection = await session.connect(url, "delayer restore", {**tasks.SESSION, **session.LAZY})
    except StoreLost as error:
        return [Back(one, 0, lost=str(error)) for one in ids]
    back: list[Back] = []
    try:
        ours = Turns(connection, hurried=soon)
        for one in ids:
            back.append(await restore_segment(connection, one, ours))
        await session.flush(connection)
    except DRIVER_ERRORS as error:  # of the flush: perhaps the last of them are undone
        return [_perhaps(one, describe(error)) if one.restored else one for one in back]
    else:
        return back
    finally:
        await session.close(connection)


async def restore_segment(connection: asyncpg.Connection, segment: int, ours: Turns | None = None) -> Back:
    """Restore one segment. A transaction that lost against another one is tried again, and so is a segment that
    another session has locked: a daemon that is about to restore it, or one that died and whose end the server sees
    later than we do."""
    lost: str | None = None
    ours = ours or Turns(connection, hurried=True)
    for attempt in range(5):
        try:
            async with ours.turn() as pace:
                found = await _restored(connection, segment, pace)
            if found is not None:
                return _back(segment, found)
            lost = None
            if not await segments.exists(connection, segment):
                return Back(segment, 0, gone=True)
            await asyncio.sleep(PATIENCE * 2**attempt)
        except WORTH_REPEATING as error:
            lost = describe(error)
        except DAMAGED as error:  # it ends nobody else's work
            return Back(segment, 0, broken=f"the store cannot read it, or write its rows: {describe(error)}")
        except DRIVER_ERRORS as error:
            return Back(segment, 0, lost=describe(error))
        except StoreLost as error:  # the store is gone
            return Back(segment, 0, lost=str(error))
    return Back(segment, 0, locked=lost is None, lost=lost)


async def _restored(connection: asyncpg.Connection, segment: int, pace: Pace) -> Restored | Broken | None:
    """At once, or in small portions with pauses, as daemons do it."""
    if not pace.giving_way:
        return await segments.restore(connection, segment)
    # Seconds after each portion of rows beside traffic, by Pace.share of them; a portion takes about as long.
    return await segments.restore(
        connection, segment, portion_bytes=segments.SMALL_PORTION_BYTES, pause=0.005 * pace.share
    )


def _perhaps(one: Back, reason: str) -> Back:
    """What is not sure to be kept is in no total."""
    return Back(one.segment, 0, lost=f"{reason}; perhaps its {one.messages} messages are restored")


def _back(segment: int, found: Restored | Broken) -> Back:
    match found:
        case Broken():
            return Back(segment, 0, broken=f"{found.reason}; {found.advice}" if found.newer else found.reason)
        case Restored():
            return Back(segment, found.messages)


NAME: Final = "restoring"
ROUND: Final = 240
"""Segments of a round: some 2 M messages, a minute's work on two cores, and within SOON_MS on the slowest machine."""
SOON_MS: Final = 600_000
"""What is due within this time from the beginning of a round is restored in short ones, without rests."""


class Plan(NamedTuple):
    """The segments to restore, soonest first. ``now_ms``: by the store's clock, epoch milliseconds. ``unreadable``:
    damaged pages of the table, whose segments nobody knows."""

    now_ms: int
    segments: Sequence[Listed]
    unreadable: Sequence[str] = ()

    @property
    def messages(self) -> int:
        return sum(one.live for one in self.segments)


@dataclass(frozen=True, slots=True)
class Done:
    """What a job did. ``seconds`` without the start of Spark. ``unreadable``: of the plan."""

    back: Sequence[Back]
    seconds: float
    unreadable: Sequence[str] = ()

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
    def locked(self) -> list[int]:
        return [one.segment for one in self.back if one.locked]

    @property
    def lost(self) -> list[str]:
        return [one.lost for one in self.back if one.lost is not None]

    @property
    def broken(self) -> list[str]:
        broken = [f"segment {one.segment}: {one.broken}" for one in self.back if one.broken is not None]
        return [*self.unreadable, *broken]


async def plan(url: str, within_ms: int | None) -> Plan:
    """What is due within ``within_ms`` from now, or all of it. Raises StoreLost, BadStoreUrl, SchemaOutdated."""
    connection = await session.connect(url, "delayer restore plan")
    try:
        with translated("plan"):
            await schema.check(connection)
            now_ms = await connection.fetchval("SELECT statement_timestamp()")
            before = None if within_ms is None else now_ms + within_ms
            try:
                return Plan(now_ms, await segments.listed(connection, before))
            except DAMAGED:  # a page of the table
                return Plan(now_ms, *await pagewise.listed(connection, before))
    finally:
        await session.close(connection)


def next_round(left: Sequence[Listed], now_ms: int) -> Sequence[Listed]:
    """The segments of the next round, out of those that are ``left``: few while they are due soon."""
    soon = [one for one in left[:8] if one.first_due_ms < now_ms + SOON_MS]
    return soon or left[:ROUND]


def run(spark: SparkSession, url: str, planned: Plan, say: Say) -> Done:
    """Restore what is ``planned``; ends after a round in which the store was lost. ``say`` hears how far it is, in
    segments. Raises JobFailed, StoreLost."""
    began = time.monotonic()
    back: list[Back] = []
    left = planned.segments
    while left and not any(one.lost for one in back):
        # Cut when it begins: starting Spark, and the rounds before this one, take minutes.
        part, soon = asyncio.run(_prepare(url, left))
        left = left[len(part) :]
        done = len(back)

        def told(name: str, tasks_done: int, of: int, done: int = done, count: int = len(part)) -> None:
            say(name, done + count * tasks_done // max(of, 1), len(planned.segments))

        back += asyncio.run(_round(spark, url, part, soon, told))
    return Done(back, time.monotonic() - began, planned.unreadable)


async def _prepare(url: str, left: Sequence[Listed]) -> tuple[Sequence[Listed], bool]:
    """The next round, by the store's time, with partitions for what comes back; and whether it is due soon."""
    connection = await session.connect(url, "delayer restore plan")
    try:
        with translated("make partitions"):
            now_ms = await connection.fetchval("SELECT statement_timestamp()")
            pace = Pace()
            pace.look(await traffic.look(connection))
            # The same beside traffic, where a segment takes a second, and with the longest rests ten.
            part = next_round(left, now_ms)[: 40 if pace.giving_way else ROUND]
            await _make_days(connection, part, now_ms // DAY_MS, pace)
    finally:
        await session.close(connection)
    return part, part[0].first_due_ms < now_ms + SOON_MS


async def _make_days(connection: asyncpg.Connection, part: Sequence[Listed], today: int, pace: Pace) -> None:
    from delayer.store import partitions  # noqa: PLC0415 - structlog, which executors need not load

    wanted = {day for one in part for day in range(one.first_due_ms // DAY_MS, one.last_due_ms // DAY_MS + 1)}
    days = partitions.Days(await partitions.existing(connection))
    # For the making of partitions before a round; rows of a day without one wait in the default partition.
    until = time.monotonic() + 20.0
    while (now := time.monotonic()) < until and (missing := days.missing(wanted, today, now)):
        pace.look(await traffic.look(connection))
        await days.make(connection, missing[:1] if pace.giving_way else missing, today, now, until - now)
        if pace.giving_way:
            # Seconds between two partitions beside traffic: each stops it for as long as a release takes.
            await asyncio.sleep(0.1)


async def _round(spark: SparkSession, url: str, part: Sequence[Listed], soon: bool, say: Say) -> list[Back]:
    """One round. The loop goes on beside Spark."""

    portions = tasks.portions([one.id for one in part], 4)
    try:
        return await asyncio.to_thread(tasks.run, spark, NAME, portions, partial(work, url, soon=soon), say)
    except asyncio.CancelledError:
        tasks.cancel(spark, NAME)
        raise
