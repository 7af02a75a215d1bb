"""The load: a publisher at a steady rate and a consumer of the destination, each in its own process, run as

    python -m bench.traffic publish '{"url": …}'

They print a line of JSON. Both use as little CPU as possible, because they share the cores with the measured programs.
The publisher sends prebuilt frames a hundred times a second, and the consumer does not parse frames: it finds one
header with a regular expression.
"""

from __future__ import annotations

import array
import asyncio
import json
import random
import re
import select
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Generator
from contextlib import closing
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from bench.figures import percentile
from bench.marks import (
    DAEMON_HEADER,
    DUE,
    NUMBERED,
    PLACEHOLDER,
    RELATIVE_HEADER,
    UNREAD,
    Chunk,
    Tally,
    distinct,
    due_at,
    instant,
)
from bench.plain import PORTION, Plain, message, portions

ROOT = Path(__file__).parents[1]
TICK = 0.01
CHUNKS = 200
"""The number of different writes that the publisher repeats."""
SMALL_READ = 1 << 14
ACKNOWLEDGED_TOGETHER = 500
REST_SECONDS = 0.0005
"""The consumer's pause after a small read: it delays each message by up to that much, and spares a core."""
SHARES = (0.5, 0.9, 0.95, 0.99, 0.995, 0.999, 0.9995, 0.9999, 1.0)


# ---- the publisher


def publish(order: dict[str, Any]) -> dict[str, Any]:
    """Publish messages with random delays (shortest, longest, step), ``rate`` a second from ``start`` (epoch s) on."""
    each = max(round(order["rate"] * TICK), 1)
    chance = random.Random(1)
    body = b"x" * order["size"]
    few, many, step = order["delays_ms"]
    header = order.get("header", DAEMON_HEADER)
    chunk = Chunk(order["exchange"], order["key"], body, each, header)
    delays = cycle([[chance.randrange(few, many + 1, step) for _ in range(each)] for _ in range(CHUNKS)])
    plain = Plain(order["url"])
    ticks, behind = round(order["seconds"] * order["rate"] / each), 0.0
    # The publisher does not use confirms: a slow broker blocks the writes, and the consumer counts the messages.
    for tick in range(ticks):
        due = order["start"] + tick * each / order["rate"]
        pause = due - time.time()
        if pause > 0:
            time.sleep(pause)
        else:
            behind = max(behind, -pause)
        now = int(time.time() * 1000)
        waits = next(delays)
        due_ms = [now + wait for wait in waits]
        plain.socket.sendall(chunk.fill(waits if header == RELATIVE_HEADER else due_ms, due_ms, tick * each))
    plain.depth(order["queue"])  # the answer arrives after the broker has read all messages
    plain.close()
    return {"sent": ticks * each, "behind_ms": behind * 1000, "cpu_seconds": time.process_time()}


def stamped(order: dict[str, Any]) -> dict[str, Any]:
    """Publish ``rate`` messages a second, due immediately: they show the lateness of the broker alone."""
    each = max(round(order["rate"] * TICK), 1)
    placeholder = instant(PLACEHOLDER)
    one = message(order["exchange"], order["key"], due_at(PLACEHOLDER, 0), b"x" * order["size"])
    chunk = one * each
    plain = Plain(order["url"])
    ticks = round(order["seconds"] * order["rate"] / each)
    for tick in range(ticks):
        pause = order["start"] + tick * each / order["rate"] - time.time()
        if pause > 0:
            time.sleep(pause)
        now = instant(int(time.time() * 1000))
        plain.socket.sendall(chunk.replace(placeholder, now))
    plain.depth(order["queue"])
    plain.close()
    return {"sent": ticks * each, "cpu_seconds": time.process_time()}


def flood(order: dict[str, Any]) -> dict[str, Any]:
    """Publish ``count`` messages as fast as confirms come, due at random within ``spread_ms`` from ``due_ms`` on."""
    chance = random.Random(2)
    body = b"x" * order["size"]

    def one(n: int) -> bytes:
        due = order["due_ms"] + chance.randrange(order["spread_ms"])
        properties = due_at(due, n, order.get("header", DAEMON_HEADER))
        return message(order["exchange"], order["key"], properties, body)

    plain = Plain(order["url"])
    each = min(order.get("each", PORTION), PORTION)
    writes = portions([one(n) for n in range(distinct(order["count"], order["size"], each))], each)
    samples = plain.publish(writes, order["count"], each, order.get("window", 4000))
    plain.close()
    return {"sent": order["count"], "seconds": samples[-1][0] - samples[0][0], "cpu_seconds": time.process_time()}


# ---- the consumer


class Arrivals(NamedTuple):
    """The arrival of each message (epoch ms), and its lateness."""

    at: array.array[float]
    late: array.array[float]


def consume(order: dict[str, Any]) -> dict[str, Any]:
    """Consume until ``count`` messages have arrived, or none for ``patience`` seconds.

    With ``distinct``, the number of different messages, it waits for each of them, and repeats do not count.
    Lateness covers the messages that were due from ``since_ms`` to ``until_ms``.
    """
    plain = Plain(order["url"])
    plain.consume_from(order["queue"], 20_000)
    print("consuming", flush=True)
    tally = Tally(order["count"], order["distinct"]) if "distinct" in order else None
    seen = _read(plain, order["count"], order["patience"], tally)
    plain.close()
    counted = due_between(seen, order.get("since_ms", 0), order.get("until_ms", float("inf")))
    return {
        "received": len(seen.at),
        "came": tally.came if tally else len(seen.at),
        "repeated": tally.repeated if tally else 0,
        "early": sum(late < 0 for late in seen.late),
        "first_ms": min(seen.at, default=0.0),
        "last_ms": max(seen.at, default=0.0),
        **lateness(counted),
        "cpu_seconds": time.process_time(),
    }


def due_between(seen: Arrivals, since_ms: float, until_ms: float) -> list[tuple[float, float]]:
    """Arrival and lateness of the messages that were due then."""
    return [(at, late) for at, late in zip(seen.at, seen.late, strict=True) if since_ms <= at - late < until_ms]


def lateness(counted: list[tuple[float, float]]) -> dict[str, Any]:
    """The number of messages, and their lateness by share."""
    ordered = sorted(late for _, late in counted)
    return {
        "counted": len(counted),
        "late": {str(share): percentile(ordered, share) for share in SHARES} if ordered else {},
    }


def reads(
    plain: Plain, headers: re.Pattern[bytes], patience: float
) -> Generator[tuple[float, list[tuple[bytes, ...]]]]:
    """Yield the instant of each read (epoch ms) and the marks of its messages, until none arrived for ``patience``
    seconds. A message is acknowledged after its read was handled."""
    tail = b""
    arrived = acknowledged = 0
    try:
        while select.select([plain.socket], [], [], patience)[0]:
            read = plain.socket.recv(1 << 20)
            now = time.time() * 1000
            if not read:
                raise EOFError("the broker closed the connection")
            data = tail + read
            found = list(headers.finditer(data))
            tail = data[max(found[-1].end() if found else 0, len(data) - UNREAD) :]
            small = len(read) < SMALL_READ
            arrived += len(found)
            yield now, [one.groups() for one in found]
            if arrived - acknowledged >= ACKNOWLEDGED_TOGETHER or (arrived > acknowledged and small):
                # One consumer on its own channel, so the tags are 1, 2, 3, …
                acknowledged = arrived
                plain.acknowledge(acknowledged)
            if small:
                time.sleep(REST_SECONDS)
    finally:
        if arrived > acknowledged:
            plain.acknowledge(arrived)


def _read(plain: Plain, count: int, patience: float, tally: Tally | None = None) -> Arrivals:
    seen = Arrivals(array.array("d"), array.array("d"))
    with closing(reads(plain, NUMBERED if tally else DUE, patience)) as all_reads:
        for now, found in all_reads:
            for due, *number in found:
                seen.at.append(now)
                seen.late.append(now - int.from_bytes(due, "big"))
                if tally:
                    tally.take(int.from_bytes(number[0], "big"))
            if (tally.came if tally else len(seen.at)) >= count:
                break
    return seen


# ---- running them


class Helper:
    """Run one of these functions in a separate process."""

    def __init__(self, verb: str, order: dict[str, Any], module: str = "bench.traffic") -> None:
        command = [sys.executable, "-m", module, verb, json.dumps(order)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._verb = verb

    @property
    def pid(self) -> int:
        return self._process.pid

    async def result(self) -> dict[str, Any]:
        """Its answer. Raises RuntimeError with its errors."""
        output, errors = await asyncio.to_thread(self._process.communicate)
        if self._process.returncode:
            raise RuntimeError(f"{self._verb}: exit {self._process.returncode}\n{errors}")
        return dict(json.loads(output.splitlines()[-1]))

    async def answers(self) -> AsyncIterator[dict[str, Any]]:
        """Each line of its answer as it comes. Raises RuntimeError with its errors."""
        assert self._process.stdout is not None
        while line := await asyncio.to_thread(self._process.stdout.readline):
            if line.startswith("{"):
                yield dict(json.loads(line))
        _, errors = await asyncio.to_thread(self._process.communicate)
        if self._process.returncode:
            raise RuntimeError(f"{self._verb}: exit {self._process.returncode}\n{errors}")

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def main() -> None:
    verbs = {"publish": publish, "stamped": stamped, "flood": flood, "consume": consume}
    print(json.dumps(verbs[sys.argv[1]](json.loads(sys.argv[2]))))


if __name__ == "__main__":
    main()
