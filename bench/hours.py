"""Hours of mixed traffic next to a large backlog: lateness, memory, CPU and the size of the store should not grow.

Two daemons share the store. Beside the plain messages there are messages with keys, cancels, and schedules. Each
minute appends a line to a file of JSON lines, which ``python -m bench --plot`` draws. The run begins with a warm-up of
the longest delay, because until then more arrives than leaves, and ends with as long a time in which the rest leaves.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, Self

import asyncpg

from bench.figures import median
from bench.meter import Neighbours, memory_mb, tree
from bench.mixture import LEAD_SECONDS, Asked, judge, sent_in
from bench.rows import KEY
from bench.run import Bench
from bench.schedules import QUEUE, add, rhythms, schedule
from bench.servers import IN, INBOX, Place
from bench.steady import SIZE
from bench.traffic import Helper
from bench.watch import Stuck
from delayer.core.units import DAY_MS
from delayer.store.rows import partitions
from tests.support.daemon import DaemonProcess

DAEMONS = ("daemon 1", "daemon 2")
HALF_HOUR = 1800.0
WARM, MEASURED, DRAIN = "warm-up", "measured", "drain"
_STORE = """
SELECT coalesce(sum(pg_table_size(relid)), 0)::float8 / 1e6 AS table_mb,
       coalesce(sum(pg_indexes_size(relid)), 0)::float8 / 1e6 AS index_mb,
       coalesce(sum(pg_table_size(relid)) FILTER (WHERE relname = $1), 0)::float8 / 1e6 AS table_today_mb,
       coalesce(sum(pg_indexes_size(relid)) FILTER (WHERE relname = $1), 0)::float8 / 1e6 AS index_today_mb,
       coalesce(sum(n_dead_tup), 0)::bigint AS dead_tuples,
       pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8 / 1e6 AS wal_mb
FROM pg_stat_user_tables
"""
"""$1: today's partition."""


class Panel(NamedTuple):
    """Some values of each line that share a unit: one small plot, and one ratio for each value."""

    title: str
    unit: str
    values: Mapping[str, str]
    """The key in a line, by the name of the value."""
    logarithmic: bool = False


PANELS = (
    Panel("lateness", "ms", {share: f"late_{share}_ms" for share in ("p50", "p99", "max")}, logarithmic=True),
    Panel("memory", "MB", {of: f"memory_mb of {of}" for of in (*DAEMONS, "broker", "database")}),
    Panel("CPU", "cores", {of: f"cores of {of}" for of in (*DAEMONS, "broker", "database")}),
    Panel("size of all tables", "MB", {"tables": "table_mb", "indexes": "index_mb"}),
    Panel("size of today's partition", "MB", {"table": "table_today_mb", "indexes": "index_today_mb"}),
    Panel("dead tuples", "rows", {"dead tuples": "dead_tuples"}),
    Panel("WAL", "MB/s", {"WAL": "wal_mb_s"}),
)

Line = dict[str, Any]
"""A line of the file."""


class Sampler:
    """Memory, CPU and the store at the end of each step."""

    def __init__(self, place: Place, pids: Mapping[str, int], connection: asyncpg.Connection) -> None:
        self._place, self._pids, self._connection = place, pids, connection
        self._meter, self._neighbours = place.servers.meter(**pids), Neighbours()
        self._at, self._wal_mb = time.monotonic(), 0.0

    @classmethod
    async def begin(cls, place: Place, pids: Mapping[str, int], connection: asyncpg.Connection) -> Self:
        sampler = cls(place, pids, connection)
        await sampler.read()
        return sampler

    async def read(self) -> Line:
        """The values since the last reading."""
        now, store = time.monotonic(), await self._store()
        seconds = max(now - self._at, 1e-9)
        wal_mb = store.pop("wal_mb")
        line = store | {"wal_mb_s": (wal_mb - self._wal_mb) / seconds}
        line |= {f"cores of {name}": used / seconds for name, used in self._meter.read().items()}
        servers = self._place.servers
        trees = {name: tree(pid) for name, pid in self._pids.items()}
        trees |= {"broker": list(servers.broker.pids()), "database": list(servers.postgres.pids())}
        line |= {f"memory_mb of {name}": await asyncio.to_thread(memory_mb, pids) for name, pids in trees.items()}
        line["cores of other programs"] = self._neighbours.cores()
        self._at, self._wal_mb, self._neighbours = now, wal_mb, Neighbours()
        return {name: round(value, 3) for name, value in line.items()}

    async def _store(self) -> dict[str, float]:
        today = partitions.name_of(int(time.time() * 1000) // DAY_MS)
        return dict(await self._connection.fetchrow(_STORE, today, timeout=60))


def phase_of(at: float, start: float, longest: float, seconds: float) -> str:
    """The phase of the run in which a step ended."""
    return WARM if at <= start + longest else MEASURED if at <= start + seconds else DRAIN


class Growth(NamedTuple):
    """The medians of a value in the first and the last half hour after the warm-up."""

    what: str
    unit: str
    first: float
    last: float


def growth(lines: Sequence[Line], longest_half: float = HALF_HOUR) -> list[Growth]:
    """Compare the first with the last half hour that was measured, or with the last half of a shorter time."""
    measured = [line for line in lines if line["phase"] == MEASURED]
    if len(measured) < 2:
        return []
    step = measured[1]["at"] - measured[0]["at"]
    steps = min(round(longest_half / step), len(measured) // 2)
    found = []
    for panel in PANELS:
        for name, key in panel.values.items():
            halves = [[line[key] for line in part if key in line] for part in (measured[:steps], measured[-steps:])]
            if all(halves):
                what = panel.title if name == panel.title else f"{panel.title}, {name}"
                found.append(Growth(what, panel.unit, *map(median, halves)))
    return found


async def run(bench: Bench) -> None:
    options = bench.options
    place = await bench.place(options.backlog)
    period = options.schedule_period
    each = max((options.hours_seconds - 2 * period) // period, 1)
    occurrences = place.fresh_queue(QUEUE)
    first_ms = round((time.time() + LEAD_SECONDS + period) * 1000)
    many = rhythms("spread", options.hours_schedules, period, first_ms)
    await add(bench, place, [schedule(n, one, each) for n, one in enumerate(many)])
    async with AsyncExitStack() as stack:
        daemons = {name: await stack.enter_async_context(place.daemon()) for name in DAEMONS}
        for daemon in daemons.values():
            await daemon.ready()
        expected = {"queue": occurrences, "count": options.hours_schedules * each}
        lines, answer = await traffic(bench, place, daemons, expected)
        for daemon in daemons.values():
            await daemon.stop()
    report(bench, lines, answer)


async def traffic(
    bench: Bench, place: Place, daemons: Mapping[str, DaemonProcess], expected: dict[str, Any]
) -> tuple[list[Line], dict[str, float]]:
    """The whole load, and a line for each step of it; then what arrived too often, too early or not at all."""
    options, start = bench.options, time.time() + LEAD_SECONDS
    rate, seconds, longest = options.hours_rate, options.hours_seconds, options.hours_longest
    common = {"url": place.broker_url, "start": start}
    patience = LEAD_SECONDS + options.patience
    reading = {"queue": INBOX, "count": sent_in(rate, seconds), "step": options.hours_step, "patience": patience}
    sending = {"exchange": IN, "key": KEY, "queue": "delays", "size": SIZE, "rate": rate, "seconds": seconds,
               "longest_ms": longest * 1000}  # fmt: skip
    firing = {"patience": options.schedule_period + patience}
    async with AsyncExitStack() as stack:
        connection = await asyncpg.connect(place.store_url)
        stack.push_async_callback(connection.close)
        consumer = stack.enter_context(Helper("consume", common | reading, "bench.mixture"))
        publisher = stack.enter_context(Helper("publish", common | sending, "bench.mixture"))
        firer = stack.enter_context(Helper("consume", common | expected | firing, "bench.schedules"))
        results = asyncio.gather(publisher.result(), firer.result())
        pids = {name: daemon.pid for name, daemon in daemons.items()}
        pids |= {"publisher": publisher.pid, "consumer": consumer.pid}
        sampler = await Sampler.begin(place, pids, connection)
        lines: list[Line] = []
        seen: dict[str, Any] = {}
        with bench.writing_lines() as file:
            async for found in consumer.answers():
                if "at" not in found:
                    seen = found
                    break
                stuck = [daemon for daemon in daemons.values() if not daemon.running]
                if stuck:
                    raise Stuck(f"a daemon ended; its log ends:\n{stuck[0].tail()}")
                phase = phase_of(found["at"], start, longest, seconds)
                lines.append({**found, "phase": phase, **await sampler.read()})
                file.write(json.dumps(lines[-1]) + "\n")
                file.flush()
                bench.say(f"{phase}: {progress(lines[-1], start, seconds + longest)}")
        published, fired = await results
    verdict = judge([Asked(*one) for one in published["asked"]], dict(seen["keyed"]))
    answer = {name: seen[name] for name in ("early", "missing", "repeated")}
    answer |= {f"with keys, {name}": value for name, value in verdict._asdict().items()}
    answer |= {f"occurrences {name}": fired[name] for name in ("early", "repeated")}
    answer["occurrences missing"] = expected["count"] - fired["came"]
    bench.add("publisher behind its plan, at most", published["behind_ms"], "ms")
    return lines, answer


def progress(line: Line, start: float, seconds: float) -> str:
    late = ", ".join(f"{line[name]:,.1f}" for name in ("late_p50_ms", "late_p99_ms", "late_max_ms") if name in line)
    return f"{line['at'] - start:,.0f} of {seconds:,} s; p50, p99, max of {line['messages']:,}: {late} ms"


def report(bench: Bench, lines: Sequence[Line], answer: Mapping[str, float]) -> None:
    at = {"rate": bench.options.hours_rate, "backlog": bench.options.backlog}
    for one in growth(lines):
        bench.add(f"{one.what}, first half hour", one.first, one.unit, **at)
        bench.add(f"{one.what}, last half hour", one.last, one.unit, **at)
        if one.first:
            bench.add(f"{one.what}, last over first", one.last / one.first, "", **at)
        else:
            bench.note(f"{one.what}: zero in the first half hour, so there is no ratio")
    for what, count in answer.items():
        bench.add(what, count, "msg", **at)
    busy = median([line["cores of other programs"] for line in lines])
    bench.note(f"other programs used {busy:.2f} of {os.cpu_count()} cores (median of the lines in {bench.lines.name})")
