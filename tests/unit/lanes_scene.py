"""The lanes of a daemon over a scripted store, for the tests of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from delayer.services import lanes as module
from delayer.services.counting import Counters
from delayer.services.lanes import Lanes
from delayer.services.ports import Lane
from delayer.services.release import Portion, Release
from tests.rig.fakes import Pulse, ScriptedPublisher, ScriptedStore

Connect = Callable[[], Awaitable[Any]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_AROUND", 0.001)
    monkeypatch.setattr("delayer.services.release.SLICE", 0.005)
    monkeypatch.setattr("delayer.services.retry.pause", lambda *_: 0.0001)


class Scene:
    def __init__(self, store: ScriptedStore, connect: Connect | None, wanted: int) -> None:
        self.store = store
        self.pulse = Pulse()
        self.counters = Counters()
        self.stopping = asyncio.Event()

        async def at_once() -> ScriptedStore:
            return store

        self.publishing = self.reaching = True
        self.lanes = Lanes(
            connect or at_once,
            wanted,
            self.release,
            pulse=self.pulse,
            counters=self.counters,
            publishing=lambda: self.publishing,
            reaching=lambda: self.reaching,
        )
        self.running = asyncio.create_task(self.lanes.run(self.stopping))

    def release(self, lane: Lane) -> Release:
        publisher = ScriptedPublisher()
        return Release(lane, publisher, portion=Portion(), pulse=self.pulse, counters=self.counters)

    async def stop(self) -> None:
        self.stopping.set()
        await self.running


@asynccontextmanager
async def scene(
    store: ScriptedStore | None = None, connect: Connect | None = None, wanted: int = 2
) -> AsyncIterator[Scene]:
    made = Scene(store or ScriptedStore(), connect, wanted)
    try:
        yield made
    finally:
        if not made.running.done():
            await made.stop()
