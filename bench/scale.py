"""The cost of a message in each part, what the model of bench/limits.py says of one and two daemons on this machine,
what they really do, and what the model says of up to sixteen daemons.

Costs come from one daemon that only parks, or only releases. The runs with two daemons, and those that publish, park
and release at the same time, are not among them: they check the model.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import asyncpg

from bench import pair, park, rows
from bench.figures import median
from bench.limits import BOTH, DRAIN, RELEASE, STEADY, Costs, Flow, Layout, limits, on_one_machine, stop, total_us
from bench.plain import Plain
from bench.run import Bench
from bench.servers import INBOX, Place
from bench.watch import Counters, Course
from tests.support.web import Web

DAEMONS = (1, 2, 4, 8, 16)
CORES = (4, 16)
"""Of the broker, and as many of the database."""
LANES = 4
"""Of a new store."""
CHECKED: Mapping[str, Flow] = {"release what was parked": RELEASE, "publish, park and release": BOTH}
SYNCS, SYNCED = 100, 1 << 20
REDUCTIONS = (
    '[io:format("~p|~p|~p~n", [P, case process_info(P, registered_name) of {_, N} -> N; _ -> none end, R])'
    " || P <- processes(), {_, R} <- [process_info(P, reductions)]], ok."
)
UNITS = {"us": "µs/msg", "bytes": "B/msg", "ms": "ms", "messages": "msg"}


class Work(NamedTuple):
    """What one daemon did with nothing else to do. ``means``: of its own histograms."""

    course: Course
    log_bytes: float
    means: Callable[..., float]


async def work(place: Place, kind: str, counters: Counters, count: int) -> Work:
    """Start a daemon, and wait until it has parked or released them."""
    before = await _log_bytes(counters.connection)
    async with place.daemon(HTTP__LISTEN="127.0.0.1:0") as daemon:
        web = await Web.of(daemon)
        course = await counters.follow(kind, count, daemon, place.meter(daemon))
        told = await web.metrics()
        await daemon.stop()

    def mean(name: str, *labels: str) -> float:
        return told[f"{name}_sum", *labels] / max(told[f"{name}_count", *labels], 1)

    return Work(course, (await _log_bytes(counters.connection) - before) / count, mean)


async def _log_bytes(connection: asyncpg.Connection) -> int:
    return int(await connection.fetchval("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint"))


async def released(place: Place, count: int, size: int, lanes: int) -> Work:
    """Rows that are due already, in this many lanes; their messages stay in the inbox."""
    await asyncio.to_thread(place.fresh_inbox)
    async with await Counters.open(place) as counters:
        await rows.put_due(counters.connection, count, size, lanes)
        await asyncio.sleep(rows.ALL_DUE_SECONDS)
        return await work(place, "released", counters, count)


class Spent(NamedTuple):
    """CPU in µs for each message that one connection publishes or consumes: of the broker and of this process. Of the
    broker's, the parts of the queue's own process and of the log of all quorum queues (ra_log_wal)."""

    broker: float
    client: float
    queue: float
    log: float


def metered(place: Place, queue: str, count: int, do: Callable[[Plain], object]) -> Spent:
    """Erlang's count of work (reductions) says how the broker's processes share its CPU."""
    plain = Plain(place.broker_url)
    try:
        before = reductions(place)
        meter, began = place.servers.meter(), time.process_time()
        do(plain)
        broker, client = meter.read()["broker"], time.process_time() - began
        after = reductions(place)  # The processes of this connection end with it.
    finally:
        plain.close()
    done = {key: n - before.get(key, 0) for key, n in after.items()}
    of_queue = sum(n for (_, name), n in done.items() if name.endswith(f"_{queue}"))
    of_log = sum(n for (_, name), n in done.items() if name == "ra_log_wal")
    each = broker * 1e6 / count
    return Spent(each, client * 1e6 / count, each * of_queue / sum(done.values()), each * of_log / sum(done.values()))


def reductions(place: Place) -> dict[tuple[str, str], int]:
    """Those of each process of the broker so far, by id and registered name."""
    lines = place.servers.broker.run_tool("rabbitmqctl", "eval", REDUCTIONS, timeout=600.0).splitlines()
    found = (line.replace("'", "").split("|") for line in lines if line.count("|") == 2)
    # The first part of an id is the node's number, which each rabbitmqctl gives anew.
    return {(process.partition(".")[2], name): int(n) for process, name, n in found}


async def one_turn(bench: Bench, count: int, size: int) -> tuple[Costs, dict[str, tuple[float, str]]]:
    """All costs, and rates and times of the same work, which depend on what else the machine does."""
    place = await bench.place()
    into = await asyncio.to_thread(
        metered, place, "delays", count, lambda plain: plain.publish(park.writes(size), count)
    )
    async with await Counters.open(place) as counters:
        parked = await work(place, "parked", counters, count)
    alone = await released(await bench.place(), count, size, 1)
    place = await bench.place()
    shared = await released(place, count, size, LANES)
    out = await asyncio.to_thread(metered, place, INBOX, count, lambda plain: plain.consume(INBOX, count))
    costs = Costs(
        publisher_us=into.client,
        broker_in_us=into.broker,
        broker_park_us=parked.course.cpu_us("broker"),
        daemon_park_us=parked.course.cpu_us("daemon"),
        database_park_us=parked.course.cpu_us("database"),
        daemon_release_us=shared.course.cpu_us("daemon"),
        database_release_us=shared.course.cpu_us("database"),
        broker_release_us=shared.course.cpu_us("broker"),
        broker_out_us=out.broker,
        queue_us=into.queue + out.queue,
        queue_log_us=into.log + out.log,
        log_park_bytes=parked.log_bytes,
        log_release_bytes=shared.log_bytes,
        claim_messages=alone.means("delayer_batch_messages", "stage=claim"),
        sync_ms=sync_ms(bench.servers.postgres.data, 1 << 13),
    )
    seen = {"park": (parked.course.rate, "msg/s"), "release from one lane": (alone.course.rate, "msg/s")}
    for what in ("claim", "publish", "settle"):
        seen[f"one lane, {what}"] = alone.means(f"delayer_{what}_seconds") * 1000, "ms"
    return costs, seen


def sync_ms(directory: Path, size: int) -> float:
    """The time to write and sync this many bytes to the disk of this directory: the median."""
    with NamedTemporaryFile(dir=directory) as file:
        took = []
        for _ in range(SYNCS):
            began = time.monotonic()
            file.write(b"\1" * size)
            file.flush()
            os.fdatasync(file.fileno())
            took.append((time.monotonic() - began) * 1000)
    return median(took)


async def run(bench: Bench) -> None:
    size = bench.options.sizes[0]
    count = bench.options.count_of(size)
    turns = []
    for turn in range(bench.options.repeats):
        bench.say(f"costs of {count:,} messages, turn {turn + 1}")
        turns.append(await one_turn(bench, count, size))
    costs = Costs(*(median([getattr(one, field.name) for one, _ in turns]) for field in fields(Costs)))
    for field in fields(Costs):
        name, _, unit = field.name.rpartition("_")
        bench.add(f"cost, {name.replace('_', ' ')}", getattr(costs, field.name), UNITS[unit], body=size)
    disk_mb = SYNCED / 1e3 / sync_ms(bench.servers.postgres.data, SYNCED)
    bench.add("log of the database, synced each MiB", disk_mb, "MB/s")
    for name, (_, unit) in turns[0][1].items():
        bench.add(name, median([one[name][0] for _, one in turns]), unit, body=size)
    bench.add("lane that waits for no core", costs.lane_rate, "msg/s", body=size)
    for name, flow in CHECKED.items():
        for daemons in (1, 2):
            drained = []
            for turn in range(bench.options.repeats):
                bench.say(f"{name}: {count:,} messages, {daemons} daemons, turn {turn + 1}")
                place = await bench.place()
                drained.append(await pair.once(place, count, size, daemons, publishing=bool(flow.publish)))
            _check(bench, costs, name, daemons, drained)
    _foretell(bench, costs, disk_mb)


def _check(bench: Bench, costs: Costs, name: str, daemons: int, drained: Sequence[pair.Drained]) -> None:
    """The model's CPU and rate, with the cores that other programs left, beside the measured ones."""
    flow, free = CHECKED[name], median([one.free_cores for one in drained])
    told = {
        "CPU": (total_us(costs, flow), [one.cpu_us for one in drained], "µs/msg"),
        "rate": (stop(on_one_machine(costs, flow, daemons, free))[1], [one.whole_rate for one in drained], "msg/s"),
    }
    for what, (predicted, measured, unit) in told.items():
        bench.add(f"{name}, {what}, predicted", predicted, unit, daemons=daemons)
        bench.add(f"{name}, {what}, measured", median(measured), unit, daemons=daemons)
    bench.add(f"{name}, cores that other programs left", free, "", daemons=daemons)


def _foretell(bench: Bench, costs: Costs, disk_mb: float) -> None:
    """The rate at which each part is full, for a growing number of daemons."""
    layouts = [(daemons, max(LANES, 2 * daemons), cores) for cores in CORES for daemons in DAEMONS]
    layouts += [(DAEMONS[-1], LANES, CORES[-1])]
    for name, flow in (("in and out", STEADY), ("drain", DRAIN)):
        for daemons, lanes, cores in layouts:
            for part, rate in limits(costs, flow, Layout(daemons, lanes, cores, cores, disk_mb)).items():
                bench.add(f"{name}, full: {part}", rate, "msg/s", daemons=daemons, lanes=lanes, cores=cores)
