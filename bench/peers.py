"""The same work done by what people write or install for it (bench/rivals.py), on the same servers."""

from __future__ import annotations

import asyncio
import random
import time

import asyncpg

from bench.native import SIZE, TRIP_RATE
from bench.park import LATEST_MS, SOONEST_MS
from bench.plain import Plain, message, number, portions, properties
from bench.rivals import ADDRESS, QUEUE
from bench.rows import KEY
from bench.run import Bench, thousands
from bench.servers import Place
from bench.traffic import Helper

MODULE = "bench.rivals"
POLLED_BACKLOG = 1_000_000
_TABLE = """
CREATE TABLE bench_queue (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, due_at timestamptz NOT NULL, routing_key text NOT NULL,
    properties bytea NOT NULL, body bytea NOT NULL
);
ALTER TABLE bench_queue ALTER COLUMN body SET STORAGE EXTERNAL;
CREATE INDEX ON bench_queue (due_at);
"""
_ROWS = """
INSERT INTO bench_queue (due_at, routing_key, properties, body)
SELECT now() + {due}, $2, $3, $4 FROM generate_series(1, $1::int) AS n
"""
_FAR = "interval '3 hours' + random() * interval '60 days'"
_PAST = "(n % 1000 - 1000) * interval '1 ms'"


def _fill(place: Place, count: int) -> None:
    chance = random.Random(4)
    delays = [number("x-delay", chance.randint(SOONEST_MS, LATEST_MS)) for _ in range(1000)]
    plain = Plain(place.broker_url)
    plain.fresh_queue(QUEUE)
    plain.publish(portions([message("", QUEUE, properties(delay), b"x" * SIZE) for delay in delays]), count)
    plain.close()


async def relay(bench: Bench) -> None:
    count = thousands(bench.options.peers)
    place = await bench.servers.place("native")
    bench.say(f"a relay over aio-pika, {count:,} messages")
    await asyncio.to_thread(_fill, place, count)
    with Helper("relay", {"url": place.broker_url, "count": count}, MODULE) as helper:
        meter = place.servers.meter()
        found = await helper.result()
        cpu = meter.read()
    bench.add("aio-pika relay into the cascade", found["rate"], "msg/s")
    bench.add("CPU of the relay", found["cpu_us"], "µs/msg")
    bench.add("CPU of broker, relay", cpu["broker"] * 1e6 / count, "µs/msg")


async def kombu(bench: Bench) -> None:
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
        meter = bench.servers.meter()
        _, seen = await asyncio.gather(publisher.result(), consumer.result())
        cpu = meter.read()
    for name, share in (("p50", "0.5"), ("p99", "0.99"), ("max", "1.0")):
        if seen["late"]:
            bench.add(f"kombu lateness {name}", seen["late"][share], "ms", rate=TRIP_RATE)
    bench.add("kombu early", seen["early"], "msg", rate=TRIP_RATE)
    bench.add("CPU of broker, kombu", cpu["broker"] * 1e6 / trips, "µs/msg", rate=TRIP_RATE)


async def poller(bench: Bench) -> None:
    count = bench.options.count_of(SIZE)
    backlog = min(bench.options.backlog, POLLED_BACKLOG)
    place = await bench.place()
    bench.say(f"a SKIP LOCKED poller, {count:,} rows due, {backlog:,} more waiting")
    connection = await asyncpg.connect(place.store_url)
    try:
        await connection.execute(_TABLE)
        row = (KEY, properties(number("x-delay", 3_600_000)), b"x" * SIZE)
        await connection.execute(_ROWS.format(due=_FAR), backlog, *row, timeout=None)
        await connection.execute(_ROWS.format(due=_PAST), count, *row, timeout=None)
        await connection.execute("VACUUM (ANALYZE) bench_queue", timeout=None)
        await connection.execute("CHECKPOINT", timeout=None)
    finally:
        await connection.close()
    order = {"url": place.broker_url, "store_url": place.store_url, "count": count}
    with Helper("poller", order, MODULE) as helper:
        found = await helper.result()
    bench.add("SKIP LOCKED poller over one table, release", found["rate"], "msg/s", backlog=backlog)
    bench.add("CPU of the poller", found["cpu_us"], "µs/msg", backlog=backlog)


async def run(bench: Bench) -> None:
    await relay(bench)
    await kombu(bench)
    await poller(bench)
