"""How soon a living daemon takes the lanes of one that was killed, and of one that hangs; and how late that makes what
was due meanwhile."""

from __future__ import annotations

import asyncio
import signal
import time
from functools import partial
from typing import Any, NamedTuple

import asyncpg

from bench.rows import KEY
from bench.run import Bench
from bench.servers import IN, INBOX, Place
from bench.traffic import Helper

COUNT, SIZE = 3000, 512
LEAD_SECONDS, SPREAD_SECONDS = 6.0, 15.0
"""The first message is due so long after they are published, and the last one so long after that."""
PATIENCE_SECONDS = 12.0
ENDS = {"killed": signal.SIGKILL, "hanging": signal.SIGSTOP}


class Adopted(NamedTuple):
    """Seconds from the signal until the other daemon says that it adopted the last lane; and the latest message, in
    seconds."""

    after: float
    latest: float


async def once(place: Place, number: signal.Signals) -> Adopted:
    """One daemon parks, and is gone in the middle of releasing; a second one stands beside it."""
    await asyncio.to_thread(place.fresh_inbox)
    async with place.daemon() as victim:
        await victim.ready()
        due = time.time() + LEAD_SECONDS
        sending = {
            "url": place.broker_url, "exchange": IN, "key": KEY, "size": SIZE, "count": COUNT, "each": 50,
            "window": 100, "due_ms": round(due * 1000), "spread_ms": round(SPREAD_SECONDS * 1000),
        }  # fmt: skip
        with Helper("flood", sending) as publisher:
            await publisher.result()
        async with place.daemon() as heir:
            await heir.ready()
            # More than there are: what was in flight may come twice, and the reader ends when nothing comes any more.
            reading = {"url": place.broker_url, "queue": INBOX, "count": 2 * COUNT, "patience": PATIENCE_SECONDS}
            with Helper("consume", reading) as consumer:
                await asyncio.sleep(max(due + 2 - time.time(), 0))
                lanes = await _with_messages(place)
                seen, began = len(heir.events), time.monotonic()
                victim.signal(number)
                for lane in sorted(lanes):
                    await heir.event("lane adopted", where=partial(_is_of, lane), after=seen)
                after = time.monotonic() - began
                found = await consumer.result()
            await heir.stop()
    return Adopted(after, found["late"]["1.0"] / 1000)


async def _with_messages(place: Place) -> set[int]:
    """The lanes in which something waits: the others need nobody."""
    connection = await asyncpg.connect(place.store_url)
    try:
        return {lane for (lane,) in await connection.fetch("SELECT DISTINCT lane FROM message")}
    finally:
        await connection.close()


def _is_of(lane: int, event: dict[str, Any]) -> bool:
    return bool(event["lane"] == lane)


async def run(bench: Bench) -> None:
    for name, number in ENDS.items():
        turns = []
        for turn in range(bench.options.repeats):
            bench.say(f"a daemon that is {name}, turn {turn + 1}")
            turns.append(await once(await bench.place(), number))
        bench.add(f"adopted, {name}", max(one.after for one in turns), "s")
        bench.add(f"latest message, {name}", max(one.latest for one in turns), "s")
