"""The view of a working daemon from outside: the store's counters, the depth of queues."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

import asyncpg

from bench.figures import FIRST, LAST, Sample, rate_between
from bench.meter import Meter
from bench.servers import Place
from tests.support.daemon import DaemonProcess

LOOK_SECONDS = 0.02
STUCK_SECONDS = 60.0
"""A measurement ends after this many seconds without progress."""


class Stuck(RuntimeError):
    """The count stalled, or the daemon exited; the message ends with the daemon's log."""


@dataclass
class Course:
    """The rise of a count to ``total``; ``cpu`` is in seconds, while it went from 10 % to 90 %."""

    total: int
    samples: list[Sample]
    cpu: dict[str, float]

    @property
    def rate(self) -> float:
        return rate_between(self.samples, self.total)

    def cpu_us(self, of: str) -> float:
        """Microseconds of CPU a message."""
        return self.cpu.get(of, 0.0) * 1e6 / (self.total * (LAST - FIRST))


async def follow(
    count: Callable[[], Awaitable[int]], total: int, daemon: DaemonProcess, meter: Meter | None = None
) -> Course:
    """Poll ``count`` until it is ``total``. Raises Stuck."""
    samples: list[Sample] = []
    cpu: dict[str, float] | None = None
    started = meter is None
    moved_at, last = time.perf_counter(), 0
    while True:
        now, done = time.perf_counter(), await count()
        samples.append((now, done))
        if done != last:
            moved_at, last = now, done
        elif not daemon.running or now - moved_at > STUCK_SECONDS:
            raise Stuck(f"{done:,} of {total:,} and no further; the daemon's log ends:\n{daemon.tail()}")
        if meter is not None and not started and done >= total * FIRST:
            meter.read()
            started = True
        if meter is not None and started and cpu is None and done >= total * LAST:
            cpu = meter.read()
        if done >= total:
            return Course(total, samples, cpu or {})
        await asyncio.sleep(LOOK_SECONDS)


class Counters:
    """The store's counters, counted from the opening on."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.connection = connection
        self._before: dict[str, int] = {}

    @classmethod
    async def open(cls, place: Place) -> Self:
        counters = cls(await asyncpg.connect(place.store_url))
        counters._before = await counters._all()
        return counters

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.connection.close()

    async def _all(self) -> dict[str, int]:
        rows = await self.connection.fetch("SELECT kind, sum(n)::bigint FROM counter GROUP BY kind")
        return {kind: int(n) for kind, n in rows}

    async def since(self, kind: str) -> int:
        return (await self._all()).get(kind, 0) - self._before.get(kind, 0)

    async def follow(self, kind: str, total: int, daemon: DaemonProcess, meter: Meter | None = None) -> Course:
        """Poll until ``total`` more of that kind are counted. Raises Stuck."""
        return await follow(lambda: self.since(kind), total, daemon, meter)
