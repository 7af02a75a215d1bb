"""The lanes of a daemon over a scripted store, for their tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from delayer.broker.ports import Lane
from delayer.core.counters import Counters
from delayer.release.lane_manager import LaneManager
from delayer.release.loop import LaneRelease
from tests.support.fakes import Heartbeat, ScriptedLive, ScriptedPublisher, ScriptedStore

Connect = Callable[[], Awaitable[Any]]


class Scene:
    def __init__(self, store: ScriptedStore, connect: Connect | None) -> None:
        self.store = store
        self.heartbeat = Heartbeat()
        self.counters = Counters()
        self.stopping = asyncio.Event()
        self.connection = SimpleNamespace(current=True, connects=1)

        async def at_once() -> ScriptedStore:
            return store

        self.lanes = LaneManager(
            self.release,
            heartbeat=self.heartbeat,
            counters=self.counters,
            connection=self.connection,  # type: ignore[arg-type]
            broker=lambda: "ours",
            poll_seconds=0.001,
            away_seconds=0.01,
        )
        self.lanes.configure(connect or at_once, ScriptedLive())
        self.running = asyncio.create_task(self.lanes.run(self.stopping))

    def release(self, lane: Lane) -> LaneRelease:
        publisher = ScriptedPublisher()
        return LaneRelease(lane, publisher, ScriptedLive(), heartbeat=self.heartbeat, counters=self.counters)

    async def stop(self) -> None:
        self.stopping.set()
        await self.running


@asynccontextmanager
async def scene(store: ScriptedStore | None = None, connect: Connect | None = None) -> AsyncIterator[Scene]:
    made = Scene(store or ScriptedStore(), connect)
    try:
        yield made
    finally:
        if not made.running.done():
            await made.stop()


@asynccontextmanager
async def at_work(store: ScriptedStore | None = None, connect: Connect | None = None) -> AsyncIterator[Scene]:
    """Like scene(), after the manager has taken lanes."""
    async with scene(store, connect) as it:
        await it.lanes.ready.wait()
        yield it
