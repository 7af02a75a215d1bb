"""Good messages next to a flood: 200 a second, alone, next to a flood of good messages, and of refused ones. The flood
comes as fast as the broker confirms it, and waits in the same intake queue."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from bench.rows import KEY
from bench.run import Bench, thousands
from bench.servers import IN, Place
from bench.steady import Steady, report, under_load
from bench.traffic import Helper

SIZE = 512
RATE = 200
DELAYS_MS = (1000, 2000, 1)
SECONDS, QUICK_SECONDS = 40, 8
GOOD_MS, REFUSED_MS = 24 * 3_600_000, 1 << 60
"""The flood's delay: a day, and one longer than any route allows."""
FLOODS = {"no flood": None, "next to good ones": GOOD_MS, "next to refused ones": REFUSED_MS}


async def run(bench: Bench) -> None:
    count, seconds = thousands(bench.options.flood), QUICK_SECONDS if bench.options.quick else SECONDS
    for name, delay_ms in FLOODS.items():
        found = []
        for turn in range(bench.options.repeats):
            bench.say(f"{RATE} messages a second for {seconds} s, {name}, turn {turn + 1}")
            steady, lines = await _once(await bench.place(), count, seconds, delay_ms)
            found.append(steady)
        report(bench, found, f"{name}, ", count=count if delay_ms else 0)
        bench.add(f"{name}, log lines", sum(lines.values()), "lines", count=count if delay_ms else 0)
        bench.add(f"{name}, lanes lost", lines["lane lost"], "lanes", count=count if delay_ms else 0)


async def _once(place: Place, count: int, seconds: int, delay_ms: int | None) -> tuple[Steady, Counter[str]]:
    async with place.daemon() as daemon:
        await daemon.ready()
        flood = asyncio.create_task(_flood(place, count, delay_ms))
        steady = await under_load(place, daemon.pid, RATE, seconds, DELAYS_MS)
        await flood
        await daemon.stop()
    return steady, Counter(one["event"] for one in daemon.events)


async def _flood(place: Place, count: int, delay_ms: int | None) -> Any:
    """Flood the intake queue once the measurement has begun."""
    await asyncio.sleep(6)
    if delay_ms is None:
        return None
    due_ms = time.time_ns() // 1_000_000 + delay_ms
    order = {"url": place.broker_url, "exchange": IN, "key": KEY, "size": SIZE, "count": count, "due_ms": due_ms}
    with Helper("flood", order | {"spread_ms": 1000}) as helper:
        return await helper.result()
