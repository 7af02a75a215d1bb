"""Two daemons release what one active consumer parked, next to one daemon alone. All messages are due at one instant,
late enough to go to the lanes of both."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack
from typing import NamedTuple

from bench.figures import median, rate_between
from bench.meter import Neighbours, cpu_seconds, tree
from bench.park import fill
from bench.run import Bench
from bench.servers import Place
from bench.watch import Counters, Course, follow

AHEAD_MS = 130_000
"""Later than two minutes after the last message is parked."""


class Drained(NamedTuple):
    """The course of the releases, and a daemon's smallest share of lanes. ``cpu_us``: of daemons, servers and
    publisher, for each message from the due instant to the end. ``free_cores``: what other programs left."""

    course: Course
    share: float
    cpu_us: float
    free_cores: float

    @property
    def whole_rate(self) -> float:
        """Messages a second from the due instant to the end."""
        return rate_between(self.course.samples, self.course.total, 0.0, 1.0)


async def once(place: Place, count: int, size: int, daemons: int, *, publishing: bool = False) -> Drained:
    """Park with the first of this many daemons, and release with all. ``publishing``: publish and park as many again
    meanwhile; the course then counts messages of both, whichever are fewer."""
    async with AsyncExitStack() as stack:
        counters = await stack.enter_async_context(await Counters.open(place))
        running = []
        for _ in range(daemons):
            running.append(await stack.enter_async_context(place.daemon()))
            await running[-1].ready()
        due_ms = round(time.time() * 1000) + AHEAD_MS
        await asyncio.to_thread(fill, place, count, size, due_ms)
        await counters.follow("parked", count, running[0])
        rows = await counters.connection.fetch(
            "SELECT l.owner, count(*) FROM message JOIN lane AS l ON l.number = lane GROUP BY 1"
        )

        async def done() -> int:
            released = await counters.since("released")
            return min(released, await counters.since("parked") - count) if publishing else released

        await asyncio.sleep(due_ms / 1000 - time.time())
        before, neighbours = _spent(), Neighbours()
        filling = asyncio.create_task(asyncio.to_thread(_fill_timed, place, count if publishing else 0, size))
        course = await follow(done, count, running[0])
        spent, busy = _spent() - before + await filling, neighbours.cores()
        for daemon in running:
            await daemon.stop()
    share = min(n for _, n in rows) / count if len(rows) == daemons else 0.0
    return Drained(course, share, spent * 1e6 / count, (os.cpu_count() or 1) - busy)


def _spent() -> float:
    """CPU seconds of daemons and servers: this process's descendants."""
    return cpu_seconds(tree(os.getpid())) - time.process_time()


def _fill_timed(place: Place, count: int, size: int) -> float:
    """CPU seconds of the publisher."""
    began = time.thread_time()
    fill(place, count, size)
    return time.thread_time() - began


async def run(bench: Bench) -> None:
    size = bench.options.sizes[0]
    count = bench.options.count_of(size)
    for daemons in (1, 2):
        courses, shares = [], []
        for turn in range(bench.options.repeats):
            bench.say(f"{count:,} messages due at once, {daemons} daemons, turn {turn + 1}")
            drained = await once(await bench.place(), count, size, daemons)
            courses.append(drained.course)
            shares.append(drained.share)
        bench.add("release", median([course.rate for course in courses]), "msg/s", body=size, daemons=daemons)
        bench.add("least share of a daemon", min(shares), "", body=size, daemons=daemons)
