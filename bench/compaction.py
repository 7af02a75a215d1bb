"""Compaction and bulk restore: how much of the disk comes back, how fast, and what the traffic notices meanwhile.

The rows are of bench/orders.py, due over BACKLOG_DAYS from the tenth day on. Sizes are those of tables, indexes and
TOAST, dead rows included, as the disk has them: before, after VACUUM where that is all that was done, and when the
command is done. Rates leave out the start of Spark, which is told by itself. Lateness is that of the messages that were
due while segments were made or restored and room was given back, and of no others: a quiet minute around it would hide
what the work does to the traffic.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg

from bench import steady
from bench.run import Bench
from bench.servers import Place
from bench.start import size_mb
from bench.traffic import Helper, due_between, kept, lateness
from delayer.store import partitions, session
from delayer.store.partitions import DAY_MS

WRITERS = 2
LANES = 4
FIRST_DAY = 10
BACKLOG_DAYS = 60
RATE = 2_000
DELAYS_MS = (1_000, 5_000, 1)
"""Of the messages that pass meanwhile: short, so that what is late comes from the work beside them."""
AFTER = "8d"
LEAD_SECONDS = 4.0
"""From the start of the load to that of the command."""
AROUND_SECONDS = 35.0
"""What a command takes beside its work on rows: the start of Spark, and its pauses between partitions that it drops."""
END_SECONDS = 1.0
"""From the end of the work to that of the command: the JVM's, at most."""
_SEGMENTS = "SELECT pg_total_relation_size('segment')"


@dataclass(frozen=True)
class Done:
    """A command that ended: what it told, seconds with the start of Spark, and when (epoch ms)."""

    told: dict[str, Any]
    seconds: float
    ended_ms: float

    @property
    def worked_ms(self) -> tuple[float, float]:
        """From when to when it worked on the store, END_SECONDS more at the most."""
        seconds = self.told["seconds"] + self.told.get("shrink_seconds", 0.0) + END_SECONDS
        return self.ended_ms - min(seconds, self.seconds) * 1000, self.ended_ms


async def command(place: Place, *arguments: str) -> Done:
    began = time.monotonic()
    said = await place.delayer(*arguments, "--json")
    told = json.loads(said[said.index("{") :])  # behind what the JVM has to say on stderr
    return Done(told, time.monotonic() - began, time.time() * 1000)


async def fill(place: Place, rows: int, say: Any) -> None:
    """``rows`` orders in lanes that nobody owns; then what autovacuum would have done by and by."""
    now_ms = int(time.time() * 1000)
    today = now_ms // DAY_MS
    more = {"statement_timeout": "0"}
    connection = await session.connect_plain(place.store_url, "bench", more, command_seconds=None)
    try:
        for day in range(today, today + FIRST_DAY + BACKLOG_DAYS + 2):
            await partitions.make(connection, day, today)
        order = {
            "url": place.store_url, "rows": rows // WRITERS, "lanes": LANES, "now_ms": now_ms,
            "first_ms": now_ms + FIRST_DAY * DAY_MS, "days": BACKLOG_DAYS,
        }  # fmt: skip
        helpers = [Helper("put", order | {"seed": seed}, "bench.orders") for seed in range(WRITERS)]
        say(f"{rows:,} orders")
        await asyncio.gather(*(helper.result() for helper in helpers))
        say(f"{rows:,} orders: VACUUM, ANALYZE, CHECKPOINT")
        await connection.execute("VACUUM (ANALYZE) message")
        await connection.execute("CHECKPOINT")
    finally:
        await session.close(connection)


async def sizes_mb(place: Place) -> tuple[float, float]:
    """Of the rows, and of the segments, in MB (10^6 bytes)."""
    connection = await asyncpg.connect(place.store_url)
    try:
        return await size_mb(place), float(await connection.fetchval(_SEGMENTS)) / 1e6
    finally:
        await connection.close()


@dataclass(frozen=True)
class Beside:
    """The traffic beside a command. ``late`` is traffic.lateness of what was due while it worked."""

    load: steady.Steady
    late: dict[str, Any]
    done: Done


async def beside(place: Place, seconds: float, *arguments: str) -> Beside:
    """The command, while RATE messages a second pass through a daemon for ``seconds``."""
    with tempfile.TemporaryDirectory(prefix="delayer-bench-") as directory:
        keep = Path(directory) / "arrivals"
        async with place.daemon() as daemon:
            await daemon.ready()
            load = asyncio.create_task(steady.under_load(place, daemon.pid, RATE, round(seconds), DELAYS_MS, keep=keep))
            await asyncio.sleep(LEAD_SECONDS + DELAYS_MS[1] / 1000)
            done = await command(place, *arguments)
            seen = await load
            await daemon.stop()
        return Beside(seen, lateness(due_between(kept(keep), *done.worked_ms)), done)


def tell(bench: Bench, name: str, done: Done, rows: int) -> None:
    told = done.told
    bench.add(f"{name}, rate", told["messages"] / max(told["seconds"], 1e-9), "msg/s", rows=rows)
    bench.add(f"{name}, seconds", told["seconds"], "s", rows=rows)
    bench.add(f"{name}, seconds with all around it", done.seconds, "s", rows=rows)
    if told["lost"] or told["broken"]:
        bench.note(f"{name}: lost {told['lost']}, broken {told['broken']}")


def tell_lateness(bench: Bench, name: str, found: Beside, rows: int) -> None:
    late = found.late["late"]
    for what, share in (("p50", "0.5"), ("p99", "0.99"), ("max", "1.0")):
        if late:
            bench.add(f"beside {name}, lateness {what}", late[share], "ms", rows=rows, rate=RATE)
    bench.add(f"beside {name}, due meanwhile", found.late["counted"], "msg", rows=rows, rate=RATE)
    bench.add(f"beside {name}, missing", found.load.missing, "msg", rows=rows, rate=RATE)
    bench.add(f"beside {name}, early", found.load.seen["early"], "msg", rows=rows, rate=RATE)
    seconds = found.late["by_second"]
    bench.draw(f"beside {name}, p99 by second", [row[0] for row in seconds], [row[1] for row in seconds], rows=rows)


async def run(bench: Bench) -> None:
    rows, some = bench.options.compacted, bench.options.restored
    await alone(bench, rows, some)
    if not bench.options.compaction_alone:
        await with_traffic(bench, min(rows, 2 * some))


async def alone(bench: Bench, rows: int, some: int) -> None:
    """Nothing else on the machine: pack all of it, then restore some."""
    place = await bench.place()
    await fill(place, rows, bench.say)
    before, _ = await sizes_mb(place)
    bench.say(f"compacting {rows:,} rows")
    done = await command(place, "compact", "--after", AFTER)
    left, segments = await sizes_mb(place)
    tell(bench, "compact", done, rows)
    bench.add("compact, giving room back", done.told["shrink_seconds"], "s", rows=rows)
    bench.add("on disk before", before, "MB", rows=rows)
    bench.add("on disk after, rows", left, "MB", rows=rows)
    bench.add("on disk after, segments", segments, "MB", rows=rows)
    bench.add("shrinks by", before / (left + segments), "", rows=rows)
    bench.add("bytes a message before", before * 1e6 / rows, "B", rows=rows)
    bench.add("bytes a message after", (left + segments) * 1e6 / rows, "B", rows=rows)
    days = FIRST_DAY + max(round(BACKLOG_DAYS * some / rows), 1)
    bench.say(f"restoring what is due within {days} days")
    done = await command(place, "restore", "--within", f"{days}d")
    tell(bench, "restore", done, done.told["messages"])


async def with_traffic(bench: Bench, rows: int) -> None:
    """The same beside a daemon that releases what was parked seconds ago."""
    place = await bench.place()
    await fill(place, rows, bench.say)
    for name, arguments in (("compact", ("compact", "--after", AFTER)), ("restore", ("restore", "--all"))):
        seconds = LEAD_SECONDS + AROUND_SECONDS + rows / bench.options.slowest_compaction
        bench.say(f"{RATE:,} messages a second beside {name}, {rows:,} rows")
        found = await beside(place, seconds, *arguments)
        if found.done.seconds > seconds:
            bench.note(f"beside {name}: {found.done.seconds:.0f} s of work, but traffic for {seconds:.0f} s only")
        tell(bench, f"{name} beside traffic", found.done, rows)
        tell_lateness(bench, name, found, rows)
