"""Probes that run beside the load and record when something was slow, each in its own process:

    python -m bench.probes broker '{"url": …}'

They print a line of JSON: the spans of at least LONG_SECONDS, and the median of all.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from bench.evidence import LONG_SECONDS, Span
from bench.figures import percentile
from bench.plain import Plain, message, properties

EVERY_SECONDS = 0.02
QUEUE, TABLE = "bench.probe", "bench_probe"
STEALING = 0.5
"""A span counts as stolen if the hypervisor took this share of one core in it."""
PRESSING = 0.9
"""A span counts as pressure if some process waited for CPU in this share of it."""


def turns(seconds: float) -> Iterator[float]:
    """Yield the instant of each turn (epoch s), EVERY_SECONDS after the one before, or as soon as that is over."""
    due = time.time()
    until = due + seconds
    while due < until:
        pause = due - time.time()
        if pause > 0:
            time.sleep(pause)
        now = time.time()
        yield now
        due = max(due + EVERY_SECONDS, time.time())


def timed(what: str, seconds: float, act: Callable[[], object]) -> dict[str, Any]:
    """Act in each turn, and record the spans of the slow ones."""
    spans, took = [], []
    for began in turns(seconds):
        act()
        ended = time.time()
        took.append(ended - began)
        if ended - began >= LONG_SECONDS:
            spans.append(Span(what, began, ended))
    return {"spans": spans, "p50_ms": round(percentile(sorted(took), 0.5) * 1000, 2), "turns": len(took)}


def broker(order: dict[str, Any]) -> dict[str, Any]:
    """A confirmed publish into a quorum queue of its own."""
    plain = Plain(order["url"])
    plain.fresh_queue(QUEUE)
    one = [message("", QUEUE, properties(b""), b"x" * 16)]
    found = timed("confirm of the probe", order["seconds"], lambda: plain.publish(one, 1, 1))
    plain.close()
    return found


def database(order: dict[str, Any]) -> dict[str, Any]:
    """A commit of one row into a table of its own."""
    with psycopg.connect(order["url"], autocommit=True) as connection:
        connection.execute(f"CREATE TABLE IF NOT EXISTS {TABLE} (at timestamptz)")
        insert = f"INSERT INTO {TABLE} VALUES (now())"
        found = timed("commit of the probe", order["seconds"], lambda: connection.execute(insert))
        connection.execute(f"DROP TABLE {TABLE}")
    return found


class Reading(NamedTuple):
    """Counters of the machine, in seconds since its start."""

    at: float
    steal: float
    pressure: float


def reading() -> Reading:
    """Read /proc; pressure is 0 on a kernel that does not count it."""
    steal = int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")
    try:
        some = Path("/proc/pressure/cpu").read_text().splitlines()[0]
    except FileNotFoundError:
        return Reading(time.time(), steal, 0.0)
    return Reading(time.time(), steal, int(some.rpartition("=")[2]) / 1e6)


def between(before: Reading, now: Reading) -> list[Span]:
    """What the machine withheld between two readings that were meant to be EVERY_SECONDS apart."""
    long = now.at - before.at
    found = {
        "run queue": long - EVERY_SECONDS >= LONG_SECONDS,
        "steal": now.steal - before.steal >= STEALING * long,
        "CPU pressure": now.pressure - before.pressure >= PRESSING * long,
    }
    return [Span(what, before.at, now.at) for what, is_so in found.items() if is_so]


def machine(order: dict[str, Any]) -> dict[str, Any]:
    """Sleep, and see how long it took, what was stolen, and whether processes waited for CPU."""
    spans: list[Span] = []
    before, late = reading(), []
    until = before.at + order["seconds"]
    while before.at < until:
        time.sleep(EVERY_SECONDS)
        now = reading()
        late.append(now.at - before.at - EVERY_SECONDS)
        spans += between(before, now)
        before = now
    return {"spans": spans, "p50_ms": round(percentile(sorted(late), 0.5) * 1000, 2), "turns": len(late)}


def main() -> None:
    verbs = {"broker": broker, "database": database, "machine": machine}
    print(json.dumps(verbs[sys.argv[1]](json.loads(sys.argv[2]))))


if __name__ == "__main__":
    main()
