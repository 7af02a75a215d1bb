"""`delayer restore`: segments become rows again, in bulk, without waiting for the daemons to do it.

The driver takes a lane in which nothing is due soon and holds its lock, executors restore into it (restore_work.py),
fenced by the lane's epoch. What is restored while it is ours is released by nobody; so the work goes in rounds, short
ones for what is due soon, and after each the lane is given up and adopted by a daemon if it needs one. If this process
dies, its lane is free, and what its executors still restore is refused from the moment that somebody takes the lane.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import asyncpg

from delayer.audit.restore_work import Back, work
from delayer.audit.watching import Say
from delayer.core.giving_way import Pace
from delayer.store import pagewise, partitions, schema, segments, session, traffic
from delayer.store.errors import DAMAGED, translated
from delayer.store.partitions import DAY_MS, Days
from delayer.store.quiet import quiet_lane
from delayer.store.segments import Fence, Listed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME: Final = "restoring"
SEGMENTS_PER_TASK: Final = 4
ROUND: Final = 240
"""Segments of a round: some 2 M messages, a minute's work on two cores, and within SOON_MS on the slowest machine."""
ROUND_BESIDE: Final = 40
"""The same beside traffic, where a segment takes a second, and with the longest rests ten."""
SHORT_ROUND: Final = 8
SOON_MS: Final = 600_000
"""What is due within this time from the beginning of a round is restored in short ones, without rests."""
PARTITION_PAUSE: Final = 0.1
"""Seconds between two partitions beside traffic: each stops it for as long as a release takes."""
PARTITION_SECONDS: Final = 20.0
"""For the making of partitions before a round; rows of a day without one wait in the default partition."""


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
    soon = [one for one in left[:SHORT_ROUND] if one.first_due_ms < now_ms + SOON_MS]
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
            part = next_round(left, now_ms)[: ROUND_BESIDE if pace.giving_way else ROUND]
            await _make_days(connection, part, now_ms // DAY_MS, pace)
    finally:
        await session.close(connection)
    return part, part[0].first_due_ms < now_ms + SOON_MS


async def _make_days(connection: asyncpg.Connection, part: Sequence[Listed], today: int, pace: Pace) -> None:
    wanted = {day for one in part for day in range(one.first_due_ms // DAY_MS, one.last_due_ms // DAY_MS + 1)}
    days = Days(await partitions.existing(connection))
    until = time.monotonic() + PARTITION_SECONDS
    while (now := time.monotonic()) < until and (missing := days.missing(wanted, today, now)):
        pace.look(await traffic.look(connection))
        await days.make(connection, missing[:1] if pace.giving_way else missing, today, now, until - now)
        if pace.giving_way:
            await asyncio.sleep(PARTITION_PAUSE)


async def _round(spark: SparkSession, url: str, part: Sequence[Listed], soon: bool, say: Say) -> list[Back]:
    """One round, in a lane that is ours meanwhile. The loop goes on beside Spark: it is what keeps the lane."""
    from delayer.audit import tasks  # noqa: PLC0415 - Spark, which a plan needs none of

    async with quiet_lane(url, f"restore {socket.gethostname()}:{os.getpid()}") as lane:
        fence = Fence(lane.number, lane.epoch)
        portions = tasks.portions([one.id for one in part], SEGMENTS_PER_TASK)
        try:
            return await asyncio.to_thread(tasks.run, spark, NAME, portions, partial(work, url, fence, soon=soon), say)
        except asyncio.CancelledError:
            tasks.cancel(spark, NAME)
            raise
        finally:
            # Where its next owner begins to look; also after an error, as some of them may be back.
            lane.note_parked(min(one.first_due_ms for one in part))
