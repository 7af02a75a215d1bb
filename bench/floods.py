"""Good messages next to a flood: 200 a second, alone, and next to floods of good and of refused messages. A flood is
published as fast as the broker confirms it, and waits in the same intake queue."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from bench.plain import Plain, message, number, portions, properties
from bench.rows import KEY
from bench.run import Bench, thousands
from bench.servers import IN, INBOX, OUT, Place
from bench.steady import LEAD_SECONDS, Steady, report, under_load

FLOODED = "bench.flooded"
SIZE = 512
RATE = 200
DELAYS_MS = (1000, 2000, 1)
SECONDS, QUICK_SECONDS = 25, 8
LATER = 2.0
"""Seconds of the measurement before the flood begins."""
FLOODS = {"no flood": -1, "next to delayed ones": 1500, "next to ones due at once": 0, "next to refused ones": 1 << 60}
"""The delay of the flood's messages in milliseconds. The last is longer than any route allows. The daemon publishes due
and refused messages itself, and parks the rest."""


async def run(bench: Bench) -> None:
    count, seconds = thousands(bench.options.flood), QUICK_SECONDS if bench.options.quick else SECONDS
    found: dict[str, list[tuple[Steady, Counter[str]]]] = {name: [] for name in FLOODS}
    for turn in range(bench.options.repeats):
        for name, delay_ms in FLOODS.items():
            bench.say(f"{RATE} messages a second for {seconds} s, {name}, turn {turn + 1}")
            found[name].append(await _once(await bench.place(), count if delay_ms >= 0 else 0, seconds, delay_ms))
    for name, turns in found.items():
        at = {"count": count if FLOODS[name] >= 0 else 0}
        report(bench, [steady for steady, _ in turns], f"{name}, ", **at)
        bench.add(f"{name}, log lines", max(lines.total() for _, lines in turns), "lines", **at)
        bench.add(f"{name}, lanes lost", max(lines["lane lost"] for _, lines in turns), "lanes", **at)


async def _once(place: Place, count: int, seconds: int, delay_ms: int) -> tuple[Steady, Counter[str]]:
    await asyncio.to_thread(_own_queues, place)
    async with place.daemon() as daemon:
        await daemon.ready()
        warm = LEAD_SECONDS + DELAYS_MS[1] / 1000 + 1  # As long as under_load waits.
        flood = asyncio.create_task(asyncio.to_thread(_flood, place, count, delay_ms, warm + LATER))
        steady = await under_load(place, daemon.pid, RATE, seconds, DELAYS_MS)
        await flood
        await daemon.stop()
    return steady, Counter(one["event"] for one in daemon.events)


def _own_queues(place: Place) -> None:
    """The consumer gets only the measured messages."""
    plain = Plain(place.broker_url)
    plain.fresh_queue(INBOX, bind=OUT, key=KEY)
    plain.fresh_queue(FLOODED, bind=OUT, key=FLOODED)
    plain.close()


def _flood(place: Place, count: int, delay_ms: int, after: float) -> None:
    some = [message(IN, FLOODED, properties(number("x-delay", delay_ms)), b"x" * SIZE)] * min(count, 1000)
    time.sleep(after)
    if some:
        plain = Plain(place.broker_url)
        plain.publish(portions(some), count)
        plain.close()
