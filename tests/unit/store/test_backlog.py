"""The lanes of a process: its share, writes to a lost lane, the stop, and waiting for lanes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from delayer.core.counters import Counters
from delayer.core.errors import LaneLost, StoreLost
from delayer.core.message import Parcel
from delayer.store import backlog as module
from delayer.store.backlog import PostgresBacklog
from delayer.store.lanes.ownership import share
from delayer.store.postgres import FAR_MS, Placement, lane_of
from tests.support.fakes import NOW, WHY, Heartbeat, LaneTable, ScriptedStore, due, until
from tests.unit.store.backlog_scene import at_work, scene


async def test_lanes_are_taken_released_from_and_dropped() -> None:
    async with at_work() as it:
        first, second = it.store.made
        await asyncio.gather(first.sleeping.wait(), second.sleeping.wait())
        assert it.backlog.numbers == [1, 2]
        assert it.backlog.now_upper_ms() == NOW
        await until(lambda: it.store.maintained >= 1)
        await it.stop()
        assert first.events[-1] == second.events[-1] == "release"
        assert it.store.closed
        assert not it.backlog.usable
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
            await it.backlog.apply(parcels)
        assert [number for number, _, _ in it.store.parked] == lanes


async def test_small_parks_stay_in_one_lane_for_a_while_only() -> None:
    """Small parks for one instant spread over all lanes in time, so all lanes release them."""
    async with at_work() as it:
        for _ in range(4):
            await it.backlog.apply([due(1).parcel])
            it.backlog._began -= module.SMALL_BATCH_LANE_SECONDS
        assert [number for number, _, _ in it.store.parked] == [1, 2, 1, 2]


async def test_messages_due_later_go_to_all_lanes_one_after_another() -> None:
    """Other processes own half of the lanes."""
    store = ScriptedStore(4)
    store.live, store.others = 2, {3, 4}
    async with at_work(store) as it:
        await until(lambda: it.backlog.numbers == [1, 2])
        for _ in range(6):
            await it.backlog.apply([due(1).parcel])
        assert [number for _, _, number in store.parked] == [1, 2, 3, 4, 1, 2]
        assert {number for number, _, _ in store.parked} == {1}, "those due soon stay with this process"


@pytest.mark.parametrize(
    ("due_ms", "route", "lane"),
    [
        (NOW, b"in", 1),
        (NOW + FAR_MS - 1, b"in", 1),
        (NOW + FAR_MS, b"in", 2),
        (NOW + FAR_MS, b"slow", 5),
        (0, b"slow", 5),
    ],
)
def test_the_lane_of_a_message(due_ms: int, route: bytes, lane: int) -> None:
    place = Placement(1, {b"slow": 5}, epoch=1, far=2, far_ms=NOW + FAR_MS)
    assert lane_of(due(1).parcel._replace(due_ms=due_ms, route=route), place) == lane


@pytest.mark.parametrize("write", ["park", "hold"])
async def test_a_lane_lost_during_a_write_costs_one_attempt(write: str) -> None:
    store = ScriptedStore()

    async def lost(number: int) -> None:
        if number == 1:
            raise LaneLost("another process's")

    store.on_write = lost
    async with at_work(store) as it:
        if write == "park":
            await it.backlog.apply([due(1).parcel])
            assert [number for number, _, _ in store.parked] == [2]
        else:
            await it.backlog.hold([(due(1).parcel, WHY)])
            assert store.held == [(2, WHY)]


async def test_the_loss_of_all_lanes_is_a_lost_store() -> None:
    store = ScriptedStore()

    async def lost(number: int) -> None:
        raise LaneLost("another process's")

    store.on_write = lost
    async with at_work(store) as it:
        with pytest.raises(StoreLost, match="no lane of ours"):
            await it.backlog.apply([due(1).parcel])
        assert not it.backlog.usable
        store.on_write = None
        await it.backlog.wait_usable()  # the manager takes other lanes
        await it.backlog.apply([due(1).parcel])
        assert store.parked


async def test_slow_upkeep_delays_neither_polls_nor_the_stop() -> None:
    store, cancelled = ScriptedStore(), asyncio.Event()

    async def for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    store.on_maintain = for_ever
    async with scene(store) as it:
        await until(lambda: it.backlog.numbers == [1, 2])
        looks = store.looks
        await until(lambda: store.looks > looks + 2 * module.UPKEEP_LOOKS)
        assert store.maintained == 1
        await it.stop()
        assert cancelled.is_set()
        assert store.closed


async def test_failed_upkeep_is_tried_again() -> None:
    store = ScriptedStore()

    async def fails() -> None:
        raise StoreLost("no room for another partition")

    store.on_maintain = fails
    with capture_logs() as logged:
        async with scene(store) as it:
            await until(lambda: store.maintained == 2)
            assert it.backlog.reached, "the store answers"
    told = [(one["event"], one.get("reason")) for one in logged]
    assert ("upkeep failed", "no room for another partition") in told
    assert "store unreachable" not in {event for event, _ in told}


@pytest.mark.parametrize("where", ["loop", "look around"])
async def test_a_bug_closes_the_lanes_and_does_not_hang(where: str) -> None:
    """The manager also drops the lanes of the other loops, which were not told to stop."""
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
        assert first.closed.is_set()
        assert second.closed.is_set()
        assert it.store.closed


async def broken() -> LaneTable:
    raise ZeroDivisionError


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
        assert lane.closed.is_set()
        assert it.store.closed


@pytest.mark.parametrize(("lanes", "live"), [(4, 1), (4, 2), (4, 3), (5, 3), (3, 8), (64, 7)])
def test_shares_add_up_and_differ_by_at_most_one(lanes: int, live: int) -> None:
    shares = [share(lanes, live, rank) for rank in range(live)]
    assert sum(shares) == lanes
    assert max(shares) - min(shares) <= 1
    of_routes = [share(3, live, live - 1 - rank) for rank in range(live)]
    both = [one + other for one, other in zip(shares, of_routes, strict=True)]
    assert max(both) - min(both) <= 1


async def test_a_store_without_lanes_is_logged() -> None:
    with capture_logs() as logs:
        async with scene(ScriptedStore(0)) as it:
            await until(lambda: it.store.looks > 1)
    [told] = [one for one in logs if one["event"] == "store refused"]
    assert (told["log_level"], told["reason"], told["next_step"]) == (
        "error", "the store has no lanes", "run `delayer db upgrade`",
    )  # fmt: skip


async def test_without_a_store() -> None:
    link = SimpleNamespace(current=None, connects=0)
    backlog = PostgresBacklog(link, heartbeat=Heartbeat(), counters=Counters())
    assert not backlog.usable
    assert backlog.now_upper_ms() is None
    await backlog.wait_known(3600.0)
    for attempt in (backlog.apply([]), backlog.hold([]), backlog.wait_usable(1.0)):
        with pytest.raises(StoreLost, match="no store is configured"):
            await attempt


# A daemon in native mode waits for its store for a limited time.

FOR_EVER = 3600.0


async def test_the_wait_for_a_silent_store_is_limited() -> None:
    silence = asyncio.Event()

    async def connect() -> ScriptedStore:
        await silence.wait()
        return ScriptedStore()

    async with scene(connect=connect) as it:
        await asyncio.wait_for(it.backlog.wait_known(0.01), 5)
        assert not it.backlog.usable
        assert it.backlog.reason == "the store is out of reach, or refuses us"
        silence.set()
        await it.backlog.wait_usable()
        assert it.backlog.reason == ""


async def test_no_lane_is_taken_before_the_first_connection_to_the_broker() -> None:
    """With a wrong password the daemon would keep lanes without releasing anything from them."""
    store = ScriptedStore()
    async with scene(store) as it:
        it.connection.current, it.connection.connects = None, 0
        await until(lambda: store.maintained >= 1)
        assert it.backlog.numbers == []
        assert it.backlog.reason == "", "the lost broker is the reason, and the store is not"
        with pytest.raises(StoreLost, match="no lane without a connection to the broker"):
            await it.backlog.wait_usable(0.01)
        it.connection.current, it.connection.connects = True, 1
        await it.backlog.wait_usable()
        assert it.backlog.numbers == [1, 2]


async def test_the_daemon_waits_for_lanes_dropped_without_a_broker() -> None:
    """The first poll with a broker takes the lanes again, and messages with keys may arrive before it."""
    async with at_work() as it:
        it.connection.current = None
        await until(lambda: not it.backlog.usable)
        waiting = asyncio.create_task(it.backlog.wait_known(FOR_EVER))
        await asyncio.sleep(0)
        assert not waiting.done()
        it.connection.current = True
        await waiting
        assert it.backlog.usable


async def test_a_process_knows_that_it_is_alone() -> None:
    store = ScriptedStore()
    async with at_work(store) as it:
        await until(lambda: it.backlog.is_alone)
        store.live = 2
        await until(lambda: not it.backlog.is_alone)
        store.live = 1
        await until(lambda: it.backlog.is_alone)
        store.failure = StoreLost("gone")
        await until(lambda: not it.backlog.is_alone)
