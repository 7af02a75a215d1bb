"""The port Backlog: messages written by an intake leave the store unchanged, and operations on a key are applied in
order."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from delayer.core.errors import StoreLost
from delayer.core.hold import Hold, HoldKind
from delayer.core.message import KeyGroup, Parcel, Target
from delayer.core.operations import Cancel
from tests.conformance.stores import Daemon, Stores, hold_all, one_lane, waking
from tests.support.fakes import NO_CONFIRM, WHY
from tests.support.place import eventually
from tests.support.store import MANY, ROOM, bodies, parcel, release_all

LATER_MS = 60_000
FAR_MS = 600_000
Open = Callable[[int], Stores]


@pytest.mark.parametrize("key", [None, b"\x00key"])
async def test_a_message_comes_out_unchanged(stores: Open, key: bytes | None) -> None:
    async with one_lane(stores) as (daemon, lane):
        due_ms = daemon.now_ms - 5
        every = Parcel(
            due_ms, b"route", b"ex\x00change", bytes(range(256))[1:], Target(b"", b"queue"), b"\0\0", b"\0" * 9, key
        )
        empty = Parcel(due_ms, b"", b"", b"", Target(b"", b""), b"", b"", None)
        big = parcel(due_ms, body=bytes(range(256)) * 12_000, properties=b"\xff" * 70_000)
        await daemon.apply(every, empty, big)
        rows = await lane.claimers[0].claim(MANY, ROOM)
        assert [due.parcel for due in rows] == [every, empty, big]
        assert [(due.due_ms, due.attempts, due.sound) for due in rows] == [(due_ms, 0, True)] * 3
        assert len({due.id for due in rows}) == 3
        await lane.claimers[0].settle(rows, [])
        assert await release_all(lane) == []


async def test_a_key_is_free_again_after_the_release(stores: Open) -> None:
    async with one_lane(stores) as (daemon, lane):
        for _ in range(2):
            await daemon.apply(parcel(daemon.now_ms, key=b"k"))
            assert len(await release_all(lane)) == 1
            assert (await daemon.apply(Cancel(b"k"))).cancelled == set()


async def test_a_cancel_reports_whether_it_found_a_message(stores: Open) -> None:
    """In the batch, in the store, or held; two cancels of one key meet one message."""
    async with one_lane(stores) as (daemon, lane):
        now = daemon.now_ms
        await daemon.apply(parcel(now, key=b"held"))
        await hold_all(lane, WHY)
        await daemon.apply(parcel(now + LATER_MS, key=b"waits"), parcel(now + LATER_MS, key=b"replaced"))
        applied = await daemon.apply(
            Cancel(b"held"), Cancel(b"waits"), Cancel(b"waits"), Cancel(b"none"),
            parcel(now, key=b"new"), Cancel(b"new"), parcel(now, b"newest", key=b"replaced"),
        )  # fmt: skip
        assert applied.cancelled == {0, 1, 5}
        assert bodies(await release_all(lane)) == [b"newest"]


async def test_a_cancel_of_a_group_removes_the_messages_of_its_keys(stores: Open) -> None:
    async with one_lane(stores) as (daemon, lane):
        now = daemon.now_ms
        keys = [b"g:1", b"g:2", b"g:", b"g", b"g;", b"h:1", b"\xff\xff", b"\xff\x01"]
        await daemon.apply(*(parcel(now, key, key=key) for key in keys))
        await daemon.apply(Cancel(KeyGroup(b"g:")), Cancel(KeyGroup(b"none")), parcel(now, b"new", key=b"g:1"))
        await daemon.apply(Cancel(KeyGroup(b"\xff")), Cancel(b"h:1"))
        assert sorted(bodies(await release_all(lane))) == [b"g", b"g;", b"new"]


async def test_messages_replaced_within_a_batch_count_as_parked_and_cancelled(stores: Open) -> None:
    store = stores(1)
    async with store.daemon() as daemon:
        await daemon.has(1)
        now = daemon.now_ms
        await daemon.apply(*(parcel(now + LATER_MS, b"%d" % n, key=b"k") for n in range(5)), parcel(now + LATER_MS))
        waiting, held, totals, history = await store.standing()
        assert [one[4] for one in waiting] == [b"4", b"body"]
        assert totals == {"parked": 6, "cancelled": 4}
        assert (list(held), history.total(), {what for what, *_ in history}) == ([], 4, {"cancelled"})


async def test_a_cancel_waits_for_the_release_in_flight(stores: Open) -> None:
    async with one_lane(stores) as (daemon, lane):
        await daemon.apply(parcel(daemon.now_ms, b"old", key=b"k"))
        for gives_up in (True, False):
            rows = await lane.claimers[0].claim(MANY, ROOM)
            assert bodies(rows) == [b"old"]
            replacing = asyncio.create_task(daemon.apply(parcel(daemon.now_ms, b"old", key=b"k")))
            done, _ = await asyncio.wait([replacing], timeout=0.2)
            assert not done
            await (lane.claimers[0].give_up() if gives_up else lane.claimers[0].settle(rows, []))
            await replacing
        assert bodies(await release_all(lane)) == [b"old"]


@pytest.mark.parametrize("hold", [WHY, NO_CONFIRM, Hold(HoldKind.LATE, "late", may_be_delivered=True)])
async def test_a_held_message_that_never_waited_counts_as_parked_and_is_retried(stores: Open, hold: Hold) -> None:
    """When it is due, unless an operator acts first."""
    store = stores(1)
    async with store.daemon() as daemon:
        [lane] = await daemon.has(1)
        kept = parcel(daemon.now_ms, key=b"k", token=b"id-1")
        await daemon.backlog.hold([(kept, hold), (parcel(daemon.now_ms), hold)])
        assert await store.totals() == {"parked": 2, "held": 2}
        assert await release_all(lane) == []
        if not hold.for_a_person:
            assert 1.0 < lane.sleep_hint() <= 10.0
            await store.hurry(lane)
            rows = await lane.claimers[0].claim(MANY, ROOM)
            assert (rows[0].parcel, rows[0].attempts, rows[0].hold) == (kept, 1, hold)
            await lane.claimers[0].settle([], [(row, WHY) for row in rows])
            assert await store.totals() == {"parked": 2, "held": 2}
        assert (await daemon.apply(Cancel(b"k"))).cancelled == {0}
        assert await store.totals() == {"parked": 2, "held": 1, "cancelled": 1}


async def test_messages_of_a_route_with_a_lane_go_there(stores: Open) -> None:
    """Any process may own the lane, and its owner is woken."""
    store = stores(2)
    async with store.daemon([b"limited"]) as one, store.daemon([b"limited"]) as two:
        await eventually(lambda: (len(one.lanes), len(two.lanes)), lambda found: found in ((1, 2), (2, 1)))
        theirs = next(lane for lane in [*one.lanes, *two.lanes] if lane.route == b"limited")
        assert await release_all(theirs) == []
        now = one.now_ms
        parking = one if theirs in two.lanes else two
        async with waking(theirs):
            await parking.apply(*(parcel(now, b"%d" % n, route=b"limited" if n % 2 else b"free") for n in range(6)))
        assert bodies(await release_all(theirs)) == [b"1", b"3", b"5"]
        await parking.apply(parcel(now + FAR_MS, b"6", route=b"limited", key=b"k"))
        assert await store.lanes_of_waiting() == {theirs.number: 1, parking.lanes[0].number: 3}
        assert (await parking.apply(Cancel(b"k"))).cancelled == {0}


async def test_messages_due_later_go_to_all_lanes_in_turn(stores: Open) -> None:
    """Messages due soon stay with the daemon that parks them."""
    store = stores(4)
    async with store.daemon() as one, store.daemon() as two:
        await eventually(lambda: (len(one.lanes), len(two.lanes)), lambda found: found == (2, 2))
        await one.apply(*(parcel(one.now_ms + LATER_MS) for _ in range(9)))
        [soon] = (await store.lanes_of_waiting()).items()
        assert soon in [(lane.number, 9) for lane in one.lanes]
        for n in range(100):
            await one.apply(parcel(one.now_ms + FAR_MS), parcel(one.now_ms + FAR_MS, key=b"%d" % n))
        found = await store.lanes_of_waiting() - Counter(dict([soon]))
        assert sorted(found.values()) == [50] * 4


async def test_without_a_lane_nothing_is_accepted_and_the_reason_is_given(stores: Open) -> None:
    store = stores(1)
    async with store.daemon() as one:
        await one.has(1)
        assert (one.backlog.usable, one.backlog.reason) == (True, "")
        async with store.daemon() as two:
            await eventually(lambda: two.backlog.reason)
            assert not two.backlog.usable
            for attempt in (two.apply(parcel(0)), two.apply(Cancel(b"k")), two.backlog.hold([(parcel(0), WHY)])):
                with pytest.raises(StoreLost):
                    await attempt
        assert await store.totals() == {}


async def test_operations_with_keys_of_an_earlier_term_fail(stores: Open) -> None:
    """Even if they reach the store very late: the next process has already reapplied them, and newer ones after
    them."""
    store = stores(2)
    async with store.daemon() as one, store.daemon() as two:
        await eventually(lambda: (len(one.lanes), len(two.lanes)), lambda found: found == (1, 1))
        due_ms = one.now_ms + FAR_MS
        await one.apply(parcel(due_ms, b"old", key=b"k"))
        for late, newer in ((one, two), (two, one)):  # The first one begins its second term in the second turn.
            await eventually(lambda daemon=newer: takes_over(daemon), bool)
            await newer.apply(Cancel(b"k"), parcel(due_ms, b"newer", key=b"l"))
            for operations in ([parcel(due_ms, b"old", key=b"k")], [Cancel(b"l")], [Cancel(KeyGroup(b"l"))]):
                with pytest.raises(StoreLost, match="another process applies the operations with keys now"):
                    await late.apply(*operations)
            await late.apply(parcel(due_ms, b"plain"))
        assert sorted(await bodies_waiting(store)) == [b"newer", b"plain", b"plain"]


async def bodies_waiting(store: Stores) -> list[object]:
    waiting, *_ = await store.standing()
    return [body for *_, body, _ in waiting]


async def takes_over(daemon: Daemon) -> bool:
    """Begin a term, and whether a batch with a key is applied in it: the last look may be a second old."""
    daemon.backlog.begin_term()
    daemon.began = True
    try:
        await daemon.apply(Cancel(b"nothing"))
    except StoreLost:
        return False
    return True


async def test_a_term_whose_first_batch_comes_late_fails_too(stores: Open) -> None:
    store = stores(2)
    async with store.daemon() as one, store.daemon() as two:
        await eventually(lambda: (len(one.lanes), len(two.lanes)), lambda found: found == (1, 1))
        one.backlog.begin_term()
        one.began = True
        await two.apply(parcel(two.now_ms + FAR_MS, b"newer", key=b"k"))
        with pytest.raises(StoreLost, match="another process"):
            await one.apply(parcel(one.now_ms + FAR_MS, b"old", key=b"k"))
        assert await bodies_waiting(store) == [b"newer"]
