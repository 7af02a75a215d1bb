"""Restoring segments: the horizon, the rests, the log, failures and the stop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from delayer.core.errors import StoreLost
from delayer.core.segment import Broken, Restored
from delayer.store import restoring as module
from delayer.store.restoring import SegmentRestorer
from tests.support.fakes import NOW, ScriptedStore, until
from tests.unit.store import backlog_scene

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


class Scene:
    """Lanes over a scripted store, and the restorer of their segments."""

    def __init__(self, keeping: backlog_scene.Scene) -> None:
        self.store = keeping.store
        self.counters = keeping.counters
        self.heartbeat = keeping.heartbeat
        self.ahead_ms = DAY_MS
        self.stopping = asyncio.Event()
        self.restoring = SegmentRestorer(keeping.backlog, lambda: self.ahead_ms, self.counters)


@asynccontextmanager
async def scene(*segments: Restored | Broken | Exception, without: StoreLost | None = None) -> AsyncIterator[Scene]:
    store = ScriptedStore()
    store.segments.extend(segments)
    store.failure = without
    async with backlog_scene.scene(store) as keeping:
        if without is None:
            await keeping.backlog.wait_usable()
        yield Scene(keeping)


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
        assert await it.restoring.poll() == module.POLL_SECONDS
        it.ahead_ms = 2 * DAY_MS  # like a reload
        await it.restoring.poll()
        assert it.store.horizons == [NOW + DAY_MS, NOW + 2 * DAY_MS]


async def test_each_restore_is_followed_by_a_rest_unless_it_is_urgent() -> None:
    late = Restored(3, 10, NOW - HOUR_MS)
    soon = Restored(2, 10, NOW + module.URGENT_MS - 1)
    async with scene(far(1), soon, late, Broken(4, 10, NOW + HOUR_MS, "why")) as it:
        it.store.on_write = lambda _: asyncio.sleep(0.02)
        began = time.monotonic()
        first, *others = [await it.restoring.poll() for _ in range(4)]
        assert 0.019 <= first / module.REST <= time.monotonic() - began
        assert others == [0.0, 0.0, 0.0]


async def test_restores_and_broken_segments_are_logged_and_counted() -> None:
    async with scene(far(7, 10_000), Broken(8, 9_000, NOW, "the digest is another one")) as it:
        with capture_logs() as logged:
            await it.restoring.poll()
            await it.restoring.poll()
            await it.restoring.poll()
        restored, broken = logged
        assert (restored["event"], restored["segment"], restored["messages"]) == ("segment restored", 7, 10_000)
        assert (restored["log_level"], broken["log_level"]) == ("info", "error")
        told = {"segment": 8, "messages": 9_000, "first_due_ms": NOW, "reason": "the digest is another one"}
        assert broken == broken | {"event": "segment broken"} | told
        assert it.counters.as_dict() == it.counters.as_dict() | {"restored": 10_000, "broken_segments": 1}


@pytest.mark.parametrize(
    ("error", "reason", "step", "level"),
    [
        (StoreLost("refused", "wait"), "refused", "wait", "error"),
        (MemoryError(), "not enough memory to unpack a segment", None, "warning"),
    ],
)
async def test_a_failure_is_logged_once(error: Exception, reason: str, step: str | None, level: str) -> None:
    async with scene(error, error, far(1)) as it:
        with capture_logs() as logged:
            async with running(it):
                await until(lambda: it.counters.as_dict()["restored"] == 10)
    [said] = [line for line in logged if line["event"] == "restoring interrupted"]
    assert (said["reason"], said.get("next_step"), said["log_level"]) == (reason, step, level)


@pytest.mark.parametrize("end", [asyncio.CancelledError(), StoreLost("cut off")], ids=repr)
async def test_a_stop_cancels_a_restore_without_a_failure(end: BaseException) -> None:
    async with scene(far(1)) as it:
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def for_ever(_: int) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise end from None

        it.store.on_write = for_ever
        async with running(it) as task:
            await begun.wait()
            it.stopping.set()
            await task
            assert cancelled.is_set()


async def test_a_bug_ends_the_daemon() -> None:
    async with scene(ZeroDivisionError()) as it, running(it) as task:
        with pytest.raises(ZeroDivisionError):
            await task


def test_a_daemon_loads_no_arrow_and_no_spark_at_its_start() -> None:
    script = "import sys, delayer.daemon.app; print(*{'pyarrow', 'pyspark', 'alembic', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "\n"
