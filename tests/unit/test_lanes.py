"""The lanes of a daemon: its own, parks that meet a lost one, and the end of them."""

from __future__ import annotations

import asyncio
import math

import pytest
from structlog.testing import capture_logs

from delayer.core.errors import LaneLost, StoreLost
from delayer.services import in_hand
from delayer.services import lanes as module
from delayer.services.shelf import Shelf
from tests.rig.fakes import NOW, WHY, ScriptedLane, ScriptedStore, due, until
from tests.unit.lanes_scene import quick, scene

__all__ = ["quick"]


async def test_owned_released_from_and_let_go() -> None:
    async with scene() as it:
        await it.lanes.ready.wait()
        first, second = it.store.made
        await asyncio.gather(first.sleeping.wait(), second.sleeping.wait())
        assert it.lanes.numbers == [1, 2]
        assert it.lanes.now_ms() == NOW
        await until(lambda: it.store.maintained >= 1)
        await it.stop()
        assert first.events[-1] == second.events[-1] == "release"
        assert it.store.closed
        assert not it.lanes.ready.is_set()
        assert set(it.pulse.forgotten) == {"lane 1", "lane 2", "lanes"}


async def test_large_parks_take_the_lanes_in_turn() -> None:
    async with scene() as it:
        await it.lanes.ready.wait()
        for _ in range(4):
            await it.lanes.park([due(n).parcel for n in range(in_hand.TOGETHER)], [])
        assert [number for number, _, _ in it.store.parked] == [1, 2, 1, 2]
        await it.lanes.hold([(due(5).parcel, WHY)])
        assert it.store.held == [(1, WHY)]


async def test_small_parks_stay_together() -> None:
    async with scene() as it:
        await it.lanes.ready.wait()
        small = [due(n).parcel for n in range(in_hand.TOGETHER - 1)]
        for parcels in (small, small, [due(n).parcel for n in range(in_hand.TOGETHER)], small):
            await it.lanes.park(parcels, [])
        assert [number for number, _, _ in it.store.parked[:2]] == [1, 1]
        assert it.store.parked[3][0] == 1


async def test_few_messages_with_large_bodies_are_no_small_park() -> None:
    async with scene() as it:
        await it.lanes.ready.wait()
        large = due(1).parcel._replace(body=bytes(in_hand.TOGETHER_BYTES))
        for _ in range(4):
            await it.lanes.park([large], [])
        assert [number for number, _, _ in it.store.parked] == [1, 2, 1, 2]


async def test_small_parks_stay_in_one_lane_for_a_while_only() -> None:
    """What gathers for one instant, a few at a time, is released by all lanes when it comes."""
    async with scene() as it:
        await it.lanes.ready.wait()
        for _ in range(4):
            await it.lanes.park([due(1).parcel], [])
            it.lanes._in_hand._began -= in_hand.STAY
        assert [number for number, _, _ in it.store.parked] == [1, 2, 1, 2]


async def test_small_parks_leave_a_lane_that_does_not_keep_up() -> None:
    """More comes than one lane gets through, or its claim waits for somebody's lock: there are others."""
    async with scene() as it:
        await it.lanes.ready.wait()
        first, second = (it.lanes._in_hand.releases[lane] for lane in it.store.made)
        await asyncio.gather(*(lane.sleeping.wait() for lane in it.store.made))
        for behind in ((first,), (first, second), (second,), ()):
            first._busy_since = second._busy_since = None
            for release in behind:
                release._busy_since = -math.inf
            for _ in range(4):
                await it.lanes.park([due(1).parcel], [])
        placed = [number for number, _, _ in it.store.parked]
        assert placed == [2, 2, 2, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("write", ["park", "hold"])
async def test_a_lane_lost_under_a_write_costs_one_try(write: str) -> None:
    store = ScriptedStore()

    async def lost(number: int) -> None:
        if number == 1:
            raise LaneLost("somebody else's")

    store.on_write = lost
    async with scene(store) as it:
        await it.lanes.ready.wait()
        if write == "park":
            await it.lanes.park([due(1).parcel], [])
            assert [number for number, _, _ in store.parked] == [2]
        else:
            await it.lanes.hold([(due(1).parcel, WHY)])
            assert store.held == [(2, WHY)]


async def test_all_lanes_lost_is_a_lost_store() -> None:
    store = ScriptedStore()

    async def lost(number: int) -> None:
        raise LaneLost("somebody else's")

    store.on_write = lost
    async with scene(store) as it:
        await it.lanes.ready.wait()
        with pytest.raises(StoreLost, match="no lane of ours"):
            await it.lanes.park([due(1).parcel], [])
        assert not it.lanes.ready.is_set()
        store.on_write = None
        await it.lanes.ready.wait()  # others are taken in their stead
        await it.lanes.park([due(1).parcel], [])
        assert store.parked


async def test_before_the_store_is_reached_nothing_is_parked() -> None:
    asked = asyncio.Event()

    async def never() -> ScriptedStore:
        asked.set()
        await it.stopping.wait()
        raise StoreLost("out of reach")

    async with scene(connect=never) as it:
        await asked.wait()
        assert it.lanes.now_ms() is None
        with pytest.raises(StoreLost):
            await it.lanes.park([], [b"key"])


async def test_a_lane_whose_loop_ends_is_replaced() -> None:
    async with scene() as it:
        await it.lanes.ready.wait()
        await until(lambda: it.lanes.numbers == [1, 2])
        first = it.store.made[0]
        first._claims.append(LaneLost("its connection is gone"))
        first.note_parked(NOW)
        await until(lambda: it.lanes.numbers == [2, 3])
        assert first.events[-1] == "release"


async def test_upkeep_that_takes_long_holds_up_nobody() -> None:
    """Neither the looks, nor the end."""
    store, cancelled = ScriptedStore(ScriptedLane(99)), asyncio.Event()

    async def for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    store.on_maintain = for_ever
    async with scene(store, wanted=1) as it:
        await until(lambda: it.lanes.numbers == [1, 99])
        looks = store.adoptions
        await until(lambda: store.adoptions > looks + 2 * module.UPKEEP)
        assert store.maintained == 1
        await it.stop()
        assert cancelled.is_set()
        assert store.closed


async def test_upkeep_that_fails_is_tried_again() -> None:
    store = ScriptedStore()

    async def fails() -> None:
        raise StoreLost("no room for another partition")

    store.on_maintain = fails
    with capture_logs() as logged:
        async with scene(store):
            await until(lambda: store.maintained == 2)
    assert {"event": "store unreachable", "reason": "no room for another partition", "log_level": "warning"} in logged


async def test_a_store_out_of_reach_is_tried_again() -> None:
    store, tries = ScriptedStore(), list[int]()

    async def third() -> ScriptedStore:
        tries.append(1)
        if len(tries) < 3:
            raise StoreLost("out of reach")
        return store

    async with scene(store, third) as it:
        await it.lanes.ready.wait()
        assert len(tries) == 3


async def test_a_store_lost_later_is_waited_for() -> None:
    async with scene(wanted=1) as it:
        await it.lanes.ready.wait()
        it.store.failure = StoreLost("gone")
        lane = it.store.made[0]
        await lane.sleeping.wait()
        lane._claims.append(LaneLost("gone"))
        lane.note_parked(NOW)
        await until(lambda: not it.lanes.ready.is_set())
        it.store.failure = None
        await it.lanes.ready.wait()
        assert it.lanes.numbers == [2]


class SchemaOutdated(Exception):
    """What waiting does not mend."""


async def test_an_outdated_schema_ends_the_daemon() -> None:
    async def outdated() -> ScriptedStore:
        raise SchemaOutdated

    async with scene(connect=outdated) as it:
        with pytest.raises(SchemaOutdated):
            await it.running


@pytest.mark.parametrize("where", ["loop", "look around"])
async def test_a_bug_ends_the_lanes_and_does_not_hang(where: str) -> None:
    """Nobody has told the other loops to stop: they are let go all the same."""
    async with scene() as it:
        await it.lanes.ready.wait()
        first, second = it.store.made
        await asyncio.gather(first.sleeping.wait(), second.sleeping.wait())
        if where == "loop":
            first._claims.append(ZeroDivisionError())
            first.note_parked(NOW)
        else:
            it.store.adopt = broken  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            await it.running
        assert first.released.is_set()
        assert second.released.is_set()
        assert it.store.closed


async def broken(_: int) -> list[ScriptedLane]:
    raise ZeroDivisionError


async def test_a_forced_stop_lets_go_of_everything() -> None:
    async with scene(wanted=1) as it:
        await it.lanes.ready.wait()
        lane = it.store.made[0]
        await lane.sleeping.wait()
        it.running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await it.running
        assert lane.released.is_set()
        assert it.store.closed


async def test_a_forced_stop_while_a_loop_does_not_end() -> None:
    stuck = asyncio.get_running_loop().create_future()
    async with scene(wanted=1) as it:
        await it.lanes.ready.wait()
        lane = it.store.made[0]
        await lane.sleeping.wait()
        lane.wait = lambda _: stuck  # type: ignore[assignment, method-assign, return-value]
        lane.note_parked(NOW)
        it.stopping.set()
        lane.claim = lambda *_: stuck  # type: ignore[assignment, method-assign, return-value]
        await asyncio.wait({it.running}, timeout=0.02)
        it.running.cancel()
        await asyncio.wait({it.running})
        assert lane.released.is_set()
        assert it.store.closed


async def test_the_shelf_without_a_store() -> None:
    shelf = Shelf()
    assert not shelf.usable
    assert shelf.now_ms() is None
    for attempt in (shelf.park([], []), shelf.hold([]), shelf.wait_usable(1.0)):
        with pytest.raises(StoreLost, match="no store is configured"):
            await attempt


async def test_the_shelf_with_lanes() -> None:
    shelf = Shelf()
    async with scene() as it:
        shelf.lanes = it.lanes
        with pytest.raises(StoreLost, match="out of reach"):
            await shelf.wait_usable(0.0)
        await shelf.wait_usable(30.0)
        assert shelf.usable
        assert shelf.now_ms() == NOW
        await shelf.park([due(1).parcel], [b"key"])
        await shelf.hold([(due(2).parcel, WHY)])
        assert [(len(parcels), cancels) for _, parcels, cancels in it.store.parked] == [(1, [b"key"])]
        assert it.store.held
