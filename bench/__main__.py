"""`make bench`: how fast messages are parked and released, beside what broker and database can do by themselves.

Every figure of a run comes from the same servers on the same machine within a minute; the ratios are what to keep.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path

import aio_pika
import asyncpg
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.plain import Plain, publish_frames
from tests.rig.daemon import DaemonProcess
from tests.rig.stack import Stack, running_stack

RESULTS = Path(__file__).parent / "results" / "latest.json"
COPY_BATCH = 2000
HEADROOM = 6.0
"""Seconds between the end of the filling and the instant at which everything is due: parking must be over by then."""
SLOWEST_PARK = 8000
"""Messages a second that parking is trusted to reach when that instant is chosen."""
QUEUE = {"x-queue-type": "quorum"}


async def declare(broker_url: str) -> None:
    connection = await aio_pika.connect(broker_url)
    async with connection:
        channel = await connection.channel()
        await channel.declare_queue("bench.ceiling", durable=True, arguments=QUEUE)
        inbox = await channel.declare_queue("bench.inbox", durable=True, arguments=QUEUE)
        out = await channel.declare_exchange("delayer.out", aio_pika.ExchangeType.TOPIC, durable=True)
        await inbox.bind(out, "#")


def ceilings(broker_url: str, count: int, size: int) -> dict[str, float]:
    """The broker's confirmed publish and consume rates, on a quorum queue."""
    plain = Plain(broker_url)
    published = plain.publish(publish_frames("", "bench.ceiling", b"", b"x" * size), count)
    consumed = plain.consume("bench.ceiling", count)
    plain.close()
    return {"broker publish, confirmed": published, "broker consume": consumed}


async def copy_ceiling(store_url: str, count: int, size: int) -> float:
    """Rows a second of COPY into a table shaped like the store's, in batches, each its own transaction."""
    connection = await asyncpg.connect(store_url)
    try:
        await connection.execute("CREATE TABLE bench_copy (LIKE message INCLUDING ALL)")
        due = datetime.now(UTC)
        body, name, properties = b"x" * size, b"delayer.in", b"\x30\x00" + b"p" * 30
        columns = ["id", "lane", "due_at", "format", "route", "exchange", "routing_key", "to_exchange", "to_key"]
        columns += ["properties", "body", "checksum"]
        started = time.perf_counter()
        for first in range(0, count, COPY_BATCH):
            rows = [
                (first + n, 1, due, 1, name, name, b"key", b"delayer.out", b"key", properties, body, 0)
                for n in range(COPY_BATCH)
            ]
            await connection.copy_records_to_table("bench_copy", records=rows, columns=columns)
        rate = count / (time.perf_counter() - started)
        await connection.execute("DROP TABLE bench_copy")
        return rate
    finally:
        await connection.close()


async def counter(connection: asyncpg.Connection, kind: str) -> int:
    return int(await connection.fetchval("SELECT coalesce(sum(n), 0) FROM counter WHERE kind = $1", kind))


async def rate_of(connection: asyncpg.Connection, kind: str, wanted: int) -> float:
    """Messages a second, from the first look that saw the counter move to the one that saw ``wanted``."""
    while (seen := await counter(connection, kind)) == 0:
        await asyncio.sleep(0.005)
    started = time.perf_counter()
    while await counter(connection, kind) < wanted:
        await asyncio.sleep(0.005)
    return (wanted - seen) / (time.perf_counter() - started)


async def park_and_release(stack: Stack, count: int, size: int) -> dict[str, float]:
    """Fill ``delays`` while no daemon runs, then let one park everything, and release it when it is all due at once."""
    await stack.daemon.stop()
    filling = count / 20_000
    due_ms = round((time.time() + filling + count / SLOWEST_PARK + HEADROOM) * 1000)
    headers = b"\x0cx-deliver-atl" + due_ms.to_bytes(8, "big")
    plain = Plain(stack.broker_url)
    await asyncio.to_thread(plain.publish, publish_frames("delayer.in", "key", headers, b"x" * size), count)
    plain.close()
    watcher = await asyncpg.connect(stack.store_url)
    try:
        async with DaemonProcess({}, config=stack.config) as daemon:
            parked = await rate_of(watcher, "parked", count)
            if time.time() * 1000 >= due_ms:
                raise RuntimeError(
                    "parking took until the messages were due: nothing to measure, use a smaller --count"
                )
            released = await rate_of(watcher, "released", count)
            await daemon.stop()
    finally:
        await watcher.close()
    return {"park": parked, "release": released}


async def measure(count: int, size: int) -> dict[str, float]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        step = progress.add_task("starting servers")
        async with running_stack("store", ({"from": "delayer.in", "to": "delayer.out"},)) as stack:
            await declare(stack.broker_url)
            progress.update(step, description="ceilings: the broker by itself")
            figures = await asyncio.to_thread(ceilings, stack.broker_url, count, size)
            progress.update(step, description="ceiling: COPY")
            figures["store copy"] = await copy_ceiling(stack.store_url, count, size)
            progress.update(step, description=f"park and release {count:,} messages")
            return figures | await park_and_release(stack, count, size)


def show(figures: dict[str, float], count: int, size: int) -> None:
    park_limit = min(figures["broker consume"], figures["store copy"])
    beside = {
        "park": (figures["park"] / park_limit, "the slower of consume and copy"),
        "release": (figures["release"] / figures["broker publish, confirmed"], "broker publish, confirmed"),
    }
    table = Table(title=f"{count:,} messages of {size} bytes, quorum queues", title_justify="left")
    for heading in ("what", "messages/s", "ratio", "of"):
        table.add_column(heading, justify="right" if heading in ("messages/s", "ratio") else "left")
    for name, rate in figures.items():
        ratio, of = beside.get(name, (None, ""))
        table.add_row(name, f"{rate:,.0f}", f"{ratio:.2f}" if ratio is not None else "", of)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--count", type=int, default=60_000, help="messages (default 60,000)")
    parser.add_argument("--size", type=int, default=512, help="bytes of body (default 512)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of a table")
    options = parser.parse_args()
    count = -(-options.count // COPY_BATCH) * COPY_BATCH
    figures = asyncio.run(measure(count, options.size))
    result = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "count": count,
        "size": options.size,
        "messages_per_second": {name: round(rate) for name, rate in figures.items()},
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(figures, count, options.size)


if __name__ == "__main__":
    main()
