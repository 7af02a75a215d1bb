"""The store's half of a daemon: a backlog and its release, for the tests of shared lanes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace

from delayer.amqp.channel import seconds_until_due
from delayer.amqp.values import CONFIRMED, Outgoing, Pace
from delayer.core.counters import Counters
from delayer.core.hold import Outcome
from delayer.release.loop import LaneRelease, ReleaseService
from delayer.release.ports import Lane
from delayer.store.backlog import PostgresBacklog
from delayer.store.postgres import PostgresStore
from tests.support.fakes import Heartbeat, ScriptedLive
from tests.support.store import opened


class Publisher:
    """Confirms everything, and notes when."""

    ready, max_properties, batch_limit = True, 1 << 17, 1000

    def __init__(self) -> None:
        self.published: list[tuple[float, Outgoing]] = []

    async def publish(self, batch: Sequence[Outgoing], pace: Pace) -> list[Outcome]:
        for index, one in enumerate(batch):
            while left := seconds_until_due(pace, index):  # noqa: ASYNC110 - a clock
                await asyncio.sleep(left)
            self.note(one)
        return [CONFIRMED] * len(batch)

    def note(self, one: Outgoing) -> None:
        self.published.append((time.monotonic(), one))

    async def close(self) -> None:
        pass


class StoreLive(ScriptedLive):
    """With the clock of the store."""

    backlog: PostgresBacklog

    def now_lower_ms(self) -> int:
        return self.backlog.now_lower_ms() or 0


class Process:
    def __init__(self, url: str, name: str, rates: Mapping[bytes, float], publisher: Publisher | None = None) -> None:
        self._url, self._name, self.live = url, name, StoreLive(rates=rates)
        self.publisher = publisher or Publisher()
        self.connection = SimpleNamespace(current=True, connects=1)
        self.store: PostgresStore | None = None
        self.backlog = PostgresBacklog(self.connection, away_seconds=0.5, heartbeat=Heartbeat(), counters=Counters())
        self.live.backlog = self.backlog
        self.backlog.configure(self._connect, rates)

    async def run(self, stopping: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self.backlog.run(stopping))
            parts.create_task(ReleaseService(self.backlog, self._release).run(stopping))

    async def _connect(self) -> PostgresStore:
        self.store = await PostgresStore.connect(lambda: self._url, owner=self._name)
        return self.store

    def _release(self, lane: Lane) -> LaneRelease:
        return LaneRelease(lane, self.publisher, self.live, heartbeat=Heartbeat(), counters=Counters())

    def now_upper_ms(self) -> int:
        now = self.backlog.now_upper_ms()
        assert now is not None
        return now


@asynccontextmanager
async def running(url: str, name: str = "one", rates: Mapping[bytes, float] | None = None) -> AsyncIterator[Process]:
    process, stopping = Process(url, name, rates or {}), asyncio.Event()
    task = asyncio.create_task(process.run(stopping))
    try:
        await process.backlog.wait_usable()
        yield process
    finally:
        stopping.set()
        await task


async def migrated(url: str) -> None:
    async with opened(url):
        pass
