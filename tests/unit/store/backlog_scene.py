"""The lanes of a daemon over a scripted store, for their tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from delayer.core.counters import Counters
from delayer.release.loop import LaneRelease, ReleaseService
from delayer.release.ports import Lane
from delayer.store.backlog import PostgresBacklog
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

        self.backlog = PostgresBacklog(
            self.connection, heartbeat=self.heartbeat, counters=self.counters, poll_seconds=0.001, away_seconds=0.01
        )
        self.backlog.configure(connect or at_once)  # type: ignore[arg-type]
        self.running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """As the daemon's services do: the first failure stops both."""
        parts = [self.backlog.run, ReleaseService(self.backlog, self.release).run]
        tasks = [asyncio.create_task(part(self.stopping)) for part in parts]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self.stopping.set()
            if not all(task.done() for task in tasks):
                await asyncio.wait(tasks, timeout=1.0)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()

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
    """Like scene(), after lanes were taken."""
    async with scene(store, connect) as it:
        await it.backlog.wait_usable()
        yield it
