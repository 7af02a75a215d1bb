"""The store's half of a daemon: a store, a lane manager and its release loops, for the tests of shared lanes.

As a program (``python -m tests.integration.lanes_shared URL NAME``) it prints a line for each message that it
publishes: the body, the due instant, and the upper bound of the store's clock at the publish.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from delayer.broker.ports import Lane, Store
from delayer.core.counters import Counters
from delayer.core.message import CONFIRMED, Outcome, Outgoing
from delayer.release.lane_manager import LaneManager
from delayer.release.loop import Release
from delayer.store.postgres import PostgresStore
from tests.integration.test_store_lane import opened
from tests.support.fakes import Heartbeat, ScriptedLive


class Publisher:
    """Confirms everything, and notes when."""

    ready, max_properties, batch_limit = True, 1 << 17, 1000

    def __init__(self) -> None:
        self.published: list[tuple[float, Outgoing]] = []

    async def publish(self, batch: Sequence[Outgoing]) -> list[Outcome]:
        now = time.monotonic()
        self.published += [(now, one) for one in batch]
        return [CONFIRMED] * len(batch)

    async def close(self) -> None:
        pass


class Process:
    def __init__(self, url: str, name: str, rates: Mapping[bytes, float], publisher: Publisher | None = None) -> None:
        self._url, self._name, self.live = url, name, ScriptedLive(rates=rates)
        self.publisher = publisher or Publisher()
        self.reaching = True
        self.store: PostgresStore | None = None
        self.lanes = LaneManager(
            self._release,
            limited=lambda: self.live.rates,
            heartbeat=Heartbeat(),
            counters=Counters(),
            reaching=lambda: self.reaching,
        )
        self.lanes.configure(self._connect)

    async def _connect(self) -> Store:
        self.store = await PostgresStore.connect(self._url, owner=self._name)
        return self.store

    def _release(self, lane: Lane) -> Release:
        return Release(lane, self.publisher, self.live, heartbeat=Heartbeat(), counters=Counters())

    def now_upper_ms(self) -> int:
        now = self.lanes.now_upper_ms()
        assert now is not None
        return now


@asynccontextmanager
async def running(url: str, name: str = "one", rates: Mapping[bytes, float] | None = None) -> AsyncIterator[Process]:
    process, stopping = Process(url, name, rates or {}), asyncio.Event()
    task = asyncio.create_task(process.lanes.run(stopping))
    try:
        await process.lanes.ready.wait()
        yield process
    finally:
        stopping.set()
        await task


async def migrated(url: str) -> None:
    async with opened(url):
        pass


class Printer(Publisher):
    """Prints what it publishes; the due instant is the end of the body."""

    def __init__(self) -> None:
        super().__init__()
        self.process: Process | None = None

    async def publish(self, batch: Sequence[Outgoing]) -> list[Outcome]:
        assert self.process is not None
        now_ms = self.process.now_upper_ms()
        for one in batch:
            print(one.body.decode(), now_ms)
        sys.stdout.flush()
        return [CONFIRMED] * len(batch)


async def main(url: str, name: str) -> None:
    printer = Printer()
    printer.process = Process(url, name, {}, printer)
    await printer.process.lanes.run(asyncio.Event())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
