"""Schedules next to steady traffic, and very many schedules that wait.

10,000 schedules that fire every minute must not make other messages late: the same traffic runs without them, with
their times spread over the minute, and with all of them due in the same instant. Each occurrence must arrive once.
A million schedules that fire once a day must not cost the daemon memory, nor make a page of them slow.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import Counter
from http.client import HTTPConnection
from typing import Any
from uuid import uuid4

import asyncpg

from bench.commands import LIBRARIES, seconds_of
from bench.figures import median, percentile
from bench.meter import peak_mb
from bench.plain import HEADER, Plain
from bench.run import Bench
from bench.servers import Place
from bench.steady import LEAD_SECONDS, SIZE, report, under_load
from bench.traffic import Helper
from delayer.amqp.properties import encode_headers
from delayer.core.message import Target
from delayer.schedule.rhythm import Cron, Every, Rhythm
from delayer.schedule.schedule import Schedule
from delayer.store.admin.actions import change_connection
from delayer.store.schedules import changes
from tests.support.daemon import EXECUTABLE
from tests.support.ports import HOST, reserve
from tests.support.web import tokens_file

QUEUE = "bench.occurrences"
ADDED_TOGETHER = 10_000
ADDING_SECONDS = 0.004
"""At most for each schedule that is added before the measurement."""
PATIENCE_SECONDS = 60.0
SETTLE_SECONDS = 30.0
"""A daemon with very many schedules runs for so long before its memory is read."""
TURNS = 9
KINDS = {"none": "without schedules", "spread": "schedules spread over the period", "same": "schedules in one instant"}
ZONE = "Europe/Berlin"
TOKEN = "a-token-for-the-bench"
_NAME = "s%07d"
_DUE = re.compile(rb"\x0dx-delayer-due[lL](.{8})", re.DOTALL)
_OF = re.compile(rb"\x12x-delayer-scheduleS\0\0\0\x08s([0-9]{7})")


def consume(order: dict[str, Any]) -> dict[str, Any]:
    """Consume occurrences until ``count`` different ones have arrived, or none for ``patience`` seconds. An occurrence
    is its schedule's number, and its due instant."""
    plain = Plain(order["url"])
    plain.consume_from(order["queue"], 20_000)
    plain.socket.settimeout(order["patience"])
    seen: Counter[tuple[int, int]] = Counter()
    late, received = [], 0
    try:
        for kind, payload in plain.frames():
            if kind != HEADER:
                continue
            now_ms, received = time.time() * 1000, received + 1
            due, of = _DUE.search(payload), _OF.search(payload)
            if due is None or of is None:
                raise ValueError(f"not an occurrence: {payload!r}")
            due_ms = int.from_bytes(due[1], "big")
            seen[int(of[1]), due_ms] += 1
            late.append(now_ms - due_ms)
            if received % 100 == 0:
                plain.acknowledge(received)
            if len(seen) == order["count"]:
                break
    except TimeoutError:
        pass
    plain.close()
    return {
        "came": len(seen),
        "repeated": received - len(seen),
        "early": sum(one < 0 for one in late),
        "of_each": dict(Counter(Counter(number for number, _ in seen).values())),
        "late": {str(share): percentile(sorted(late), share) for share in (0.5, 0.99, 1.0)} if late else {},
    }


def schedule(number: int, rhythm: Rhythm, most: int | None = None) -> Schedule:
    target = Target(b"", QUEUE.encode())
    return Schedule(
        uuid4(), _NAME % number, target, rhythm, encode_headers(), b"x" * SIZE, max_occurrences=most
    )  # fmt: skip


async def add(bench: Bench, place: Place, wanted: list[Schedule]) -> None:
    async with change_connection(place.store_url, "add schedules") as connection:
        for start in range(0, len(wanted), ADDED_TOGETHER):
            bench.say(f"adding schedules: {len(wanted) - start:,} to go")
            await changes.apply(connection, wanted[start : start + ADDED_TOGETHER], who="bench")


def rhythms(kind: str, count: int, period: int, first_ms: int) -> list[Rhythm]:
    """The rhythm of each of ``count`` schedules that fire every ``period`` seconds."""
    if kind == "spread":
        return [Every(period * 1000, first_ms + period * 1000 * n // count) for n in range(count)]
    fields = "* * * * *" if period == 60 else f"*/{period} * * * * *"
    return [Cron(fields, ZONE, first_ms)] * count


async def next_to_traffic(bench: Bench, kind: str) -> None:
    """One run of steady traffic, and schedules that fire while it is measured."""
    options, rate = bench.options, bench.options.rates[0]
    count = 0 if kind == "none" else options.schedules
    period, seconds = options.schedule_period, options.schedule_seconds
    place = await bench.place()
    place.fresh_queue(QUEUE)
    warm = options.longest_delay + 1 + LEAD_SECONDS
    # The first occurrences are due when the measurement begins: at the start of a period.
    begin = -(-(time.time() + warm + 5 + count * ADDING_SECONDS) // period) * period
    each = seconds // period
    await add(
        bench,
        place,
        [schedule(n, one, each) for n, one in enumerate(rhythms(kind, count, period, round(begin * 1000)))],
    )
    bench.say(f"{rate:,} messages a second for {seconds} s, {KINDS[kind]}")
    order = {
        "url": place.broker_url,
        "queue": QUEUE,
        "count": count * each,
        "patience": period + PATIENCE_SECONDS + warm,
    }
    async with place.daemon() as daemon:
        await daemon.ready()
        await asyncio.sleep(begin - warm - time.time())
        with Helper("consume", order, "bench.schedules") as consumer:
            steady = await under_load(place, daemon.pid, rate, seconds, (1000, options.longest_delay * 1000, 1))
            seen = await consumer.result() if count else None
        await daemon.stop()
    at = {"rate": rate, "schedules": count}
    title = "" if kind == "none" else f"{KINDS[kind]}, "
    report(bench, [steady], title, **at)
    if seen is None:
        return
    for share, name in (("0.5", "p50"), ("0.99", "p99"), ("1.0", "max")):
        if seen["late"]:
            bench.add(f"{KINDS[kind]}, of occurrences, lateness {name}", seen["late"][share], "ms", **at)
    for what in ("early", "repeated"):
        bench.add(f"{KINDS[kind]}, occurrences {what}", seen[what], "msg", **at)
    bench.add(f"{KINDS[kind]}, occurrences missing", count * each - seen["came"], "msg", **at)
    if seen["of_each"] != {str(each): count}:
        bench.note(f"{KINDS[kind]}: expected {each} occurrences of each schedule, found {seen['of_each']}")


def ratios(bench: Bench, kind: str) -> None:
    for name in ("p50", "p99"):
        plain = bench.result.find(bench.section, f"lateness {name}")
        beside = bench.result.find(bench.section, f"{KINDS[kind]}, lateness {name}")
        if plain and beside:
            bench.add(f"{KINDS[kind]}, {name} over that without", beside.value / max(plain.value, 0.1), "", **beside.at)


async def waiting(bench: Bench) -> None:
    """The memory of a daemon without schedules and with very many, and the time of a page of them."""
    count = bench.options.many_schedules
    place, port, turns = await bench.place(), reserve(), 3 if bench.options.quick else TURNS
    for there in (0, count):
        if there:
            await add(bench, place, [schedule(n, daily(n)) for n in range(count)])
            bench.say("VACUUM, ANALYZE")
            await clean(place)
        at = {"schedules": there}
        async with place.daemon(
            HTTP__LISTEN=f"{HOST}:{port}", HTTP__TOKENS_FILE=tokens_file(f"bench read {TOKEN}")
        ) as daemon:
            await daemon.ready()
            bench.say(f"{there:,} schedules: the page and its answers for programs")
            for path in ("/schedules", "/api/schedules", f"/schedules?after={_NAME % (there // 2)}",
                         "/schedules?state=failed", "/metrics"):  # fmt: skip
                times = [await asyncio.to_thread(fetch, port, path) * 1000 for _ in range(turns)]
                bench.add(path, median(times), "ms", **at)
                bench.add(f"{path}, slowest", max(times), "ms", **at)
            await asyncio.sleep(SETTLE_SECONDS if count > ADDED_TOGETHER else 1.0)
            bench.add("memory of daemon", peak_mb(daemon.pid), "MB", **at)
            await daemon.stop()
    delayer = [str(EXECUTABLE), "--config", str(place.config)]
    middle = _NAME % (count // 2)
    lines = {
        "libraries alone": LIBRARIES,
        "`delayer schedule list`": [*delayer, "schedule", "list"],
        "`delayer schedule list --after` the middle": [*delayer, "schedule", "list", "--after", middle],
        "`delayer schedule list --state failed`": [*delayer, "schedule", "list", "--state", "failed"],
        "`delayer schedule show`": [*delayer, "schedule", "show", middle],
    }
    for name, line in lines.items():
        bench.say(f"{name}, {count:,} schedules")
        times = [await seconds_of(line) * 1000 for _ in range(turns)]
        bench.add(name, median(times), "ms", schedules=count)
        bench.add(f"{name}, slowest", max(times), "ms", schedules=count)


async def clean(place: Place) -> None:
    """Do the work of autovacuum."""
    connection = await asyncpg.connect(place.store_url)
    try:
        await connection.execute("VACUUM (ANALYZE)", timeout=None)
        await connection.execute("CHECKPOINT", timeout=None)
    finally:
        await connection.close()


def daily(number: int) -> Rhythm:
    """A time of day, another one for each of 86,400."""
    minutes, second = divmod(number * 7, 60)
    hour, minute = divmod(minutes % 1440, 60)
    return Cron(f"{second} {minute} {hour} * * *", ZONE)


def fetch(port: int, path: str) -> float:
    """The time of this request. Raises RuntimeError unless it succeeds."""
    began = time.monotonic()
    connection = HTTPConnection(HOST, port)
    connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.status}")
    return time.monotonic() - began


async def run(bench: Bench) -> None:
    kinds = ["none", "spread"] if bench.options.quick else list(KINDS)
    for kind in kinds:
        await next_to_traffic(bench, kind)
    for kind in kinds[1:]:
        ratios(bench, kind)
    await waiting(bench)


if __name__ == "__main__":
    print(json.dumps(consume(json.loads(sys.argv[2]))))
