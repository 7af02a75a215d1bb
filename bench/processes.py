"""1, 2 and 4 daemon processes on the same queue, as ``workers`` of one `delayer run`: rates, and how they share.

The same processes park everything and release it when all of it is due at once, so each releases what it parked.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from bench import park
from bench.figures import median
from bench.meter import peak_mb
from bench.run import Bench
from bench.servers import Place
from bench.watch import Counters

SIZE = 512
SLOWEST_FILL, SLOWEST_PARK, HEADROOM = 20_000, 12_000, 3.0
"""Messages a second, and seconds for a start, that are trusted in when the due instant is chosen."""


class Shared(NamedTuple):
    """What some processes did together. ``spare`` is negative if parking went on until the messages were due."""

    park: float
    release: float
    smallest_park: float
    smallest_release: float
    memory_mb: float
    spare: float


async def once(place: Place, count: int, workers: int) -> Shared:
    due = time.time() + count / SLOWEST_FILL + count / SLOWEST_PARK + HEADROOM
    await asyncio.to_thread(park.fill, place, count, SIZE, round(due * 1000))
    async with await Counters.open(place) as counters, place.daemon(workers) as daemon:
        parked = await counters.follow("parked", count, daemon)
        spare = due - time.time()
        await asyncio.sleep(max(spare - 0.1, 0))
        released = await counters.follow("released", count, daemon)
        shares = [smallest(await counters.shares(kind), workers) for kind in ("parked", "released")]
        memory = peak_mb(daemon.pid)
        await daemon.stop()
    return Shared(parked.rate, released.rate, shares[0], shares[1], memory, spare)


def smallest(shares: list[float], workers: int) -> float:
    """What the least busy of them did; a process that did nothing at all has no lane in the counters."""
    return shares[workers - 1] if len(shares) >= workers else 0.0


async def run(bench: Bench) -> None:
    count = bench.options.count_of(SIZE)
    for workers in bench.options.processes:
        turns = []
        for turn in range(bench.options.repeats):
            bench.say(f"{count:,} messages, {workers} processes, turn {turn + 1}")
            turns.append(await once(await bench.place(), count, workers))
        if min(one.spare for one in turns) < 0:
            bench.note(f"{workers} processes: parking took until the messages were due; the rates are not to be used")
        bench.add("park", median([one.park for one in turns]), "msg/s", workers=workers)
        bench.add("release", median([one.release for one in turns]), "msg/s", workers=workers)
        if workers > 1:
            bench.add("smallest share, park", median([one.smallest_park for one in turns]), "", workers=workers)
            bench.add("smallest share, release", median([one.smallest_release for one in turns]), "", workers=workers)
        bench.add("memory of all", max(one.memory_mb for one in turns), "MB", workers=workers)
