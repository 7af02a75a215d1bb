"""Lanes that a daemon takes over from others, how many, and when it lets go of them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from structlog.testing import capture_logs

from delayer.core.errors import LaneLost, StoreLost
from delayer.services import lanes as module
from tests.rig.fakes import NOW, ScriptedLane, ScriptedStore, due, until
from tests.unit.lanes_scene import quick, scene

__all__ = ["quick"]


async def test_a_dead_daemons_lane_is_adopted_and_only_emptied() -> None:
    orphan = ScriptedLane(99, [[due(1)]])
    async with scene(ScriptedStore(orphan), wanted=1) as it:
        await until(lambda: bool(orphan.settled))
        assert it.lanes.numbers == [1, 99]
        for n in range(3):
            await it.lanes.park([due(n).parcel], [])
        assert {number for number, _, _ in it.store.parked} == {1}


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
