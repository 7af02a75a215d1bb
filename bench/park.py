"""From `delays` to committed rows: the queue is filled while no daemon runs; then one starts and parks everything."""

from __future__ import annotations

import asyncio
import random

from bench.figures import median
from bench.meter import peak_mb
from bench.plain import Plain, message, number, portions, properties
from bench.rows import KEY
from bench.run import Bench
from bench.servers import IN, Place
from bench.watch import Counters, Course

DISTINCT = 1000
SOONEST_MS, LATEST_MS = 3 * 3_600_000, 24 * 3_600_000
"""Delays are of mixed lengths, as they are in life: rows go into the index here and there, and not at its end."""
CPU = ("daemon", "broker", "database")


def fill(place: Place, count: int, size: int, seed: int = 0) -> None:
    """Messages into `delays`."""
    chance = random.Random(seed)
    body = b"x" * size
    delays = [number("x-delay", chance.randint(SOONEST_MS, LATEST_MS)) for _ in range(DISTINCT)]
    plain = Plain(place.broker_url)
    plain.publish(portions([message(IN, KEY, properties(delay), body) for delay in delays]), count)
    plain.close()


async def once(place: Place, count: int, size: int, workers: int = 1) -> tuple[Course, float, list[float]]:
    """One start of the daemon: how it parked, its peak memory in MB, and each worker's share."""
    await asyncio.to_thread(fill, place, count, size)
    async with await Counters.open(place) as counters, place.daemon(workers) as daemon:
        course = await counters.follow("parked", count, daemon, place.meter(daemon))
        memory, shares = peak_mb(daemon.pid), await counters.shares("parked")
        await daemon.stop()
    return course, memory, shares


async def run(bench: Bench) -> None:
    for backlog in bench.backlogs:
        for size in bench.options.sizes:
            count = bench.options.count_of(size)
            place = await bench.place(backlog)
            courses, peaks = [], []
            for turn in range(bench.options.repeats):
                bench.say(f"{count:,} messages of {size:,} bytes, {backlog:,} rows waiting, turn {turn + 1}")
                course, memory, _ = await once(place, count, size)
                courses.append(course)
                peaks.append(memory)
            report(bench, "park", courses, peaks, body=size, backlog=backlog)


def report(bench: Bench, what: str, courses: list[Course], peaks: list[float], **at: int) -> None:
    """The medians of some turns: rate, CPU a message by process tree, memory of the daemon."""
    bench.add(what, median([course.rate for course in courses]), "msg/s", **at)
    for of in CPU:
        bench.add(f"CPU of {of}", median([course.cpu_us(of) for course in courses]), "µs/msg", **at)
    bench.add("memory of daemon", max(peaks), "MB", **at)
