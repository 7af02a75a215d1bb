"""When segments are restored, what is said of them, and what stands in whose way."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from delayer.broker.ports import Lane
from delayer.core.counters import Counters
from delayer.core.errors import StoreLost
from delayer.core.segment import Broken, Locked, Restored
from delayer.release import restore as module
from delayer.release.lane_manager import LaneManager
from delayer.release.loop import Release
from delayer.release.restore import Restoring
from tests.support.fakes import NOW, Heartbeat, ScriptedLive, ScriptedPublisher, ScriptedStore, until

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayer.release.lane_manager.LOOK_SECONDS", 0.001)
    monkeypatch.setattr("delayer.release.loop.SLICE", 0.005)
    monkeypatch.setattr("delayer.broker.retry.pause", lambda *_: 0.0001)


class Scene:
    """Lanes over a scripted store, and what restores into them."""

    def __init__(self, store: ScriptedStore) -> None:
        self.store = store
        self.counters = Counters()
        self.ahead_ms = DAY_MS
        self.heartbeat = Heartbeat()
        self.stopping = asyncio.Event()
        self.settled = asyncio.Event()

        async def connect() -> Any:
            return store

        self.lanes = LaneManager(self.release, heartbeat=self.heartbeat, counters=self.counters)
        self.lanes.configure(connect)
        self.restoring = Restoring(self.lanes, ahead_ms=lambda: self.ahead_ms, counters=self.counters)
        self.keeping = asyncio.create_task(self.lanes.run(self.settled))

    def release(self, lane: Lane) -> Release:
        publisher = ScriptedPublisher()
        return Release(lane, publisher, ScriptedLive(), heartbeat=self.heartbeat, counters=self.counters)


@asynccontextmanager
async def scene(*segments: Restored | Broken | Exception) -> AsyncIterator[Scene]:
    store = ScriptedStore()
    store.segments.extend(segments)
    made = Scene(store)
    await made.lanes.ready.wait()
    try:
        yield made
    finally:
        made.settled.set()
        await made.keeping


@asynccontextmanager
async def running(it: Scene) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(it.restoring.run(it.stopping))
    try:
        yield task
    finally:
        it.stopping.set()
        await asyncio.wait([task])


def far(segment: int, messages: int = 10) -> Restored:
    return Restored(segment, messages, NOW + HOUR_MS)


async def test_segments_due_within_restore_ahead_are_restored() -> None:
    async with scene() as it:
        assert await it.restoring.look() == module.LOOK_SECONDS
        it.ahead_ms = 2 * DAY_MS  # as by SIGHUP
        await it.restoring.look()
        assert it.store.horizons == [NOW + DAY_MS, NOW + 2 * DAY_MS]


async def test_a_rest_in_proportion_after_each_and_none_when_it_is_urgent(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Restored(3, 10, NOW - HOUR_MS)
    soon = Restored(2, 10, NOW + module.URGENT_MS - 1)
    async with scene(far(1), soon, late, Broken(4, 10, NOW + HOUR_MS, "why")) as it:
        clock = iter(range(100))
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: float(next(clock)), raising=False)
        looks = [await it.restoring.look() for _ in range(4)]
        monkeypatch.undo()
        assert looks == [module.REST * 1.0, 0.0, 0.0, 0.0]


async def test_segments_locked_by_others_are_tried_again_soon() -> None:
    """They may die at it, and a minute later would be late."""
    async with scene(Locked(NOW + HOUR_MS)) as it:
        with capture_logs() as logged:
            assert await it.restoring.look() == module.LOOK_AGAIN_SECONDS < module.LOOK_SECONDS
        assert logged == []


async def test_said_and_counted() -> None:
    async with scene(far(7, 10_000), Broken(8, 9_000, NOW, "the digest is another one")) as it:
        with capture_logs() as logged:
            await it.restoring.look()
            await it.restoring.look()
            await it.restoring.look()
        restored, broken = logged
        assert (restored["event"], restored["segment"], restored["messages"]) == ("segment restored", 7, 10_000)
        assert (restored["log_level"], broken["log_level"]) == ("info", "error")
        assert broken == broken | {
            "event": "segment broken",
            "segment": 8,
            "messages": 9_000,
            "first_due_ms": NOW,
            "reason": "the digest is another one",
        }
        assert it.counters.as_dict() == it.counters.as_dict() | {"restored": 10_000, "broken_segments": 1}


async def test_all_that_is_there_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REST", 0.0)
    broken = Broken(3, 10, NOW, "why")
    async with scene(far(1), far(2), broken, far(4)) as it, running(it):
        await until(lambda: len(it.store.horizons) == 5)
        assert not it.store.segments
        await asyncio.sleep(0)
        assert len(it.store.horizons) == 5, "nothing is left: the next look is a minute away"


async def test_a_store_out_of_reach_is_tried_again_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = StoreLost("out of reach", "wait")
    async with scene(lost, lost, far(1)) as it:
        with capture_logs() as logged:
            async with running(it):
                await until(lambda: not it.store.segments)
                await until(lambda: it.counters.as_dict()["restored"] == 10)
        said = [line for line in logged if line["event"] == "restoring interrupted"]
        assert said == [
            {
                "event": "restoring interrupted",
                "reason": "out of reach",
                "next_step": "wait",
                "log_level": "warning",
            }
        ]


async def test_a_lack_of_memory_ends_nobody() -> None:
    async with scene(MemoryError(), far(1)) as it:
        with capture_logs() as logged:
            async with running(it):
                await until(lambda: it.counters.as_dict()["restored"] == 10)
    said = [line["reason"] for line in logged if line["event"] == "restoring interrupted"]
    assert said == ["not enough memory to unpack a segment"]


async def test_without_a_lane_it_waits() -> None:
    store = ScriptedStore()
    store.segments.append(far(1))
    store.failure = StoreLost("no lanes today")
    it = Scene(store)
    async with running(it):
        await until(lambda: it.keeping.done() or it.heartbeat.beats.count("lanes") > 3)
        assert not store.horizons
        store.failure = None
        await until(lambda: it.counters.as_dict()["restored"] == 10)
    it.settled.set()
    await it.keeping


async def test_a_stop_does_not_wait_for_a_segment() -> None:
    async with scene(far(1)) as it:
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def for_ever(_: int) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        it.store.on_write = for_ever
        async with running(it) as task:
            await begun.wait()
            it.stopping.set()
            await task
            assert cancelled.is_set()


async def test_a_loss_while_it_is_stopped_is_no_failure() -> None:
    async with scene(far(1)) as it:
        begun = asyncio.Event()

        async def lost(_: int) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise StoreLost("cut off") from None

        it.store.on_write = lost
        async with running(it) as task:
            await begun.wait()
            it.stopping.set()
            await task
        assert task.exception() is None


async def test_a_bug_ends_the_daemon() -> None:
    async with scene(ZeroDivisionError()) as it, running(it) as task:
        with pytest.raises(ZeroDivisionError):
            await task


async def test_a_forced_stop() -> None:
    async with scene() as it, running(it) as task:
        await until(lambda: bool(it.store.horizons))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_a_daemon_loads_no_arrow_and_no_spark_at_its_start() -> None:
    script = "import sys, delayer.daemon.app; print(*{'pyarrow', 'pyspark', 'alembic', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "\n"
