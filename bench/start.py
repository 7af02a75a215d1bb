"""A daemon that starts with very many rows waiting, some of which came due while none ran."""

from __future__ import annotations

import asyncio
import time

from bench import rows
from bench.figures import median
from bench.meter import peak_mb
from bench.run import Bench
from bench.servers import Place
from bench.watch import LOOK_SECONDS, STUCK_SECONDS, Counters, Stuck

DUE = 1000
FILLED = "size of the store, as filled"
"""Before any other section left rows of its own there, and nothing but the backlog."""


async def once(place: Place) -> tuple[float, float, float]:
    """Seconds from the start of the process until it says "ready", and until a release is counted; peak MB."""
    async with await Counters.open(place) as counters:
        await rows.put_due(counters.connection, DUE, 512)
        await asyncio.sleep(rows.ALL_DUE_SECONDS)
        began = time.monotonic()
        async with place.daemon() as daemon:
            ready = asyncio.create_task(_seconds_until_ready(daemon.ready(), began))
            while not await counters.since("released"):
                if not daemon.running or time.monotonic() - began > STUCK_SECONDS:
                    ready.cancel()
                    raise Stuck(f"nothing was released; the daemon's log ends:\n{daemon.tail()}")
                await asyncio.sleep(LOOK_SECONDS / 4)
            released = time.monotonic() - began
            said = await ready
            memory = peak_mb(daemon.pid)
            await daemon.stop()
    return said, released, memory


async def _seconds_until_ready(waiting: object, began: float) -> float:
    await waiting  # type: ignore[misc]
    return time.monotonic() - began


async def size_mb(place: Place) -> float:
    """See rows.size_mb."""
    return await rows.size_mb(place.store_url)


async def run(bench: Bench) -> None:
    for backlog in bench.backlogs:
        place = await bench.place(backlog)
        bench.say(f"with {backlog:,} rows waiting")
        turns = [await once(place) for _ in range(bench.options.repeats)]
        ready, released, memory = zip(*turns, strict=True)
        bench.add("ready", median(ready), "s", backlog=backlog)
        bench.add("first release", median(released), "s", backlog=backlog)
        bench.add("memory of daemon", max(memory), "MB", backlog=backlog)
        if backlog:
            bench.add(FILLED, bench.filled_mb, "MB", backlog=backlog)
