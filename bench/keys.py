"""Messages with keys, next to plain ones in the same run: unique keys, messages that the next one cancels, few keys
that are replaced over and over, and many keys of which each replaces a waiting row."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator

from bench.figures import median
from bench.plain import PORTION, Plain, message, number, portions, properties, short
from bench.rows import KEY
from bench.run import Bench
from bench.servers import IN, Place
from bench.watch import Counters, Course

PLAIN = "plain"
FEW, MANY = 100, 10_000
KINDS = {
    PLAIN: "plain",
    "unique": "unique keys",
    "cancelled": "each cancelled by the next",
    "few": f"{FEW} keys replaced over and over",
    "rows": f"{MANY:,} keys that replace waiting rows",
}
DELAY_MS = 6 * 3_600_000


def text(name: str, value: str) -> bytes:
    """A header: a string."""
    return short(name) + b"S" + struct.pack(">I", len(value)) + value.encode()


def headers(kind: str, count: int) -> Iterator[bytes]:
    """The headers of each message."""
    delay = number("x-delay", DELAY_MS)
    for n in range(count):
        match kind:
            case "unique":
                yield delay + text("x-delay-key", f"order-{n}")
            case "cancelled":
                key = f"order-{n // 2}"
                yield text("x-delay-cancel", key) if n % 2 else delay + text("x-delay-key", key)
            case "few":
                yield delay + text("x-delay-key", f"order-{n % FEW}")
            case "rows":
                yield delay + text("x-delay-key", f"order-{n % MANY}")
            case _:
                yield delay


def fill(place: Place, kind: str, count: int, size: int) -> None:
    """Publish messages of this kind into `delays`."""
    body = b"x" * size
    plain = Plain(place.broker_url)
    plain.publish(portions([message(IN, KEY, properties(one), body) for one in headers(kind, count)]), count)
    plain.close()


async def once(place: Place, kind: str, count: int, size: int) -> Course:
    """Start the daemon once: the course of its parking."""
    before = MANY if kind == "rows" else 0
    await asyncio.to_thread(fill, place, kind, before + count, size)
    async with await Counters.open(place) as counters, place.daemon() as daemon:
        total = count // 2 if kind == "cancelled" else count
        if before:
            await counters.follow("parked", before, daemon)
        course = await counters.follow("parked", before + total, daemon, place.meter(daemon))
        await daemon.stop()
    course.samples = [(at, max(done - before, 0) * count / total) for at, done in course.samples]
    course.total = count
    return course


async def run(bench: Bench) -> None:
    size = bench.options.sizes[0]
    count = max(bench.options.count_of(size) // 2 // PORTION, 1) * PORTION
    for kind, what in KINDS.items():
        courses = []
        for turn in range(bench.options.repeats):
            bench.say(f"{count:,} messages, {what}, turn {turn + 1}")
            courses.append(await once(await bench.place(), kind, count, size))
        bench.add(what, median([course.rate for course in courses]), "msg/s", body=size)
