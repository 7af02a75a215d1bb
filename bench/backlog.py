"""How fast Spark reads the store, and in how much memory: `python -m bench.backlog --rows 10000000`.

Starts a Postgres of its own, fills it, and prints JSON, or writes it to a file: rows a second of the full read (every
column, bodies too), of the extract (what the audit keeps of it) and of the whole audit, and the largest process that
ran for it. The session's start is not in the rates. bench/backlog_page.py puts it into docs/backlog.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

from bench import about, compaction, given, rows
from bench.meter import Meter, Neighbours, Pids, tree
from bench.servers import POSTGRES
from delayer import telemetry
from delayer.audit import extract, job, relations, source, spark
from delayer.audit.watching import Watching
from delayer.settings.secret import SecretUrl
from delayer.store import upgrades
from tests.rig.servers import Postgres

LOOK_SECONDS = 0.2
SETTINGS = {**POSTGRES, "shared_preload_libraries": ""}


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class Peaks:
    """The most memory that one process below this one had, by what it is; and the most that lay in a directory."""

    def __init__(self, directory: Path) -> None:
        self.memory: dict[str, int] = {}
        self.disk = 0
        self._directory = directory
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Peaks:
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._looking.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            for process in psutil.Process(os.getpid()).children(recursive=True):
                try:
                    name, size = process.name(), process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
                kind = "jvm" if name.startswith("java") else "python worker" if name.startswith("python") else ""
                if kind:
                    self.memory[kind] = max(self.memory.get(kind, 0), size)
            self.disk = max(self.disk, _lying_in(self._directory))

    def in_mb(self) -> dict[str, int]:
        return {kind: round(size / 1e6) for kind, size in self.memory.items()}


def _lying_in(directory: Path) -> int:
    """Bytes that its files take on the disk, those that come and go meanwhile or not."""
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(place, name).lstat().st_blocks * 512
    return total


class Measuring:
    """Runs a step and tells what it took. CPU is that of Spark with its workers, and that of the database."""

    def __init__(self, count: int, database: Pids, directory: Path) -> None:
        self._count = count
        self._directory = directory
        self._meter = Meter({"spark": _spark, "database": database})

    def __call__(self, name: str, work: Callable[[], object]) -> dict[str, Any]:
        say(name)
        self._meter.read()
        neighbours = Neighbours()
        with Peaks(self._directory) as peaks:
            began = time.monotonic()
            found = work()
            seconds = time.monotonic() - began
        used = self._meter.read()
        told = {
            "seconds": round(seconds, 2),
            "rows_per_second": round(self._count / seconds),
            "cpu_us_per_row": {name: round(of / self._count * 1e6, 2) for name, of in used.items()},
            "cores_of_others": round(neighbours.cores(), 2),
            "peak_mb": peaks.in_mb(),
            "peak_disk_bytes": peaks.disk,
            "found": found,
        }
        say(f"{name}: {told}")
        return told


def _spark() -> list[int]:
    """The JVM, what it started, and this process."""
    below = psutil.Process(os.getpid()).children(recursive=False)
    return [os.getpid(), *(pid for process in below if process.name() == "java" for pid in tree(process.pid))]


def full_read(session: SparkSession, url: str) -> int:
    """Every column that there is, bodies too, to the JVM and into one figure."""
    session.dataSource.register(source.bound(SecretUrl(url)))
    stored = ",".join(
        name for name in relations.KINDS["message"].columns if name not in ("crc", "body_digest", "damage")
    )
    frame = session.read.format("delayer").option("relation", "message").option("columns", stored).load()
    lengths = [
        sql.sum(sql.length(name)) for name in ("body", "properties", "to_key", "route", "exchange", "routing_key")
    ]
    return int(frame.agg(sql.count(sql.lit(1)), sql.max("due_ms"), *lengths).collect()[0][0])


def take(session: SparkSession, url: str, work: str) -> int:
    with extract.workplace(work) as place:
        watching = Watching(session, lambda _what, _done, _of: None)
        extract.take(session, SecretUrl(url), place, watching)
        files = Path(place.removeprefix("file://")).rglob("*.parquet")
        return sum(path.stat().st_size for path in files)


def audit(session: SparkSession, url: str, work: str) -> dict[str, int]:
    report = job.run(session, job.Options(store=SecretUrl(url), work=work), lambda _what, _done, _of: None).report
    return {rule.rule: rule.violations for rule in report.rules if rule.violations}


@dataclass
class _At:
    """A place with a store, and nothing else."""

    store_url: str


@contextmanager
def store(count: int, size: int, *, orders: bool = False) -> Iterator[tuple[str, Pids]]:
    with Postgres(settings=SETTINGS) as server:
        url = server.url(server.add_database())
        asyncio.run(upgrades.upgrade(url))
        if orders:
            asyncio.run(compaction.fill(_At(url), count, say))
        else:
            asyncio.run(rows.put_backlog(url, count, size, say))
        yield url, server.pids


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--size", type=int, default=512, help="bytes of a body")
    parser.add_argument("--orders", action="store_true", help="bodies of bench/orders.py, for the size of the extract")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--driver-memory", default="1g")
    parser.add_argument("--url", help="a store that is there already, with --rows rows; it is only read")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the JSON goes, if not to stdout")
    asked = parser.parse_args()
    telemetry.configure("console", "error")
    told: dict[str, Any] = {"about": about.provenance(), "rows": asked.rows, "size": asked.size}
    told |= {"orders": asked.orders, "cores": os.cpu_count(), "master": asked.master}
    if asked.output is not None:
        try:
            given.writable("--output", asked.output)
        except given.Mistake as mistake:
            print(mistake, file=sys.stderr)
            return given.USAGE
    with tempfile.TemporaryDirectory() as work:
        if asked.url:
            told |= measure(asked, asked.url, list, work)
        else:
            with store(asked.rows, asked.size, orders=asked.orders) as (url, pids):
                told |= measure(asked, url, pids, work)
    text = json.dumps(told, indent=2)
    if asked.output is None:
        print(text)
    else:
        asked.output.write_text(f"{text}\n", encoding="utf-8")
    return 0


def measure(asked: argparse.Namespace, url: str, database: Pids, work: str) -> dict[str, Any]:
    more = {"spark.driver.memory": asked.driver_memory}
    began = time.monotonic()
    with spark.session("delayer bench", master=asked.master, work=work, more=more) as session:
        session.range(1).count()
        told: dict[str, Any] = {"session_seconds": round(time.monotonic() - began, 2)}
        measured = Measuring(asked.rows, database, Path(work))
        told["full_read"] = measured("full read", lambda: full_read(session, url))
        told["extract"] = measured("extract", lambda: take(session, url, work))
        told["audit"] = measured("audit", lambda: audit(session, url, work))
    return told


if __name__ == "__main__":
    sys.exit(main())
