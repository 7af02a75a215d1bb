"""Two daemons release what one active consumer parked, next to one daemon alone. All messages are due at one instant,
late enough to go to the lanes of both."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

from bench.figures import median
from bench.park import fill
from bench.run import Bench
from bench.servers import Place
from bench.watch import Counters, Course

AHEAD_MS = 130_000
"""Later than two minutes after the last message is parked."""


async def once(place: Place, count: int, size: int, daemons: int) -> tuple[Course, float]:
    """Park with the first of this many daemons, and release with all: the course, and a daemon's smallest share of
    lanes."""
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
        await asyncio.sleep(due_ms / 1000 - time.time() - 1.0)
        course = await counters.follow("released", count, running[0], place.meter(running[0]))
        for daemon in running:
            await daemon.stop()
    return course, min(n for _, n in rows) / count if len(rows) == daemons else 0.0


async def run(bench: Bench) -> None:
    size = bench.options.sizes[0]
    count = bench.options.count_of(size)
    for daemons in (1, 2):
        courses, shares = [], []
        for turn in range(bench.options.repeats):
            bench.say(f"{count:,} messages due at once, {daemons} daemons, turn {turn + 1}")
            course, share = await once(await bench.place(), count, size, daemons)
            courses.append(course)
            shares.append(share)
        bench.add("release", median([course.rate for course in courses]), "msg/s", body=size, daemons=daemons)
        bench.add("least share of a daemon", min(shares), "", body=size, daemons=daemons)
