"""Native mode in one hop, compared with RabbitMQ 4.4's own delays on the same broker. Other brokers skip this section.

The broker alone: a publisher, one quorum queue that delays, and a consumer. In one hop the daemon reads each message,
gives it to the delaying due queue, reads it again, and publishes it. Store mode, and both together, have the same load.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench.marks import BROKER_HEADER, DAEMON_HEADER, distinct, due_at
from bench.native import DUE_QUEUE
from bench.plain import Plain, message, portions, properties
from bench.rows import KEY
from bench.run import Bench, thousands
from bench.servers import IN, INBOX, OUT, Place
from bench.steady import report, under_load
from bench.traffic import Helper
from delayer.core.cascade import Cascade
from delayer.core.message import Parcel, Target
from delayer.format.envelope import Endpoints, into_broker

SIZE = 512
QUEUE = "bench.delayed"
LONGEST_MS = 8000
ONE_HOP = {"NATIVE__STRATEGY": "queue"}
"""The daemon does not start with another strategy, should its probe fail on a busy machine."""
PARK_BEYOND = "4s"
"""With both together: half of these delays wait in the broker, half in the store."""
HEADROOM_SECONDS = 20.0
"""A burst is due so long after its first message: all of them must wait by then."""
FAR_MS = 86_400_000
"""The messages waiting during a burst are due in a day."""


async def run(bench: Bench) -> None:
    if not await asyncio.to_thread(lambda: bench.servers.broker.delays_messages):
        bench.note("this RabbitMQ delays no messages: that begins with 4.4")
        return
    native = await bench.servers.place("native")
    plain = Plain(native.broker_url)
    plain.fresh_queue(QUEUE)
    plain.close()
    await _steady(bench, native)
    count = thousands(bench.options.burst)
    for waiting in sorted({0, bench.options.waiting}):
        for name, delaying in (("broker alone, ", QUEUE), ("", "")):
            if waiting:
                bench.say(f"{waiting:,} messages that wait beside a burst: {name or 'one hop'}")
                await asyncio.to_thread(_fill, native, waiting, delaying)
            seen, due_ms, cpu = await _burst(bench, native, count, delaying)
            at = {"count": count, "backlog": waiting}
            bench.add(f"{name}drained, from the due instant", (seen["last_ms"] - due_ms) / 1000, "s", **at)
            bench.add(f"{name}early", seen["early"], "msg", **at)
            bench.add(f"{name}missing", count - seen["came"], "msg", **at)
            for of, spent in cpu.items():
                bench.add(f"{name}CPU of {of}", spent * 1e6 / count, "µs/msg", **at)
            await asyncio.to_thread(_purge, native, delaying or DUE_QUEUE.decode())


async def _steady(bench: Bench, native: Place) -> None:
    rate, seconds = bench.options.rates[0], bench.options.steady_seconds
    delays_ms = (1000, LONGEST_MS, 1)
    bench.say(f"{rate:,} messages a second for {seconds} s: the broker alone, one hop, the store, both")
    alone = await under_load(native, None, rate, seconds, delays_ms, delaying=QUEUE)
    report(bench, [alone], "broker alone, ", rate=rate)
    for name, mode, park_beyond in (("", "native", ""), ("store, ", "store", ""), ("both, ", "store", PARK_BEYOND)):
        place = native if mode == "native" else await bench.servers.place(mode)
        environ = {**ONE_HOP, **({"STORE__PARK_BEYOND": park_beyond} if park_beyond else {})}
        async with place.daemon(**environ) as daemon:
            await daemon.ready()
            turn = await under_load(place, daemon.pid, rate, seconds, delays_ms)
            await daemon.stop()
        report(bench, [turn], name, rate=rate)


async def _burst(bench: Bench, place: Place, count: int, delaying: str) -> tuple[dict[str, Any], int, dict[str, float]]:
    """``count`` messages due in one instant: the consumer's answer, the instant, and the CPU seconds from then on.
    ``delaying``: the queue that delays them; without it a daemon has it done."""
    bench.say(f"{count:,} messages of {SIZE} bytes due in one instant: {'the broker alone' if delaying else 'one hop'}")
    if not delaying:
        await asyncio.to_thread(place.fresh_inbox)
        async with place.daemon(**ONE_HOP) as daemon:
            await daemon.ready()
            found = await _due_together(bench, place, count, "", daemon.pid)
            await daemon.stop()
        return found
    return await _due_together(bench, place, count, delaying, None)


async def _due_together(
    bench: Bench, place: Place, count: int, delaying: str, daemon: int | None
) -> tuple[dict[str, Any], int, dict[str, float]]:
    due_ms = round((time.time() + HEADROOM_SECONDS) * 1000)
    way = {"exchange": "", "key": delaying, "header": BROKER_HEADER}
    if not delaying:
        way = {"exchange": IN, "key": KEY, "header": DAEMON_HEADER}
    order = {"url": place.broker_url, "size": SIZE, "count": count, "due_ms": due_ms, "spread_ms": 1}
    with Helper("flood", order | way) as publisher:
        await publisher.result()
    looking = Plain(place.broker_url)
    while daemon is not None and looking.depth("delays"):
        await asyncio.sleep(0.1)
    looking.close()
    spare = due_ms / 1000 - time.time()
    if spare < 1:
        bench.note("publishing took until the messages were due: the figures are not those of a burst")
    numbers = {"count": count, "distinct": distinct(count, SIZE)}
    reading = {"url": place.broker_url, "queue": delaying or INBOX, "patience": max(spare, 0) + 20, **numbers}
    with Helper("consume", reading) as consumer:
        await asyncio.sleep(max(due_ms / 1000 - time.time() - 0.2, 0))
        roots = {"consumer": consumer.pid} if daemon is None else {"consumer": consumer.pid, "daemon": daemon}
        meter = place.servers.meter(**roots)
        seen = await consumer.result()
        cpu = meter.read()
    return seen, due_ms, {name: spent for name, spent in cpu.items() if name in ("broker", "daemon")}


def _fill(place: Place, count: int, delaying: str) -> None:
    """Publish messages due in a day straight into the queue that delays them: as the daemon does it if it is ours."""
    due_ms, body = round(time.time() * 1000) + FAR_MS, b"x" * SIZE
    plain = Plain(place.broker_url)
    if delaying:
        one = message("", delaying, due_at(due_ms, 0, BROKER_HEADER), body)
    else:
        source, target = IN.encode(), Target(OUT.encode(), KEY.encode())
        parcel = Parcel(due_ms, source, source, KEY.encode(), target, properties(b""), body)
        names = Endpoints(Cascade(), DUE_QUEUE, b"delays.refused", 100_000, broker_delays=True)
        out = into_broker(parcel, b"0" * 32, due_ms, FAR_MS // 1000, names)
        one = message(out.exchange.decode(), out.routing_key.decode(), out.properties, out.body)
    plain.publish(portions([one] * 250), count)
    plain.close()


def _purge(place: Place, queue: str) -> None:
    plain = Plain(place.broker_url)
    plain.purge(queue)
    plain.close()
