"""Programs commonly written or installed for the same job; each runs as a separate process:

    python -m bench.rivals kombu '{"url": …}'

They print a line of JSON, like bench/traffic.py.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import json
import math
import random
import re
import sys
import time
from typing import Any

import uvloop

from bench.figures import Sample, rate_between
from bench.marks import DUE_HEADER, NUMBER_HEADER, NUMBERED
from bench.plain import Plain, message, number, properties
from bench.rows import KEY
from bench.servers import OUT
from delayer.amqp.connection import Connection
from delayer.amqp.values import Delivery, Outgoing
from delayer.core.marks import ID

ADDRESS = "bench.kombu"
CLAIMED = 1000
GATHER_SECONDS = 0.005
TURN_SECONDS = 0.002
TICK = 0.01
DELAY = re.compile(rb"\x07x-delay[lL](.{8})", re.DOTALL)


class Course:
    """The progress of a rival with instants and CPU: the same part of it is measured as of the daemon's course."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.done = 0
        self._samples: list[Sample] = [(time.perf_counter(), 0.0)]
        self._cpu: list[Sample] = [(time.process_time(), 0.0)]

    def add(self, messages: int = 1) -> None:
        self.done += messages
        self._samples.append((time.perf_counter(), float(self.done)))
        self._cpu.append((time.process_time(), float(self.done)))

    def answer(self) -> dict[str, Any]:
        """Messages a second, and microseconds of CPU a message: the inverse of messages a second of CPU."""
        return {"rate": rate_between(self._samples, self.count), "cpu_us": 1e6 / rate_between(self._cpu, self.count)}


async def in_memory(order: dict[str, Any]) -> dict[str, Any]:
    """Our AMQP client and rhythm without a store: delays wait in a heap, and are lost with the process. The remaining
    lateness is the broker's: no program that reads ``queue`` and publishes at this rhythm is more punctual.
    """
    gc.disable()  # a collection would scan all waiting messages, and delay them
    waiting: list[tuple[int, int, Outgoing]] = []
    arrived: list[Delivery] = []
    reader = await Connection.open(order["url"], name="bench reader")
    writer = await Connection.open(order["url"], name="bench writer")
    reading = await reader.channel()
    await reading.qos(order["prefetch"])
    await reading.consume(order["queue"], arrived.append, lambda: None)
    print("consuming", flush=True)

    async def sort() -> None:
        while True:
            await asyncio.sleep(GATHER_SECONDS)
            batch = arrived[:]
            arrived.clear()
            now_ms, clock = time.time() * 1000, time.monotonic()
            for one in batch:
                found = NUMBERED.search(one.properties)
                asked_ms, n = (int.from_bytes(raw, "big") for raw in found.groups()) if found else (int(now_ms), 0)
                delay = DELAY.search(one.properties)
                read_ms = now_ms - (clock - one.read_at) * 1000
                due_ms = asked_ms if delay is None else math.ceil(read_ms + int.from_bytes(delay[1], "big"))
                content = properties(number(DUE_HEADER, asked_ms) + number(NUMBER_HEADER, n))
                out = Outgoing(OUT.encode(), one.routing_key, content, one.body, b"%d" % one.tag)
                heapq.heappush(waiting, (due_ms, one.tag, out))
            if batch:
                reading.ack(batch[-1].tag, multiple=True)

    async def send() -> None:
        channel = await writer.channel(token_header=ID)
        while True:
            await asyncio.sleep(TURN_SECONDS)
            now_ms = time.time_ns() // 1_000_000
            due: list[Outgoing] = []
            while waiting and waiting[0][0] <= now_ms and len(due) < CLAIMED:
                due.append(heapq.heappop(waiting)[2])
            await channel.publish(due, timeout=10)

    loops = [asyncio.create_task(sort()), *(asyncio.create_task(send()) for _ in range(2))]
    await asyncio.wait(loops, timeout=order["seconds"], return_when=asyncio.FIRST_EXCEPTION)
    for one in loops:
        one.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    await asyncio.gather(reader.close(), writer.close())
    return {"cpu_seconds": time.process_time()}


def kombu(order: dict[str, Any]) -> dict[str, Any]:
    """Publish with a countdown, as Celery does since 5.5: every publish waits for its confirm.

    ``rate`` is a pace to keep; 0 is as fast as it can.
    """
    from kombu import Connection, Exchange, Queue  # noqa: PLC0415 - of the extra "bench"
    from kombu.transport import native_delayed_delivery as delayed  # noqa: PLC0415

    chance = random.Random(3)
    few, many = order["seconds"]
    body = b"x" * order["size"]
    entry = delayed.level_name(delayed.MAX_LEVEL)
    options = {"confirm_publish": True}
    with Connection(order["url"], transport_options=options) as connection:
        channel = connection.default_channel
        delayed.declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
        exchange = Exchange(ADDRESS, type="topic")
        queue = Queue(ADDRESS, exchange, routing_key=ADDRESS, queue_arguments={"x-queue-type": "quorum"})
        queue.bind(channel).declare()
        delayed.bind_queue_to_native_delayed_delivery_exchange(connection, queue)
        producer = connection.Producer(channel)
        print("declared", flush=True)
        start = max(order.get("start", 0), time.time())
        course = Course(order["count"])
        for n in range(order["count"]):
            if order["rate"] and (pause := start + n / order["rate"] - time.time()) > 0:
                time.sleep(pause)
            seconds = chance.randint(few, many)
            producer.publish(
                body,
                exchange=entry,
                routing_key=delayed.calculate_routing_key(seconds, ADDRESS),
                headers={DUE_HEADER: round(time.time() * 1000) + seconds * 1000},
                content_type="application/octet-stream",
                content_encoding="binary",
            )
            course.add()
    return course.answer()


def plugin(order: dict[str, Any]) -> dict[str, Any]:
    """Publish ``rate`` messages a second to an x-delayed-message exchange, with delays between ``delays_ms``, or all
    due in the instant ``due_ms``."""
    each = max(round(order["rate"] * TICK), 1)
    chance = random.Random(1)
    few, many = order.get("delays_ms", (1, 2))
    plain = Plain(order["url"])
    ticks = round(order["seconds"] * order["rate"] / each)
    for tick in range(ticks):
        pause = order["start"] + tick * each / order["rate"] - time.time()
        if pause > 0:
            time.sleep(pause)
        now, writes = round(time.time() * 1000), []
        for n in range(tick * each, (tick + 1) * each):
            delay = order["due_ms"] - now if "due_ms" in order else chance.randrange(few, many)
            headers = number("x-delay", delay) + number(DUE_HEADER, now + delay) + number(NUMBER_HEADER, n)
            writes.append(message(order["exchange"], KEY, properties(headers), b"x" * order["size"]))
        plain.socket.sendall(b"".join(writes))
    plain.depth(order["queue"])
    plain.close()
    return {"sent": ticks * each}


def main() -> None:
    order = json.loads(sys.argv[2])
    verbs = {"in_memory": lambda: uvloop.run(in_memory(order)), "kombu": lambda: kombu(order)}
    verbs["plugin"] = lambda: plugin(order)
    print(json.dumps(verbs[sys.argv[1]]()))


if __name__ == "__main__":
    main()
