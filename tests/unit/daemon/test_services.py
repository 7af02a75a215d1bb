"""The life of the daemon's parts: start, stop, failure, refusal to stop. And the pauses between attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest
from structlog.testing import capture_logs

from delayer.core.backoff import LogThrottle, pause
from delayer.daemon.services import Part, ServiceGroup
from delayer.retry import Backoff


def part(events: list[str], name: str) -> Part:
    async def run(stopping: asyncio.Event) -> None:
        events.append(f"{name} began")
        await stopping.wait()
        events.append(f"{name} ended")

    return run


async def failing(_: asyncio.Event) -> None:
    raise ZeroDivisionError("first")


async def returning(_: asyncio.Event) -> None:
    """Return at once."""


async def test_a_group_stopped_before_its_start_still_runs_its_parts() -> None:
    group = ServiceGroup()
    group.stop()
    group.stop()
    await group.run()
    events: list[str] = []
    group.add("late", part(events, "late"))
    await group.run()
    assert events == ["late began", "late ended"]


async def test_parts_run_until_stopped() -> None:
    group, events = ServiceGroup(), list[str]()
    group.add("a", part(events, "a"))
    group.add("b", part(events, "b"))
    group.add("c", returning)
    running = asyncio.create_task(group.run())
    await asyncio.sleep(0)
    assert not running.done()
    group.stop()
    group.stop()
    await running
    assert sorted(events) == ["a began", "a ended", "b began", "b ended"]


async def test_the_last_parts_outlive_the_others() -> None:
    """A part that settles messages during the stop still has the lanes."""
    group, events = ServiceGroup(), list[str]()
    group.add("lanes", part(events, "lanes"), last=True)

    async def slow(stopping: asyncio.Event) -> None:
        await stopping.wait()
        for _ in range(5):
            await asyncio.sleep(0)
        assert "lanes ended" not in events
        events.append("slow ended")

    group.add("slow", slow)
    group.stop()
    await group.run()
    assert events == ["lanes began", "slow ended", "lanes ended"]


@pytest.mark.parametrize("last", [False, True])
async def test_a_part_that_fails_stops_the_others(last: bool) -> None:
    group, events = ServiceGroup(), list[str]()
    group.add("a", part(events, "a"))
    group.add("b", failing, last=last)
    with pytest.raises(ZeroDivisionError):
        await group.run()
    assert events == ["a began", "a ended"]
    assert group.stopping.is_set()


async def test_the_first_failure_is_raised_and_the_others_are_logged() -> None:
    group = ServiceGroup()

    async def too(stopping: asyncio.Event) -> None:
        await stopping.wait()
        raise KeyError("second")

    group.add("a", failing)
    group.add("b", too)
    with capture_logs() as logs, pytest.raises(ZeroDivisionError, match="first"):
        await group.run()
    assert [(one["event"], one["reason"]) for one in logs] == [("part failed too", "KeyError('second')")]


async def test_a_stop_waits_for_a_part_added_during_it() -> None:
    group, events = ServiceGroup(), list[str]()

    async def adds(stopping: asyncio.Event) -> None:
        await stopping.wait()
        group.add("late", part(events, "late"))

    group.add("adds", adds)
    group.stop()
    await group.run()
    assert events == ["late began", "late ended"]


@pytest.mark.parametrize("last", [False, True])
async def test_a_part_that_does_not_stop_is_cancelled(last: bool) -> None:
    group, events = ServiceGroup(grace=0.01), list[str]()

    async def deaf(_: asyncio.Event) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            events.append("cancelled")

    group.add("deaf", deaf, last=last)
    group.add("lanes", part(events, "lanes"), last=True)
    group.stop()
    with capture_logs() as logs:
        await group.run()
    assert events == ["lanes began", "lanes ended", "cancelled"], "the last parts have time to settle"
    assert ("stop forced", "deaf") in [(one["event"], one["part"]) for one in logs]


@pytest.mark.parametrize("also_deaf", [False, True])
async def test_a_failure_during_the_stop_is_raised(also_deaf: bool) -> None:
    group = ServiceGroup(grace=0.01)

    async def deaf(_: asyncio.Event) -> None:
        await asyncio.get_running_loop().create_future()

    async def late(stopping: asyncio.Event) -> None:
        await stopping.wait()
        raise ZeroDivisionError

    if also_deaf:
        group.add("deaf", deaf)
    group.add("late", late)
    group.stop()
    with pytest.raises(ZeroDivisionError):
        await group.run()


def test_pauses_double_up_to_the_longest() -> None:
    assert [pause(attempt, 0.0) for attempt in range(9)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 7.5, 7.5]
    for attempt in (0, 3, 16, 17, 10**9):
        assert pause(attempt, 0.0) < pause(attempt, 0.999) < 2 * pause(attempt, 0.0) <= 15.0


@pytest.mark.parametrize("before", [True, False])
async def test_a_pause_ends_when_told_to_stop(before: bool) -> None:
    stopping, leaving, beats = asyncio.Event(), asyncio.Event(), list[int]()
    beat: Callable[[], None] = lambda: beats.append(1)  # noqa: E731
    if before:
        stopping.set()
    waiting = asyncio.create_task(Backoff(beat, leaving, stopping).wait(3600))
    await asyncio.sleep(0)
    stopping.set()
    await waiting
    assert len(beats) == (0 if before else 1)


def test_the_log_of_a_long_outage_slows_down() -> None:
    throttle = LogThrottle()
    said = [second for second in range(7200) if throttle.should_log("refused", second)]
    assert said[:5] == [0, 10, 30, 70, 150]
    assert {later - sooner for sooner, later in pairwise(said[6:])} == {300.0}


def test_a_new_reason_is_always_logged() -> None:
    throttle = LogThrottle()
    assert throttle.should_log("refused", 0)
    assert throttle.should_log("no such vhost", 1)
    assert not throttle.should_log("no such vhost", 2)
    throttle.reset()
    assert throttle.should_log("no such vhost", 3)


# Closing the event loop waits for tasks only for a limited time.


SHORT = 0.05


async def stubborn() -> None:
    """Ignore every cancellation. The loop's timer keeps the task from the garbage collector while the loop runs."""
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue
