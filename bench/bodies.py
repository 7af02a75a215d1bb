"""Large bodies: memory is bounded by bytes and not only by count."""

from __future__ import annotations

import asyncio
import time

from bench.marks import distinct
from bench.meter import peak_mb
from bench.rows import KEY
from bench.run import Bench
from bench.servers import IN, INBOX
from bench.traffic import Helper
from bench.watch import Counters

SIZE = 1_000_000
LEAD_SECONDS = 2.0
SLOWEST_PARK, SLOWEST_RELEASE = 125, 80
"""Bodies a second that are trusted in when their instants are chosen: parking and releasing go on side by side, which
takes the most memory. What came too late to be parked would not count: how many were parked is told."""
IN_FLIGHT = 16


async def run(bench: Bench) -> None:
    count = bench.options.large
    place = await bench.place()
    bench.say(f"{count:,} bodies of 1 MB")
    async with await Counters.open(place) as counters, place.daemon() as daemon:
        await daemon.ready()
        reading = {"url": place.broker_url, "queue": INBOX, "count": count, "patience": 60}
        reading |= {"distinct": distinct(count, SIZE, 1)}
        plan = {
            "count": count,
            "due_ms": round((time.time() + LEAD_SECONDS + count / SLOWEST_PARK) * 1000),
            "spread_ms": round(count / SLOWEST_RELEASE * 1000),
        }
        target = {"url": place.broker_url, "exchange": IN, "key": KEY, "size": SIZE, "each": 1, "window": IN_FLIGHT}
        with Helper("consume", reading) as consumer, Helper("flood", target | plan) as publisher:
            began = time.time()
            _, seen = await asyncio.gather(publisher.result(), consumer.result())
        memory = peak_mb(daemon.pid)
        parked = await counters.since("parked")
        await daemon.stop()
    bench.add("passed within", seen["last_ms"] / 1000 - began, "s", count=count, body=SIZE)
    bench.add("parked", parked, "msg", count=count, body=SIZE)
    bench.add("missing", count - seen["came"], "msg", count=count, body=SIZE)
    bench.add("early", seen["early"], "msg", count=count, body=SIZE)
    bench.add("memory of daemon", memory, "MB", count=count, body=SIZE)
