"""The current rates of broker and database alone on this machine: no daemon could be faster.

The best of several tries is used, because other work on the machine can only lower a measured ceiling.
"""

from __future__ import annotations

import asyncio

import asyncpg

from bench.figures import rate_between
from bench.plain import PORTION, Plain, message, number, properties
from bench.rows import sample_row
from bench.run import Bench
from bench.servers import Place
from delayer.format.rows import COLUMNS

BATCH = 2000
SESSIONS = (1, 2, 3)
"""The daemon has several parks in flight; the quickest of these numbers is the ceiling."""
PUBLISH, CONSUME, COPY = "broker publish, confirmed", "broker consume", "store copy"
COPY_COLUMNS = (*COLUMNS, "id")


def broker(place: Place, kind: str, count: int, size: int) -> tuple[float, float]:
    """Confirmed publishes and consumed messages a second, one after the other, through one queue of that kind."""
    queue = f"bench.ceiling.{kind}"
    plain = Plain(place.broker_url)
    try:
        plain.fresh_queue(queue, kind)
        one = message("", queue, properties(number("x-delay", 3_600_000)), b"x" * size)
        published = plain.publish([one * PORTION], count)
    finally:
        plain.close()
    reader = Plain(place.broker_url)
    try:
        consumed = reader.consume(queue, count)
        reader.fresh_queue(queue, kind)
    finally:
        reader.close()
    return rate_between(published, count), rate_between(consumed, count)


async def copy(url: str, count: int, size: int, sessions: int) -> float:
    """Rows a second of binary COPY into a table shaped like one partition, through parallel sessions. Every batch is a
    transaction, and the rows are generated beforehand.
    """
    connections = [await asyncpg.connect(url) for _ in range(sessions)]
    try:
        first, *_ = connections
        await first.execute("CREATE TABLE bench_copy (LIKE message INCLUDING ALL)")
        due = await first.fetchval("SELECT now()")
        _, *rest = sample_row(size)
        batches = [[(due, *rest, start + n) for n in range(BATCH)] for start in range(0, count, BATCH)]
        await first.execute("CHECKPOINT")
        clock = asyncio.get_running_loop().time
        samples = [(clock(), 0.0)]

        async def write(connection: asyncpg.Connection) -> None:
            while batches:
                batch = batches.pop()
                await connection.copy_records_to_table("bench_copy", records=batch, columns=COPY_COLUMNS)
                samples.append((clock(), samples[-1][1] + len(batch)))

        await asyncio.gather(*map(write, connections))
        await first.execute("DROP TABLE bench_copy")
        return rate_between(samples, samples[-1][1])
    finally:
        for connection in connections:
            await connection.close()


async def run(bench: Bench) -> None:
    place = await bench.place()
    for size in bench.options.sizes:
        count = bench.options.count_of(size)
        for kind in ("quorum", "classic"):
            bench.say(f"{count:,} messages of {size:,} bytes through a {kind} queue")
            tries = [await asyncio.to_thread(broker, place, kind, count, size) for _ in range(bench.options.repeats)]
            of = "" if kind == "quorum" else ", classic"
            bench.add(PUBLISH + of, max(published for published, _ in tries), "msg/s", body=size)
            bench.add(CONSUME + of, max(consumed for _, consumed in tries), "msg/s", body=size)
        bench.say(f"COPY of {count:,} rows of {size:,} bytes")
        tries_of = [sessions for sessions in SESSIONS for _ in range(bench.options.repeats)]
        copies = [await copy(place.store_url, count, size, sessions) for sessions in tries_of]
        bench.add(COPY, max(copies), "rows/s", body=size)
