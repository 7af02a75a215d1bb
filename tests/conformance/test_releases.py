"""The ports Releases, Lane and Claimer: each due message is claimed once, in order, and becomes claimable again after a
rollback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from delayer.core.errors import LaneLost, StoreLost
from delayer.core.hold import NACKED
from delayer.core.message import WINDOW_MS
from tests.conformance.stores import Stores, hold_all, one_lane, waking
from tests.support.fakes import LATE, NO_CONFIRM
from tests.support.place import eventually
from tests.support.store import MANY, ROOM, bodies, claim_when_due, parcel, release_all

Open = Callable[[int], Stores]


async def test_order_is_due_instant_then_arrival(stores: Open) -> None:
    async with one_lane(stores) as (daemon, lane):
        now = daemon.now_ms
        await daemon.apply(parcel(now - 10, b"3"), parcel(now - 30, b"1"), parcel(now - 10, b"4"))
        await daemon.apply(parcel(now - 10, b"5"), parcel(now - 20, b"2"))
        assert bodies(await release_all(lane)) == [b"1", b"2", b"3", b"4", b"5"]


async def test_a_batch_is_bounded_by_count_and_by_bytes_but_takes_one(stores: Open) -> None:
    async with one_lane(stores) as (daemon, lane):
        now = daemon.now_ms
        await daemon.apply(*(parcel(now - 99 + n, b"x" * 1000) for n in range(10)))
        sizes = []
        for limit, max_bytes in [(2, ROOM), (2, ROOM), (MANY, 1), (MANY, 1500), (MANY, 1), (2, ROOM)]:
            assert lane.sleep_hint() == 0.0
            rows = await lane.claimers[0].claim(limit, max_bytes)
            await lane.claimers[0].settle(rows, [])
            sizes.append(len(rows))
        assert sizes == [2, 2, 1, 2, 1, 2]
        assert await release_all(lane) == []


async def test_never_early_and_not_missed(stores: Open) -> None:
    async with one_lane(stores) as (daemon, lane):
        await release_all(lane)
        due_ms = daemon.now_ms + 400
        await daemon.apply(parcel(due_ms))
        rows = await lane.claimers[0].claim(MANY, ROOM)
        if not rows:  # otherwise this machine stalled for 300 ms
            assert lane.sleep_hint() <= 0.4
            rows = await claim_when_due(lane)
            assert lane.sleep_hint() >= 0.4
        assert daemon.now_ms >= due_ms - WINDOW_MS
        assert len(rows) == 1
        await lane.claimers[0].settle(rows, [])
        assert lane.sleep_hint() == 60.0


async def test_a_claim_leaves_rows_due_after_its_window(stores: Open) -> None:
    """The test claims without a pause: a claim that sleeps until a row is due would hide an early one."""
    async with one_lane(stores) as (daemon, lane):
        first_ms = daemon.now_ms
        await daemon.apply(*(parcel(first_ms + 7 * n) for n in range(60)))
        claimed, early = 0, []
        while claimed < 60:
            rows = await lane.claimers[0].claim(MANY, ROOM)
            now_ms = daemon.now_ms  # an upper bound: the store's clock shows no more
            early += [due.due_ms - now_ms for due in rows if due.due_ms > now_ms + WINDOW_MS]
            claimed += len(rows)
            await lane.claimers[0].settle(rows, [])
        assert early == []


async def test_a_wait_ends_when_a_sooner_message_is_parked_or_the_lane_must_be_left(stores: Open) -> None:
    async with one_lane(stores) as (daemon, lane):
        await release_all(lane)
        async with waking(lane):
            await daemon.apply(parcel(daemon.now_ms + 20))
        rows = await claim_when_due(lane)
        await lane.claimers[0].settle(rows, [])
        async with waking(lane):
            lane.leave()
        assert (len(rows), lane.leaving.is_set()) == (1, True)


async def test_two_claims_take_different_rows_and_a_rollback_returns_its_own(stores: Open) -> None:
    async with one_lane(stores) as (daemon, lane):
        first, second = lane.claimers
        now = daemon.now_ms
        await daemon.apply(*(parcel(now - 9 + n, b"%d" % n) for n in range(6)))
        assert bodies(await first.claim(2, ROOM)) == [b"0", b"1"]
        rows = await second.claim(2, ROOM)
        assert bodies(rows) == [b"2", b"3"]
        await first.give_up()
        await first.give_up()
        await second.settle(rows, [])
        assert lane.sleep_hint() == 0.0
        assert bodies(await release_all(lane)) == [b"0", b"1", b"4", b"5"]


async def test_a_claim_is_settled_whole_and_before_the_next(stores: Open) -> None:
    async with one_lane(stores) as (daemon, lane):
        await daemon.apply(*(parcel(daemon.now_ms) for _ in range(3)))
        rows = await lane.claimers[0].claim(MANY, ROOM)
        with pytest.raises(RuntimeError, match="before the last one was settled"):
            await lane.claimers[0].claim(MANY, ROOM)
        with pytest.raises(ValueError, match="claimed 3"):
            await lane.claimers[0].settle(rows[:1], [])
        assert len(await release_all(lane)) == 3


async def test_held_messages_are_claimed_again_with_their_hold_until_they_are_released(stores: Open) -> None:
    """Each hold is counted once; the flags of the first stay with the caller."""
    store = stores(1)
    async with store.daemon() as daemon:
        [lane] = await daemon.has(1)
        await daemon.apply(parcel(daemon.now_ms, b"held", key=b"k"), parcel(daemon.now_ms, b"late"))
        rows = await lane.claimers[0].claim(MANY, ROOM)
        await lane.claimers[0].settle(rows[1:], [(rows[0], NO_CONFIRM)])
        for attempts, hold in ((1, NO_CONFIRM), (2, NACKED)):
            assert await store.totals() == {"parked": 2, "released": 1, "held": 1}
            assert await release_all(lane) == []
            await store.hurry(lane)
            assert lane.sleep_hint() == 0.0
            [row] = await lane.claimers[0].claim(MANY, ROOM)
            assert (row.id, row.parcel.body, row.attempts, row.hold) == (rows[0].id, b"held", attempts, hold)
            await (lane.claimers[0].settle([], [(row, NACKED)]) if attempts == 1 else lane.claimers[0].give_up())
        assert bodies(await release_all(lane)) == [b"held"]
        waiting, held, totals, history = await store.standing()
        assert (waiting, held.total(), totals) == ([], 0, {"parked": 2, "released": 2})
        assert sorted(what for what, *_ in history.elements()) == ["held", "released", "released"]


async def test_a_message_that_waits_for_an_operator_is_not_retried(stores: Open) -> None:
    store = stores(1)
    async with store.daemon() as daemon:
        [lane] = await daemon.has(1)
        await daemon.apply(parcel(daemon.now_ms))
        [row] = await hold_all(lane, LATE)
        assert row.attempts == 0
        await store.hurry(lane)
        assert await release_all(lane) == []
        assert lane.sleep_hint() > 10.0


async def test_a_message_is_found_however_long_ago_it_was_due(stores: Open) -> None:
    async with one_lane(stores) as (daemon, lane):
        await release_all(lane)
        day = 86_400_000
        for back in (0, 10, 60_000, 3 * day, 30 * day):
            await daemon.apply(parcel(daemon.now_ms - back))
            assert lane.sleep_hint() == 0.0
            assert len(await release_all(lane)) == 1


async def test_daemons_share_the_lanes_evenly_and_never_own_the_same_one(stores: Open) -> None:
    store = stores(4)
    async with store.daemon() as one:
        await one.has(4)
        async with store.daemon() as two:
            await eventually(lambda: (len(one.lanes), len(two.lanes)), lambda found: found == (2, 2))
            assert {lane.number for lane in [*one.lanes, *two.lanes]} == {1, 2, 3, 4}
            await one.apply(parcel(one.now_ms - 1))
            assert await two.release_all() == []
            assert len(await one.release_all()) == 1
        await one.has(4)


async def test_the_next_owner_has_the_messages_of_a_lane_that_was_left(stores: Open) -> None:
    """Also those of an open claim."""
    store = stores(1)
    async with store.daemon() as two:
        [lane] = await two.has(1)
        await two.apply(parcel(two.now_ms - 1, b"orphan"))
        await lane.claimers[0].claim(MANY, ROOM)
        async with store.daemon() as one:
            two.stopping.set()
            [same] = await one.has(1)
            assert same.number == lane.number
            assert bodies(await claim_when_due(same)) == [b"orphan"]
            await lane.close()


async def test_a_lost_lane_takes_nothing_and_another_daemon_has_it_all(stores: Open) -> None:
    store = stores(1)
    async with store.daemon() as one:
        [lane] = await one.has(1)
        await one.apply(parcel(one.now_ms - 1, b"claimed"))
        rows = await lane.claimers[0].claim(MANY, ROOM)
        await store.lose(lane)
        for attempt in (lane.claimers[0].settle(rows, []), lane.claimers[0].claim(1, 1)):
            with pytest.raises(StoreLost):
                await attempt
        with pytest.raises(LaneLost):
            lane.sleep_hint()
        await lane.claimers[0].give_up()
        await lane.wait(50.0)
        await lane.close()
        await lane.close()
        again = await eventually(lambda: [other for other in one.lanes if other is not lane])
        assert bodies(await claim_when_due(again[0])) == [b"claimed"]
        assert await store.totals() == {"parked": 1}


async def test_lanes_end_when_the_daemon_stops(stores: Open) -> None:
    async with stores(2).daemon() as daemon:
        lanes = list(await daemon.has(2))
        daemon.stopping.set()
        await asyncio.gather(*(lane.leaving.wait() for lane in lanes))
        await eventually(lambda: not daemon.backlog.usable)
        assert daemon.lanes == []
