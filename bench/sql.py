"""Messages sent by SQL: the rate of the function next to a plain INSERT, and the rate at which a daemon moves the inbox
into the backlog, next to parking as many messages from `delays`."""

from __future__ import annotations

import random
from collections.abc import Sequence

import asyncpg

from bench import park
from bench.figures import median
from bench.park import DISTINCT, LATEST_MS, SOONEST_MS
from bench.rows import KEY
from bench.run import Bench
from bench.servers import IN, Place
from bench.watch import Counters, Course

PORTION = 1_000
"""Messages of one transaction."""
INSERT, SEND, MOVE, PARK = "plain INSERT", "delayer_send", "inbox into the store", "`delays` into the store"
_SEND = "SELECT delayer_send($1, $2::bytea, $3 * interval '1 ms', exchange => $4)"
_LIKE = "CREATE TABLE bench_inbox (LIKE delayer_inbox INCLUDING ALL)"
_INSERT = (
    "INSERT INTO bench_inbox (exchange, routing_key, headers, properties, body)"
    " SELECT exchange, routing_key, headers, properties, body FROM delayer_inbox WHERE id = $1"
)


async def write(connection: asyncpg.Connection, statement: str, rows: Sequence[tuple[object, ...]]) -> float:
    """Run a statement once for each of these rows, in portions. Returns the rows a second."""
    begun: float = await connection.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
    for start in range(0, len(rows), PORTION):
        async with connection.transaction():
            await connection.executemany(statement, rows[start : start + PORTION])
    ended: float = await connection.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
    return len(rows) / (ended - begun)


async def once(place: Place, count: int, size: int) -> tuple[float, float, Course]:
    """Send while no daemon runs, then start one: the rates of a plain INSERT and of the function, and the course of the
    move."""
    chance, body = random.Random(0), b"x" * size
    delays = [chance.randint(SOONEST_MS, LATEST_MS) for _ in range(DISTINCT)]
    rows = [(KEY, body, delays[n % DISTINCT], IN) for n in range(count)]
    connection = await asyncpg.connect(place.store_url)
    try:
        sent = await write(connection, _SEND, rows)
        first: int = await connection.fetchval("SELECT min(id) FROM delayer_inbox")
        await connection.execute(_LIKE)
        inserted = await write(connection, _INSERT, [(first,)] * count)
        await connection.execute("DROP TABLE bench_inbox")
        await connection.execute("CHECKPOINT")
    finally:
        await connection.close()
    async with await Counters.open(place) as counters, place.daemon() as daemon:
        course = await counters.follow("parked", count, daemon, place.meter(daemon))
        await daemon.stop()
    return inserted, sent, course


async def run(bench: Bench) -> None:
    for size in bench.options.sizes:
        count = bench.options.count_of(size) // 2
        turns, parked = [], []
        for turn in range(bench.options.repeats):
            bench.say(f"{count:,} messages of {size:,} bytes, turn {turn + 1}")
            turns.append(await once(await bench.place(), count, size))
            course, _ = await park.once(await bench.place(), count, size)
            parked.append(course.rate)
        inserted, sent, courses = zip(*turns, strict=True)
        rates = {INSERT: inserted, SEND: sent, MOVE: [course.rate for course in courses], PARK: parked}
        for what, found in rates.items():
            bench.add(what, median(list(found)), "msg/s", body=size)
        for of in park.CPU:
            bench.add(f"CPU of {of}", median([course.cpu_us(of) for course in courses]), "µs/msg", body=size)
