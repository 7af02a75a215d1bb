"""From due rows to confirmed publishes: the rows are put there while no daemon runs; then one starts and sends them."""

from __future__ import annotations

import asyncio

from bench import rows
from bench.meter import peak_mb
from bench.park import report
from bench.run import Bench
from bench.servers import Place
from bench.watch import Counters, Course

ALL_DUE_SECONDS = 1.1
LANES = 2
"""Of one daemon process, by default."""


async def once(place: Place, count: int, size: int, workers: int = 1) -> tuple[Course, float, list[float]]:
    """One start of the daemon: how it released, its peak memory in MB, and each worker's share."""
    await asyncio.to_thread(place.fresh_inbox)
    async with await Counters.open(place) as counters:
        await rows.put_due(counters.connection, count, size, LANES * workers)
        await asyncio.sleep(ALL_DUE_SECONDS)
        async with place.daemon(workers) as daemon:
            course = await counters.follow("released", count, daemon, place.meter(daemon))
            memory, shares = peak_mb(daemon.pid), await counters.shares("released")
            await daemon.stop()
    return course, memory, shares


async def run(bench: Bench) -> None:
    for backlog in bench.backlogs:
        for size in bench.options.sizes:
            count = bench.options.count_of(size)
            place = await bench.place(backlog)
            courses, peaks = [], []
            for turn in range(bench.options.repeats):
                bench.say(f"{count:,} rows of {size:,} bytes, {backlog:,} more waiting, turn {turn + 1}")
                course, memory, _ = await once(place, count, size)
                courses.append(course)
                peaks.append(memory)
            report(bench, "release", courses, peaks, body=size, backlog=backlog)
