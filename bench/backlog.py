"""The jobs on a stored backlog: the gain and the cost of compaction, and the time and memory of both audits.

    python -m bench.backlog --rows 1000000,2000000 --jobs quick,deep,compact

For each number of rows it creates a store on a separate Postgres, runs the jobs as commands, and prints a line of JSON.
Each body is about 500 bytes of JSON, and body and properties contain a UUID; with `--body` all messages are equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg

from bench import plain
from bench.__main__ import whole_number, whole_numbers
from bench.figures import median
from bench.meter import Meter, cpu_seconds, job_memory_mb, tree
from bench.rows import (
    ALL_DUE_SECONDS,
    BACKLOG_DAYS,
    BACKLOG_FIRST_HOURS,
    COUNT_PARKED,
    KEY,
    NEW_LANES,
    put_backlog,
    put_due,
)
from bench.servers import IN, OUT, POSTGRES
from delayer.core.message import Parcel, Target
from delayer.core.units import DAY_MS, HOUR_MS
from delayer.format.rows import COLUMNS, stored_row
from delayer.store import pool
from delayer.store.postgres import PostgresStore
from delayer.store.rows import partitions
from tests.audit.cluster import Cluster
from tests.support.daemon import EXECUTABLE
from tests.support.servers import Postgres
from tests.support.store import ROOM, owned, release_all

LANES = 2
CLAIMED, OF_A_CLAIM = 50_000, 1_000
"""Number of due rows whose claims are timed, and rows per claim."""
CHUNK = 20_000
CITIES = ["Antwerpen", "Bergen", "Córdoba", "Dresden", "Espoo", "Ferrara", "Gent", "Halle", "Innsbruck", "Jena"]
_SIZES = """
SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint AS total,
       coalesce(sum(pg_indexes_size(c.oid)), 0)::bigint AS indexes
FROM pg_class AS c
WHERE c.oid = $1::regclass OR c.oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = $1::regclass)
"""


class Ran(NamedTuple):
    """A finished command. ``peak_mb``: the most memory of its process tree, shared pages once, looked at twice a
    second, in MB (10^6 bytes). ``peaks_mb``: the most of each kind of process, at different moments."""

    out: str
    seconds: float
    cpu_seconds: float
    peak_mb: float
    peaks_mb: dict[str, int]


def ran(arguments: Sequence[object], **environ: str) -> Ran:
    """Run a program to its end. Raises RuntimeError with its stderr."""
    began, peak, used, over = time.monotonic(), 0.0, 0.0, threading.Event()
    peaks: dict[str, float] = {}
    process = subprocess.Popen(
        list(map(str, arguments)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environ
    )

    def look() -> None:
        nonlocal peak, used
        while not over.wait(0.5):
            pids = tree(process.pid)
            kinds = job_memory_mb(pids)
            peak, used = max(peak, sum(kinds.values())), max(used, cpu_seconds(pids))
            peaks.update({kind: max(mb, peaks.get(kind, 0.0)) for kind, mb in kinds.items()})

    looking = threading.Thread(target=look)
    looking.start()
    out, err = process.communicate()
    over.set()
    looking.join()
    if process.returncode:
        raise RuntimeError(f"{arguments}: exit {process.returncode}\n{out}{err}")
    rounded = {kind: round(mb) for kind, mb in peaks.items()}
    return Ran(out, round(time.monotonic() - began, 1), round(used, 1), round(peak), rounded)


def command(url: str, *arguments: str, **environ: str) -> Ran:
    """Run a command of delayer on the store."""
    return ran([EXECUTABLE, "--store-url", url, *arguments], DELAYER_CONFIG=os.devnull, **environ)


def parcels(count: int, seed: int, now_ms: int) -> Iterator[Parcel]:
    """Orders as an application would delay them."""
    chance = random.Random(seed)
    for number in range(count):
        uuid = f"{chance.getrandbits(128):032x}"
        headers = plain.number("x-delay", 3_600_000) + plain.short("tenant") + b"S" + struct.pack(">I", 4) + b"shop"
        properties = (
            struct.pack(">H", 0xB080) + plain.short("application/json") + struct.pack(">I", len(headers)) + headers
            + b"\x02" + plain.short(uuid)
        )  # fmt: skip
        order = {
            "order": uuid,
            "number": seed * CHUNK + number,
            "customer": chance.randrange(10**7),
            "total": chance.randrange(10**6),
            "city": chance.choice(CITIES),
            "lines": [{"sku": f"A-{chance.randrange(10**5):05}", "count": chance.randrange(1, 9)} for _ in range(4)],
            "text": "Your order is on its way; please tell us within fourteen days if a part of it is missing. " * 3,
        }
        content = json.dumps(order).encode()
        due_ms = now_ms + BACKLOG_FIRST_HOURS * HOUR_MS + chance.randrange(BACKLOG_DAYS * DAY_MS)
        target = Target(OUT.encode(), KEY.encode())
        yield Parcel(due_ms, IN.encode(), IN.encode(), KEY.encode(), target, properties, content)


async def fill(url: str, rows: int, say: Callable[[str], None]) -> None:
    """Write ``rows`` messages into two lanes, due over BACKLOG_DAYS, and do the work of autovacuum."""
    connection = await pool.connect(url, "bench", {"statement_timeout": "0"})
    try:
        now_ms = int(time.time() * 1000)
        for day in range(now_ms // DAY_MS - 1, now_ms // DAY_MS + BACKLOG_DAYS + 3):
            await partitions.make(connection, day, now_ms // DAY_MS)
        await connection.execute(NEW_LANES, LANES)
        for turn, start in enumerate(range(0, rows, CHUNK)):
            count, lane = min(CHUNK, rows - start), 1 + turn % LANES
            records = [stored_row(one, lane) for one in parcels(count, turn, now_ms)]
            async with connection.transaction():
                await connection.copy_records_to_table("message", records=records, columns=COLUMNS, timeout=3600)
                await connection.execute(COUNT_PARKED, lane, count)
            if turn % 10 == 0:
                say(f"{start:,} of {rows:,} rows")
        await connection.execute("VACUUM (ANALYZE) message", timeout=3600)
        await connection.execute("CHECKPOINT", timeout=3600)
    finally:
        await pool.close(connection)


async def ask(url: str, sql: str, *values: object) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchrow(sql, *values, timeout=3600)
    finally:
        await connection.close()


async def wal(url: str) -> int:
    """The bytes of the log so far."""
    [lsn] = await ask(url, "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint")
    return int(lsn)


async def claims(url: str) -> float:
    """The median milliseconds of a claim of OF_A_CLAIM rows, with its commit."""
    store = await PostgresStore.connect(lambda: url)
    try:
        connection = await asyncpg.connect(url)
        try:
            await put_due(connection, CLAIMED, 512, LANES)
        finally:
            await connection.close()
        await asyncio.sleep(ALL_DUE_SECONDS)
        times = []
        async with owned(store, LANES) as lanes:
            for lane in lanes:
                claimer = lane.claimers[0]
                while True:
                    began = time.monotonic()
                    if not (rows := await claimer.claim(OF_A_CLAIM, ROOM)):
                        break
                    await claimer.settle(rows, [])
                    if len(rows) == OF_A_CLAIM:
                        times.append((time.monotonic() - began) * 1000)
                await release_all(lane)
        await ask(url, "VACUUM message")
        return round(median(times), 1)
    finally:
        await store.close()


async def state(postgres: Postgres, url: str) -> dict[str, Any]:
    """Measure the store: MB of rows, indexes and segments, a pg_dump backup, the quick audit, and claims."""
    rows, segments = await ask(url, _SIZES, "message"), await ask(url, _SIZES, "segment")
    dump = postgres.data.parent / "backlog.dump"
    took = await asyncio.to_thread(ran, [postgres.programs / "pg_dump", "-Fc", "-Z1", "-f", dump, url])
    size = dump.stat().st_size
    dump.unlink()
    quick = await asyncio.to_thread(command, url, "audit", "--no-broker", "--json")
    report = json.loads(quick.out)
    assert not any(run["violations"] for run in report["rules"]), report["findings"]
    return {
        "rows_mb": rows["total"] / 1e6,
        "indexes_mb": rows["indexes"] / 1e6,
        "segments_mb": segments["total"] / 1e6,
        "backup_mb": size / 1e6,
        "backup_s": took.seconds,
        "quick_audit_s": quick.seconds,
        "quick_audit_mb": quick.peak_mb,
        "claim_ms": await claims(url),
    }


async def compaction(postgres: Postgres, url: str, master: str) -> dict[str, Any]:
    """The store before and after, and the log of packing and restoring."""
    found: dict[str, Any] = {"before": await state(postgres, url)}
    found["dry_run"] = json.loads((await asyncio.to_thread(command, url, "compact", "--dry-run", "--json")).out)
    await ask(url, "CHECKPOINT")
    began = await wal(url)
    packed = await asyncio.to_thread(command, url, "compact", "--master", master, "--json")
    figures = json.loads(packed.out)
    found["pack"] = figures | {"wal_bytes_a_message": (await wal(url) - began) / figures["messages"]}
    found["pack"] |= {"command_s": packed.seconds, "peak_mb": packed.peak_mb}
    found["after"] = await state(postgres, url)
    await ask(url, "CHECKPOINT")
    began = await wal(url)
    restored = json.loads((await asyncio.to_thread(command, url, "restore", "--all", "--json")).out)
    found["restore"] = restored | {"wal_bytes_a_message": (await wal(url) - began) / restored["messages"]}
    return found


def deep(url: str, master: str | None, work: Path, conf: Sequence[str] = ()) -> dict[str, Any]:
    """The deep audit on this machine, or (``master`` None) on a cluster of two workers, with an executor each."""
    more = ["--no-broker", "--json", "--work", str(work), *(word for one in conf for word in ("--conf", one))]
    if master is not None:
        done = command(url, "audit", "--deep", "--master", master, *more)
    else:
        with Cluster(executors=1, workers=2) as cluster:
            done = command(url, "audit", "--deep", "--master", cluster.url, *more, **cluster.environment)
    report = json.loads(done.out)
    assert not any(run["violations"] for run in report["rules"]), report["findings"]
    return {
        "seconds": done.seconds,
        "cpu_s": done.cpu_seconds,
        "peak_mb": done.peak_mb,
        "peaks_mb": done.peaks_mb,
        "audit_s": report["seconds"],
    }


async def measure(rows: int, jobs: Sequence[str], asked: argparse.Namespace) -> dict[str, Any]:
    """Run all ``jobs`` on a store of this many rows."""
    postgres = Postgres(settings=POSTGRES)
    found: dict[str, Any] = {"rows": rows}

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        await asyncio.to_thread(postgres.start)
        url = postgres.url(await asyncio.to_thread(postgres.add_store))
        began = time.monotonic()
        if asked.body is None:
            await fill(url, rows, say)
        else:
            await put_backlog(url, rows, asked.body, say, LANES)
        found["fill_s"] = round(time.monotonic() - began)
        for job in jobs:
            say(job)
            if job == "quick":
                meter = Meter({"database": postgres.pids})
                runs = [await asyncio.to_thread(command, url, "audit", "--no-broker", "--json") for _ in range(3)]
                cpu = sum(one.cpu_seconds for one in runs) + meter.read()["database"]
                found[job] = {
                    "seconds": [one.seconds for one in runs],
                    "cpu_s": round(cpu / len(runs), 2),
                    "peak_mb": runs[-1].peak_mb,
                }
            elif job == "compact":
                found[job] = await compaction(postgres, url, asked.master)
            else:
                work = postgres.data.parent / "work"
                master = asked.master if job == "deep" else None
                found[job] = await asyncio.to_thread(deep, url, master, work, asked.conf)
            say(json.dumps({job: found[job]}))
    finally:
        await asyncio.to_thread(postgres.close)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.backlog", description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=whole_numbers, default=(1_000_000, 2_000_000), help="sizes of the store")
    parser.add_argument("--jobs", default="quick,deep,compact", help="some of quick, deep, cluster, compact")
    parser.add_argument("--body", type=whole_number, help="bytes of each body, all of them equal")
    parser.add_argument("--master", default="local[2]", help="of the jobs of Spark (default local[2])")
    parser.add_argument("--conf", action="append", default=[], help="a setting of Spark for the deep audit: KEY=VALUE")
    asked = parser.parse_args()
    for rows in asked.rows:
        print(json.dumps(asyncio.run(measure(rows, asked.jobs.split(","), asked))), flush=True)


if __name__ == "__main__":
    main()
