"""Very many messages due in one instant, parked beforehand by the same daemon: the time until all are out."""

from __future__ import annotations

import asyncio
import time

from bench.marks import distinct
from bench.meter import peak_mb
from bench.rows import KEY
from bench.run import Bench, thousands
from bench.servers import IN, INBOX
from bench.traffic import Helper
from bench.watch import Counters

SIZE = 512
SLOWEST_PARK = 6000
"""Messages a second that publishing and parking together are expected to reach; the instant is chosen by it."""
HEADROOM = 2.5


async def run(bench: Bench) -> None:
    count = thousands(bench.options.burst)
    place = await bench.place()
    async with await Counters.open(place) as counters, place.daemon() as daemon:
        await daemon.ready()
        due = round((time.time() + count / SLOWEST_PARK + HEADROOM) * 1000)
        bench.say(f"parking {count:,} messages of {SIZE} bytes")
        target = {"url": place.broker_url, "exchange": IN, "key": KEY, "size": SIZE}
        plan = {"count": count, "due_ms": due, "spread_ms": 1}
        with Helper("flood", target | plan) as publisher:
            await publisher.result()
        await counters.follow("parked", count, daemon)
        spare = due / 1000 - time.time()
        bench.add("parked before it is due", spare, "s", count=count)
        if spare < 0:
            bench.note("parking took until the messages were due: the figures are not those of a burst")
        numbers = {"count": count, "distinct": distinct(count, SIZE)}
        order = {"url": place.broker_url, "queue": INBOX, "patience": max(spare, 0) + 30, **numbers}
        with Helper("consume", order) as consumer:
            bench.say(f"{count:,} messages are due in {max(spare, 0):.0f} s")
            await asyncio.sleep(max(due / 1000 - time.time() - 0.1, 0))
            meter = place.meter(daemon, consumer=consumer.pid)
            await counters.follow("released", count, daemon)
            cpu = meter.read()
            seen = await consumer.result()
        memory = peak_mb(daemon.pid)
        await daemon.stop()
    if seen["received"]:
        drained = (seen["last_ms"] - due) / 1000
        bench.add("drained, from the first due instant", drained, "s", count=count)
        bench.add("rate", count / max(drained, 1e-9), "msg/s", count=count)
    for name, share in (("p50", "0.5"), ("p99", "0.99"), ("max", "1.0")):
        if seen["late"]:
            bench.add(f"lateness {name}", seen["late"][share], "ms", count=count)
    bench.add("early", seen["early"], "msg", count=count)
    bench.add("missing", count - seen["came"], "msg", count=count)
    for of, spent in cpu.items():
        bench.add(f"CPU of {of}", spent * 1e6 / count, "µs/msg", count=count)
    bench.add("memory of daemon", memory, "MB", count=count)
