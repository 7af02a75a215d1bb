"""From due rows to confirmed publishes: the rows are written while no daemon runs; then one starts and sends them."""

from __future__ import annotations

import asyncio

from bench import rows
from bench.meter import peak_mb
from bench.park import turns
from bench.run import Bench
from bench.servers import Place
from bench.watch import Counters, Course


async def once(place: Place, count: int, size: int) -> tuple[Course, float]:
    """Start the daemon once: the course of its releases, and its peak memory in MB."""
    await asyncio.to_thread(place.fresh_inbox)
    async with await Counters.open(place) as counters:
        await rows.put_due(counters.connection, count, size)
        await asyncio.sleep(rows.ALL_DUE_SECONDS)
        async with place.daemon() as daemon:
            course = await counters.follow("released", count, daemon, place.meter(daemon))
            memory = peak_mb(daemon.pid)
            await daemon.stop()
    return course, memory


async def run(bench: Bench) -> None:
    await turns(bench, "release", once)
