"""Into the cascade: through the daemon, and by a client that publishes the same frames directly; then whole trips.

Delays are hours long while rates are measured, so that nothing is released. The trips are short and few: each
hop of the cascade costs the broker as much as another message.
"""

from __future__ import annotations

import asyncio
import random

from bench import park
from bench.figures import FIRST, LAST, median, rate_between
from bench.park import CPU, LATEST_MS, SOONEST_MS
from bench.plain import Plain, message, number, portions, properties
from bench.rows import KEY
from bench.run import Bench, thousands
from bench.servers import IN, OUT, Place
from bench.steady import once as steady_once
from bench.watch import Course, follow
from delayer.core.cascade import Cascade, routing_key
from delayer.core.message import Parcel, Target
from delayer.format.envelope import envelope_properties

SIZE = 512
DUE_QUEUE = b"delays.due"
TRIP_RATE = 300
LEVELS = range((SOONEST_MS // 1000).bit_length() - 1, (LATEST_MS // 1000).bit_length())
"""The levels that these delays enter."""


def carrier(seconds: int, body: bytes) -> bytes:
    """The frames that the daemon would publish for such a message."""
    told = properties(number("x-delay", seconds * 1000))
    parcel = Parcel(0, IN.encode(), IN.encode(), KEY.encode(), Target(OUT.encode(), KEY.encode()), told, body)
    key = routing_key(seconds, DUE_QUEUE).decode()
    return message(Cascade().entry(seconds), key, envelope_properties(parcel, b"0" * 32), body)


def carriers(few_ms: int, many_ms: int, distinct: int = 1000, seed: int = 1) -> list[bytes]:
    chance = random.Random(seed)
    body = b"x" * SIZE
    return [carrier(chance.randint(few_ms // 1000, many_ms // 1000), body) for _ in range(distinct)]


def empty(place: Place) -> None:
    """Empty the filled levels."""
    plain = Plain(place.broker_url)
    for level in LEVELS:
        plain.purge(Cascade().level(level))
    plain.close()


async def straight(place: Place, count: int) -> Course:
    """The client without a daemon."""
    plain = Plain(place.broker_url)
    writes = portions(carriers(SOONEST_MS, LATEST_MS))
    meter = place.servers.meter()
    samples = await asyncio.to_thread(plain.publish, writes, count)
    # The client's own samples give its rate; the CPU covers the whole run, per message as in the other courses.
    cpu = {name: spent * (LAST - FIRST) for name, spent in meter.read().items()}
    plain.close()
    await asyncio.to_thread(empty, place)
    return Course(count, samples, cpu)


async def through(place: Place, count: int) -> Course:
    """Fill `delays` while no daemon runs, start one, and poll the levels until all messages are in them."""
    await asyncio.to_thread(park.fill, place, count, SIZE)
    looking = Plain(place.broker_url)

    async def depth() -> int:
        return sum(looking.depth(Cascade().level(level)) for level in LEVELS)

    async with place.daemon() as daemon:
        course = await follow(depth, count, daemon, place.meter(daemon))
        await daemon.stop()
    looking.close()
    await asyncio.to_thread(empty, place)
    return course


async def run(bench: Bench) -> None:
    count = thousands(bench.options.native)
    place = await bench.servers.place("native")
    bench.say(f"{count:,} messages straight into the cascade, and through the daemon")
    courses: list[tuple[Course, Course]] = []
    for _ in range(bench.options.repeats):
        courses.append((await straight(place, count), await through(place, count)))
    client, daemon = [one for one, _ in courses], [one for _, one in courses]
    bench.add("straight client into the cascade", median([rate_between(one.samples, count) for one in client]), "msg/s")
    bench.add("CPU of broker, straight client", median([one.cpu_us("broker") for one in client]), "µs/msg")
    bench.add("into the cascade", median([one.rate for one in daemon]), "msg/s")
    for of in CPU[:2]:
        bench.add(f"CPU of {of}", median([one.cpu_us(of) for one in daemon]), "µs/msg")
    seconds = bench.options.trip_seconds
    longest = bench.options.trip_longest
    bench.say(f"whole trips, {TRIP_RATE} a second for {seconds} s with delays of 1 to {longest} s")
    trip = await steady_once(place, TRIP_RATE, seconds, (1000, longest * 1000, 1))
    for name, share in (("p50", "0.5"), ("p99", "0.99"), ("max", "1.0")):
        if trip.seen["late"]:
            bench.add(f"lateness {name}", trip.seen["late"][share], "ms", rate=TRIP_RATE)
    bench.add("early", trip.seen["early"], "msg", rate=TRIP_RATE)
    bench.add("missing", trip.missing, "msg", rate=TRIP_RATE)
    for of in CPU[:2]:
        bench.add(f"CPU of {of}", trip.cpu_us[of], "µs/msg", rate=TRIP_RATE)
