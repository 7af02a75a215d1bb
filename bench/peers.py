"""The same work done by other programs: kombu's cascade, and a broker with the delayed-message plugin."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench.burst import HEADROOM, SLOWEST_PARK
from bench.native import SIZE, TRIP_RATE
from bench.park import LATEST_MS, SOONEST_MS
from bench.plain import Plain
from bench.rivals import ADDRESS
from bench.run import Bench, thousands
from bench.traffic import Helper

MODULE = "bench.rivals"
EXCHANGE, QUEUE = "bench.delayed", "bench.delayed"
LEAD_SECONDS = 1.5
"""Time for the helpers to start."""


async def kombu(bench: Bench) -> None:
    """kombu's native delayed delivery, as Celery 5.5 uses it."""
    count = thousands(bench.options.peers)
    vhost = await asyncio.to_thread(bench.servers.broker.add_vhost)
    url = bench.servers.broker.url(vhost)
    order = {"url": url, "size": SIZE}
    hours = (SOONEST_MS // 1000, LATEST_MS // 1000)
    bench.say(f"kombu's native delayed delivery, {count:,} messages")
    with Helper("kombu", order | {"count": count, "rate": 0, "seconds": hours}, MODULE) as helper:
        found = await helper.result()
    bench.add("kombu with countdown into its cascade", found["rate"], "msg/s")
    bench.add("CPU of kombu's publisher", found["cpu_us"], "µs/msg")

    few, many = 1, bench.options.trip_longest
    trips = TRIP_RATE * (bench.options.trip_seconds + many)
    bench.say(f"kombu's lateness, {TRIP_RATE} a second for {trips // TRIP_RATE} s")
    pace = {"count": trips, "rate": TRIP_RATE, "seconds": (few, many), "start": time.time() + 1.5}
    reading = {"url": url, "queue": ADDRESS, "count": trips, "patience": 20}
    with Helper("consume", reading) as consumer, Helper("kombu", order | pace, MODULE) as publisher:
        arrivals = (await asyncio.gather(publisher.result(), consumer.result()))[1]
    late(bench, "kombu", arrivals, rate=TRIP_RATE)


async def plugin(bench: Bench, rate: int) -> None:
    """The delayed-message plugin on the broker at ``plugin_url``, which the user of the bench runs: steady traffic."""
    seconds, longest_ms = bench.options.steady_seconds, bench.options.longest_delay * 1000
    bench.say(f"the delayed-message plugin, {rate:,} messages a second for {seconds} s")
    sending = {"start": time.time() + LEAD_SECONDS, "seconds": seconds, "delays_ms": (1000, longest_ms)}
    arrivals = await through_plugin(bench, rate, sending, count=rate * seconds, patience=longest_ms / 1000 + 20)
    late(bench, "plugin", arrivals, rate=rate)


async def plugin_burst(bench: Bench) -> None:
    """The same with very many messages that are due in one instant, as in bench/burst.py."""
    count = thousands(bench.options.burst)
    seconds = count / SLOWEST_PARK
    bench.say(f"the delayed-message plugin, {count:,} messages due in one instant")
    start = time.time() + LEAD_SECONDS
    due_ms = round((start + seconds + HEADROOM) * 1000)
    sending = {"start": start, "seconds": seconds, "due_ms": due_ms}
    arrivals = await through_plugin(bench, SLOWEST_PARK, sending, count=count, patience=seconds + 30)
    if arrivals["received"]:
        drained = (arrivals["last_ms"] - due_ms) / 1000
        bench.add("plugin, burst drained, from the due instant", drained, "s", count=count)


async def through_plugin(
    bench: Bench, rate: int, sending: dict[str, Any], *, count: int, patience: float
) -> dict[str, Any]:
    """Publish as ``sending`` says, through a fresh queue; return what the consumer saw."""
    plain = Plain(bench.options.plugin_url)
    try:
        plain.exchange(EXCHANGE, "x-delayed-message", x_delayed_type="topic")
        plain.fresh_queue(QUEUE, bind=EXCHANGE)
    finally:
        plain.close()
    order = {"url": bench.options.plugin_url, "queue": QUEUE, "size": SIZE, "rate": rate}
    reading = {"count": count, "patience": patience}
    with (
        Helper("consume", order | reading) as consumer,
        Helper("plugin", order | {"exchange": EXCHANGE} | sending, MODULE) as publisher,
    ):
        return dict((await asyncio.gather(publisher.result(), consumer.result()))[1])


def late(bench: Bench, peer: str, seen: dict[str, dict[str, float]], **at: int) -> None:
    """The lateness that the consumer saw."""
    for name, share in (("p50", "0.5"), ("p99", "0.99"), ("p99.9", "0.999"), ("max", "1.0")):
        if seen["late"]:
            bench.add(f"{peer}, lateness {name}", seen["late"][share], "ms", **at)


async def run(bench: Bench) -> None:
    await kombu(bench)
    if bench.options.plugin_url:
        for rate in bench.options.rates:
            await plugin(bench, rate)
        await plugin_burst(bench)
