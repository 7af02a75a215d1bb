"""The lanes of a process: its share of them, parks that meet a lost one, the end of them, and waiting for one."""

from __future__ import annotations

import asyncio
import math

import pytest
from structlog.testing import capture_logs

from delayer.core.counters import Counters
from delayer.core.errors import LaneLost, StoreLost
from delayer.core.message import Parcel
from delayer.release import lane_manager as module
from delayer.release.lane_manager import LaneManager, share
from tests.support.fakes import NOW, WHY, Heartbeat, Look, ScriptedStore, due, until
from tests.unit.release.lanes_scene import at_work, quick, scene

__all__ = ["quick"]


async def test_owned_released_from_and_let_go() -> None:
    async with at_work() as it:
        first, second = it.store.made
        await asyncio.gather(first.sleeping.wait(), second.sleeping.wait())
        assert it.lanes.numbers == [1, 2]
        assert it.lanes.now_upper_ms() == NOW
        await until(lambda: it.store.maintained >= 1)
        await it.stop()
        assert first.events[-1] == second.events[-1] == "release"
        assert it.store.closed
        assert not it.lanes.ready.is_set()
        assert set(it.heartbeat.forgotten) == {"lane 1", "lane 2", "lanes"}


FEW = [due(n).parcel for n in range(module.BULK_MESSAGES - 1)]
MANY = [due(n).parcel for n in range(module.BULK_MESSAGES)]
LONG = [due(1).parcel._replace(body=bytes(module.BULK_BYTES))]


@pytest.mark.parametrize(
    ("parks", "lanes"),
    [([MANY] * 4, [1, 2, 1, 2]), ([FEW, FEW, MANY, FEW], [1, 1, 1, 1]), ([LONG] * 4, [1, 2, 1, 2])],
    ids=["large ones take turns", "small ones stay together", "few messages with large bodies are no small park"],
)
async def test_the_lane_of_a_park(parks: list[list[Parcel]], lanes: list[int]) -> None:
    async with at_work() as it:
        for parcels in parks:
            await it.lanes.park(parcels, [])
        assert [number for number, _, _ in it.store.parked] == lanes


async def test_small_parks_stay_in_one_lane_for_a_while_only() -> None:
    """What gathers for one instant, a few at a time, is released by all lanes when it comes."""
    async with at_work() as it:
        for _ in range(4):
            await it.lanes.park([due(1).parcel], [])
            it.lanes._began -= module.STAY_SECONDS
        assert [number for number, _, _ in it.store.parked] == [1, 2, 1, 2]


async def test_small_parks_leave_a_lane_that_does_not_keep_up() -> None:
    """More comes than one lane gets through, or its claim waits for somebody's lock: there are others."""
    async with at_work() as it:
        first, second = (release for _, release in it.lanes._releases.values())
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
    async with at_work(store) as it:
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
    async with at_work(store) as it:
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
        assert it.lanes.now_upper_ms() is None
        with pytest.raises(StoreLost):
            await it.lanes.park([], [b"key"])


async def test_a_lane_whose_loop_ends_is_replaced() -> None:
    async with at_work() as it:
        await until(lambda: it.lanes.numbers == [1, 2])
        first = it.store.made[0]
        first._claims.append(LaneLost("its connection is gone"))
        first.note_parked(NOW)
        await until(lambda: len(it.store.made) == 3)
        await until(lambda: it.lanes.numbers == [1, 2])
        assert first.events[-1] == "release"


async def test_upkeep_that_takes_long_holds_up_nobody() -> None:
    """Neither the looks, nor the end."""
    store, cancelled = ScriptedStore(), asyncio.Event()

    async def for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    store.on_maintain = for_ever
    async with scene(store) as it:
        await until(lambda: it.lanes.numbers == [1, 2])
        looks = store.looks
        await until(lambda: store.looks > looks + 2 * module.UPKEEP_LOOKS)
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

    async with at_work(store, third):
        assert len(tries) == 3


async def test_a_store_lost_later_is_waited_for() -> None:
    async with at_work(ScriptedStore(1)) as it:
        it.store.failure = StoreLost("gone")
        lane = it.store.made[0]
        await lane.sleeping.wait()
        lane._claims.append(LaneLost("gone"))
        lane.note_parked(NOW)
        await until(lambda: not it.lanes.ready.is_set())
        it.store.failure = None
        await it.lanes.ready.wait()
        assert it.lanes.numbers == [1]


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
    async with at_work() as it:
        first, second = it.store.made
        await asyncio.gather(first.sleeping.wait(), second.sleeping.wait())
        if where == "loop":
            first._claims.append(ZeroDivisionError())
            first.note_parked(NOW)
        else:
            it.store.look = broken  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            await it.running
        assert first.released.is_set()
        assert second.released.is_set()
        assert it.store.closed


async def broken() -> Look:
    raise ZeroDivisionError


async def test_a_forced_stop_lets_go_of_everything() -> None:
    async with at_work(ScriptedStore(1)) as it:
        lane = it.store.made[0]
        await lane.sleeping.wait()
        it.running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await it.running
        assert lane.released.is_set()
        assert it.store.closed


async def test_a_forced_stop_while_a_loop_does_not_end() -> None:
    stuck = asyncio.get_running_loop().create_future()
    async with at_work(ScriptedStore(1)) as it:
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


@pytest.mark.parametrize(("lanes", "live"), [(4, 1), (4, 2), (4, 3), (5, 3), (3, 8), (64, 7)])
def test_shares_add_up_and_differ_by_one_at_most(lanes: int, live: int) -> None:
    shares = [share(lanes, live, rank) for rank in range(live)]
    assert sum(shares) == lanes
    assert max(shares) - min(shares) <= 1
    of_routes = [share(3, live, live - 1 - rank) for rank in range(live)]
    both = [one + other for one, other in zip(shares, of_routes, strict=True)]
    assert max(both) - min(both) <= 1


async def test_lanes_above_the_share_are_dropped_and_free_ones_taken_up_to_it() -> None:
    async with scene(ScriptedStore(4)) as it:
        await until(lambda: it.lanes.numbers == [1, 2, 3, 4])
        it.store.live = 2
        await until(lambda: len(it.store.ours) == 2)
        kept = it.store.ours
        it.store.others = set(range(1, 5)) - kept
        looks = it.store.looks
        await until(lambda: it.store.looks > looks + 5)
        assert set(it.lanes.numbers) == it.store.ours == kept
        it.store.live, it.store.others = 1, set()
        await until(lambda: it.lanes.numbers == [1, 2, 3, 4])


async def test_a_process_without_a_share_says_so_and_waits_for_one() -> None:
    store = ScriptedStore(2)
    store.live, store.rank, store.others = 3, 2, {1, 2}
    with capture_logs() as logs:
        async with scene(store) as it:
            await until(lambda: store.looks > 5)
            for waiting in (it.lanes.wait_usable(0.0), it.lanes.wait_known(3600.0)):
                with pytest.raises(StoreLost, match="more processes than lanes"):
                    await waiting
            assert it.lanes.reached
            store.live, store.rank, store.others = 2, 1, {1}
            await it.lanes.ready.wait()
            assert it.lanes.numbers == [2]
    assert [one["processes"] for one in logs if one["event"] == "no lane"] == [3]


async def test_a_limited_route_gets_a_lane_that_no_other_message_is_parked_into() -> None:
    async with at_work() as it:
        it.limited = {b"slow"}
        await until(lambda: it.lanes.numbers == [1, 2, 3])
        assert it.store.made[-1].route == b"slow"
        for _ in range(6):
            await it.lanes.park([due(n).parcel for n in range(module.BULK_MESSAGES)], [])
        assert {number for number, _, _ in it.store.parked} == {1, 2}


async def test_a_store_without_lanes_is_told() -> None:
    with capture_logs() as logs:
        async with scene(ScriptedStore(0)) as it:
            await until(lambda: it.store.looks > 3)
    [told] = [one for one in logs if one["event"] == "store unreachable"]
    assert (told["reason"], told["next_step"]) == ("the store has no lanes", "run `delayer db upgrade`")


async def test_owners_that_publish_to_another_broker_are_told_once() -> None:
    store = ScriptedStore(4)
    store.live, store.others, store.broker = 2, {3, 4}, "theirs"
    with capture_logs() as logs:
        async with scene(store) as it:
            await until(lambda: store.looks > 5)
            assert it.lanes.usable
    told = [one["lanes"] for one in logs if one["event"] == "store shared"]
    assert told and all(lanes[-2:] == [3, 4] for lanes in told)


async def test_without_its_broker_a_process_drops_everything_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AWAY_SECONDS", 0.05)
    async with at_work() as it:
        it.reaching = False
        looks = it.store.looks
        await until(lambda: it.store.looks > looks + 3)
        assert it.lanes.usable, "not at once"
        await until(lambda: not it.lanes.numbers)
        assert not it.lanes.usable and not it.store.ours
        await until(lambda: it.store.left > 0)
        it.reaching = True
        await it.lanes.ready.wait()


async def test_without_a_store() -> None:
    lanes = LaneManager(lambda _: None, heartbeat=Heartbeat(), counters=Counters())  # type: ignore[arg-type, return-value]
    assert not lanes.usable
    assert lanes.now_upper_ms() is None
    await lanes.wait_known(3600.0)
    for attempt in (lanes.park([], []), lanes.hold([]), lanes.wait_usable(1.0)):
        with pytest.raises(StoreLost, match="no store is configured"):
            await attempt


# How long a daemon that could do without a store waits for it, before it says that there is none.

FOR_EVER = 3600.0


async def test_a_lane_is_waited_for() -> None:
    async with scene() as it:
        await asyncio.wait_for(it.lanes.wait_known(FOR_EVER), 5)
        assert it.lanes.usable


async def test_no_store_that_is_out_of_reach_is_waited_for_and_one_that_is_back_is() -> None:
    away = True

    async def connect() -> ScriptedStore:
        if away:
            raise StoreLost("refused")
        return ScriptedStore()

    async with scene(connect=connect) as it:
        await asyncio.wait_for(it.lanes.wait_known(FOR_EVER), 5)
        assert not it.lanes.usable
        away = False
        await asyncio.wait_for(it.lanes.ready.wait(), 5)
        assert not it.lanes.out_of_reach.is_set()


async def test_one_that_says_nothing_is_waited_for_so_long() -> None:
    silence = asyncio.Event()

    async def connect() -> ScriptedStore:
        await silence.wait()
        return ScriptedStore()

    async with scene(connect=connect) as it:
        await asyncio.wait_for(it.lanes.wait_known(0.01), 5)
        assert not it.lanes.usable
        silence.set()


async def test_lanes_that_were_let_go_of_without_a_broker_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken again with the first look that sees the broker, and keys may come before it."""
    monkeypatch.setattr(module, "AWAY_SECONDS", 0.01)
    async with at_work() as it:
        it.reaching = False
        await until(lambda: not it.lanes.usable)
        waiting = asyncio.create_task(it.lanes.wait_known(FOR_EVER))
        await asyncio.sleep(0)
        assert not waiting.done()
        it.reaching = True
        await asyncio.wait_for(waiting, 5)
        assert it.lanes.usable
