"""The lanes of a daemon: owned, adopted, lost, let go; and parks that meet a lost one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from structlog.testing import capture_logs

from delayer.core.errors import LaneLost, StoreLost
from delayer.services import in_hand
from delayer.services import lanes as module
from delayer.services.counting import Counters
from delayer.services.lanes import Lanes
from delayer.services.ports import Lane
from delayer.services.release import Portion, Release
from delayer.services.shelf import Shelf
from tests.rig.fakes import NOW, Pulse, ScriptedLane, ScriptedPublisher, ScriptedStore, due, until

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
        await it.lanes.hold([(due(5).parcel, "why")])
        assert it.store.held == [(1, "why")]
        assert it.counters.as_dict()["held"] == 1


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
            await it.lanes.hold([(due(1).parcel, "why")])
            assert store.held == [(2, "why")]


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


async def test_a_dead_daemons_lane_is_adopted_and_only_emptied() -> None:
    orphan = ScriptedLane(99, [[due(1)]])
    async with scene(ScriptedStore(orphan), wanted=1) as it:
        await until(lambda: bool(orphan.settled))
        assert it.lanes.numbers == [1, 99]
        for n in range(3):
            await it.lanes.park([due(n).parcel], [])
        assert {number for number, _, _ in it.store.parked} == {1}


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


async def test_a_share_of_the_orphans_a_look_and_twice_as_many_while_there_are_more() -> None:
    orphans = [ScriptedLane(80 + n) for n in range(15)]
    async with scene(ScriptedStore(*orphans), wanted=2) as it:
        seen = set()

        def all_adopted() -> bool:
            seen.add(len(it.store.adoptable))
            return len(it.lanes.numbers) == 17

        await until(all_adopted)
        assert seen == {15, 13, 9, 1, 0}


async def test_what_fails_is_asked_for_less_and_stops_nothing_else() -> None:
    """A store with few connections left: lanes are let go, and upkeep is done, all the same."""
    store = ScriptedStore(*(ScriptedLane(80 + n) for n in range(20)))
    asked: list[int] = []

    async def adopt(count: int) -> list[ScriptedLane]:
        asked.append(count)
        if count > 2:
            raise StoreLost("too many clients already")
        lanes, store.adoptable = store.adoptable[:count], store.adoptable[count:]
        return lanes

    store.adopt = adopt  # type: ignore[method-assign]
    async with scene(store, wanted=2) as it:
        await until(lambda: len(asked) == 6)
        assert asked == [2, 4, 2, 4, 2, 4]
        assert it.lanes.adopted == [80, 81, 82, 83, 84, 85]


async def test_own_lanes_that_cannot_be_had_stop_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UPKEEP", 1)  # with every look, and not a minute later
    async with scene(wanted=2) as it:
        await it.lanes.ready.wait()
        it.store.failure = StoreLost("too many clients already")
        it.store.made[0]._claims.append(LaneLost("its connection is gone"))
        it.store.made[0].note_parked(NOW)
        await until(lambda: it.lanes.numbers == [2])
        maintained = it.store.maintained
        await until(lambda: it.store.maintained > maintained)


async def test_who_has_just_begun_leaves_the_orphans_to_others() -> None:
    """Their owners may be on their way; and after a loss of the store all are in this position."""
    async with scene(ScriptedStore(), wanted=1) as it:
        looks = it.lanes._look_around
        adoptions = []

        async def looked(*args: Any) -> None:
            await looks(*args)
            adoptions.append(it.store.adoptions)

        it.lanes._look_around = looked  # type: ignore[method-assign]
        await until(lambda: len(adoptions) > module.PATIENCE + 1)
        assert adoptions[: module.PATIENCE + 2] == [0] * (module.PATIENCE + 1) + [1]
        it.store.made[0]._claims.append(LaneLost("its connection is gone"))
        it.store.made[0].note_parked(NOW)
        await until(lambda: len(it.store.made) == 2)
        before = it.store.adoptions
        count = len(adoptions)
        await until(lambda: len(adoptions) > count + module.PATIENCE)
        assert adoptions[count + module.PATIENCE - 1] == before


async def test_an_idle_adopted_lane_is_let_go_and_no_other() -> None:
    idle, busy = ScriptedLane(98), ScriptedLane(99)
    async with scene(ScriptedStore(idle, busy), wanted=2) as it:
        await until(lambda: it.lanes.numbers == [1, 2, 98, 99])
        await asyncio.gather(*(lane.sleeping.wait() for lane in (idle, busy)))
        it.store.made[0].idle = True  # a lane of our own is kept, whatever is in it
        idle.idle = True
        await until(lambda: it.lanes.numbers == [1, 2, 99])
        assert idle.released.is_set()
        assert not busy.released.is_set()
        assert "lane 98" in it.pulse.forgotten
        for n in range(2):
            await it.lanes.park([due(n).parcel], [])


async def test_an_adopted_lane_that_is_asked_for_is_let_go_and_no_lane_of_our_own() -> None:
    spare, other = ScriptedLane(98), ScriptedLane(99)
    with capture_logs() as logged:
        async with scene(ScriptedStore(spare, other), wanted=2) as it:
            await until(lambda: it.lanes.numbers == [1, 2, 98, 99])
            it.store.asked_for = {1, 98}
            await until(lambda: it.lanes.numbers == [1, 2, 99])
            assert spare.released.is_set()
            assert not other.released.is_set()
    assert {"event": "lane let go", "lane": 98, "reason": "asked for", "log_level": "info"} in logged


async def test_without_a_broker_nothing_is_adopted_and_adopted_lanes_are_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MUTE_SECONDS", 0.05)
    first, second = ScriptedLane(98), ScriptedLane(99)
    store = ScriptedStore(first)
    with capture_logs() as logged:
        async with scene(store, wanted=2) as it:
            await until(lambda: it.lanes.numbers == [1, 2, 98])
            it.publishing = False
            store.adoptable = [second]
            await until(first.released.is_set)
            looks = it.pulse.beats.count("lanes")
            await until(lambda: it.pulse.beats.count("lanes") > looks + 40)
            assert it.lanes.numbers == [1, 2], "its own lanes it keeps"
            assert store.adoptable == [second]
            it.publishing = True
            await until(lambda: it.lanes.numbers == [1, 2, 99])
    assert {"event": "lane let go", "lane": 98, "reason": "no broker", "log_level": "info"} in logged


async def test_who_does_not_reach_the_broker_at_all_lets_go_of_its_own_lanes_and_takes_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MUTE_SECONDS", 0.05)
    store = ScriptedStore()
    async with scene(store, wanted=2) as it:
        await until(lambda: it.lanes.numbers == [1, 2])
        it.publishing = it.reaching = False
        await until(lambda: it.lanes.numbers == [])
        assert not it.lanes.ready.is_set()
        with pytest.raises(StoreLost):
            await it.lanes.park([], [])
        looks = it.pulse.beats.count("lanes")
        await until(lambda: it.pulse.beats.count("lanes") > looks + 40)
        assert it.lanes.numbers == []
        it.publishing = it.reaching = True
        await until(lambda: len(it.lanes.numbers) == 2)
        assert it.lanes.ready.is_set()


async def test_who_begins_without_a_broker_asks_nobody_for_lanes() -> None:
    store, asked = ScriptedStore(), asyncio.Event()
    store.free = 0

    async def ask() -> None:
        asked.set()

    store.on_ask = ask
    async with scene(store, wanted=2) as it:
        it.publishing = it.reaching = False
        looks = it.pulse.beats.count("lanes")
        await until(lambda: it.pulse.beats.count("lanes") > looks + 40)
        assert not asked.is_set()
        it.publishing = it.reaching = True
        await until(asked.is_set)


@pytest.mark.parametrize("how", ["they answer", "stopped meanwhile", "a bug"])
async def test_what_is_free_is_released_from_while_others_are_asked_for_more(how: str) -> None:
    store, asked, answered = ScriptedStore(), asyncio.Event(), asyncio.Event()
    store.free = 1

    async def ask() -> None:
        asked.set()
        await answered.wait()
        if how == "a bug":
            raise ZeroDivisionError

    store.on_ask = ask
    async with scene(store, wanted=2) as it:
        await it.lanes.ready.wait()
        await asked.wait()
        [lane] = store.made
        await lane.sleeping.wait()
        assert it.lanes.numbers == [1]
        looks = it.pulse.beats.count("lanes")
        await until(lambda: it.pulse.beats.count("lanes") > looks + 20)
        if how == "stopped meanwhile":
            await it.stop()
            return
        answered.set()
        if how == "a bug":
            with pytest.raises(ZeroDivisionError):
                await it.running
        else:
            await until(lambda: it.lanes.numbers == [1, 2])
    assert all(lane.released.is_set() for lane in store.made)


async def test_lanes_that_others_hand_over_at_the_last_moment_are_let_go() -> None:
    store, asked = ScriptedStore(), asyncio.Event()
    store.free = 0

    async def ask() -> None:
        asked.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    store.on_ask = ask
    async with scene(store, wanted=2) as it:
        await asked.wait()
        await it.stop()
    assert [lane.released.is_set() for lane in store.made] == [True, True]


async def test_an_adopted_lane_takes_the_place_of_a_lost_one() -> None:
    adopted = ScriptedLane(99)
    async with scene(ScriptedStore(adopted), wanted=1) as it:
        await until(lambda: it.lanes.adopted == [99])
        it.store.failure = StoreLost("no lane but that one is to be had")
        it.store.made[0]._claims.append(LaneLost("its connection is gone"))
        it.store.made[0].note_parked(NOW)
        await until(lambda: it.lanes.numbers == [99] and it.lanes.adopted == [])
        assert adopted.events.count("keep") == 1
        await it.lanes.ready.wait()
        await it.lanes.park([due(1).parcel], [])
        assert [number for number, _, _ in it.store.parked] == [99]
        adopted.idle = True
        it.store.asked_for = {99}
        looks = it.pulse.beats.count("lanes")
        await until(lambda: it.pulse.beats.count("lanes") > looks + 20)
        assert not adopted.released.is_set()


async def test_a_lane_let_go_while_it_releases_settles_first() -> None:
    lane = ScriptedLane(99, [[due(1)], [due(2)]])
    async with scene(ScriptedStore(lane), wanted=1) as it:
        lane.idle = True
        await until(lane.released.is_set)
        assert lane.events.count("claim") == lane.events.count("settle")
        assert lane.events[-1] == "release"
        assert "give up" not in lane.events
        await until(lambda: it.lanes.numbers == [1])


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
        await shelf.hold([(due(2).parcel, "why")])
        assert [(len(parcels), cancels) for _, parcels, cancels in it.store.parked] == [(1, [b"key"])]
        assert it.store.held
