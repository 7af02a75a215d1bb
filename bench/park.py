"""From `delays` to committed rows: the queue is filled while no daemon runs; then one starts and parks everything."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from bench.figures import median
from bench.meter import peak_mb
from bench.plain import Plain, message, number, portions, properties
from bench.rows import KEY
from bench.run import Bench
from bench.servers import IN, Place
from bench.watch import Counters, Course

DISTINCT = 1000
SOONEST_MS, LATEST_MS = 3 * 3_600_000, 24 * 3_600_000
"""Delays are of mixed lengths, as in production: rows go into all parts of the index, not at its end."""
CPU = ("daemon", "broker", "database")


def writes(size: int, due_ms: int | None = None, *, latest_ms: int = LATEST_MS) -> list[bytes]:
    """Messages for `delays`, all due at that instant, or after delays of up to ``latest_ms``."""
    chance = random.Random(0)
    delays = [number("x-delay", chance.randint(SOONEST_MS, latest_ms)) for _ in range(DISTINCT)]
    if due_ms is not None:
        delays = [number("x-deliver-at", due_ms)] * DISTINCT
    return portions([message(IN, KEY, properties(delay), b"x" * size) for delay in delays])


def fill(place: Place, count: int, size: int, due_ms: int | None = None, *, latest_ms: int = LATEST_MS) -> None:
    """Publish :func:`writes`."""
    plain = Plain(place.broker_url)
    plain.publish(writes(size, due_ms, latest_ms=latest_ms), count)
    plain.close()


async def once(place: Place, count: int, size: int, latest_ms: int = LATEST_MS) -> tuple[Course, float]:
    """Start the daemon once: the course of its parking, and its peak memory in MB."""
    await asyncio.to_thread(fill, place, count, size, latest_ms=latest_ms)
    async with await Counters.open(place) as counters, place.daemon() as daemon:
        course = await counters.follow("parked", count, daemon, place.meter(daemon))
        memory = peak_mb(daemon.pid)
        await daemon.stop()
    return course, memory


async def run(bench: Bench) -> None:
    await turns(bench, "park", once)


async def turns(bench: Bench, what: str, once: Callable[[Place, int, int], Awaitable[tuple[Course, float]]]) -> None:
    """Run ``once`` for each size and backlog, ``repeats`` times each, and report the medians."""
    for backlog, size in bench.loads:
        count = bench.options.count_of(size)
        place = await bench.place(backlog)
        courses, peaks = [], []
        for turn in range(bench.options.repeats):
            bench.say(f"{count:,} messages of {size:,} bytes, {backlog:,} rows waiting, turn {turn + 1}")
            course, memory = await once(place, count, size)
            courses.append(course)
            peaks.append(memory)
        report(bench, what, courses, peaks, body=size, backlog=backlog)


def report(bench: Bench, what: str, courses: list[Course], peaks: list[float], **at: int) -> None:
    """The medians of some turns: rate, CPU a message by process tree, memory of the daemon."""
    bench.add(what, median([course.rate for course in courses]), "msg/s", **at)
    for of in CPU:
        bench.add(f"CPU of {of}", median([course.cpu_us(of) for course in courses]), "µs/msg", **at)
    bench.add("memory of daemon", max(peaks), "MB", **at)
