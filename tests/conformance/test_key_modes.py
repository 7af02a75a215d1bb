"""The port Backlog: the modes of keys, of messages that wait, are in release, are held, or are in the same batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from delayer.core.message import REPLACE, KeyMode, Parcel
from delayer.core.operations import Cancel
from tests.conformance.stores import Daemon, Stores, hold_all, one_lane
from tests.conformance.test_backlog import takes_over
from tests.support.fakes import LATE, WHY
from tests.support.place import eventually
from tests.support.store import MANY, ROOM, bodies, parcel, release_all

LATER_MS = 60_000
FAR_MS = 600_000
CEILING_MS = 5_000
KEEP = KeyMode(keep=True)
DEBOUNCE = KeyMode(ceiling_ms=CEILING_MS)
Open = Callable[[int], Stores]


def keyed(daemon: Daemon, body: bytes, mode: KeyMode, in_ms: int = LATER_MS) -> Parcel:
    return parcel(daemon.now_ms + in_ms, body, key=b"k", mode=mode)


async def waiting(store: Stores) -> list[tuple[object, object]]:
    """The body and the due instant of each waiting message."""
    found, *_ = await store.standing()
    return [(one[4], one[0]) for one in found]


async def pass_of(daemon: Daemon, milliseconds: int) -> None:
    """Wait until the store's clock has moved on."""
    end_ms = daemon.now_ms + milliseconds
    await eventually(lambda: daemon.now_ms, lambda now_ms: now_ms >= end_ms)


async def test_keep_drops_each_message_that_comes_while_one_waits(stores: Open) -> None:
    """Whatever its mode, its destination or its lane. They count as parked and cancelled."""
    store = stores(2)
    async with store.daemon() as one, store.daemon() as two:
        await eventually(lambda: (len(one.lanes), len(two.lanes)), lambda found: found == (1, 1))
        first = keyed(one, b"first", REPLACE, FAR_MS)
        await one.apply(first, keyed(one, b"same batch", KEEP))
        await one.apply(
            keyed(one, b"later", KEEP)._replace(route=b"other", target=first.target._replace(exchange=b"x"))
        )
        await eventually(lambda: takes_over(two), bool)
        await two.apply(keyed(two, b"elsewhere", KEEP, 0), parcel(two.now_ms + LATER_MS, b"plain"))
        found, held, totals, history = await store.standing()
        assert [one[4] for one in found] == [b"plain", b"first"]
        assert (totals, list(held)) == ({"parked": 5, "cancelled": 3}, [])
        assert (history.total(), {what for what, *_ in history}) == (3, {"cancelled"})


async def test_keep_starts_anew_after_a_release_and_after_a_cancel(stores: Open) -> None:
    async with one_lane(stores) as (daemon, lane):
        for body in (b"1", b"2"):
            await daemon.apply(keyed(daemon, body, KEEP, 0))
            assert bodies(await release_all(lane)) == [body]
        await daemon.apply(keyed(daemon, b"3", KEEP))
        applied = await daemon.apply(Cancel(b"k"), keyed(daemon, b"4", KEEP, 0), keyed(daemon, b"5", KEEP, 0))
        assert applied.cancelled == {0}
        assert bodies(await release_all(lane)) == [b"4"]


async def test_keep_waits_for_the_release_in_flight(stores: Open) -> None:
    """A message that is published already covers none that comes afterwards."""
    async with one_lane(stores) as (daemon, lane):
        await daemon.apply(keyed(daemon, b"first", KEEP, 0))
        for gives_up in (True, False):
            rows = await lane.claimers[0].claim(MANY, ROOM)
            assert bodies(rows) == [b"first"]
            keeping = asyncio.create_task(daemon.apply(keyed(daemon, b"next", KEEP, 0)))
            done, _ = await asyncio.wait([keeping], timeout=0.2)
            assert not done
            await (lane.claimers[0].give_up() if gives_up else lane.claimers[0].settle(rows, []))
            await keeping
        assert bodies(await release_all(lane)) == [b"next"]


@pytest.mark.parametrize("hold", [WHY, LATE])
async def test_a_held_message_has_its_key_in_every_mode(stores: Open, hold: object) -> None:
    store = stores(1)
    async with store.daemon() as daemon:
        [lane] = await daemon.has(1)
        await daemon.apply(keyed(daemon, b"held", KEEP, 0))
        await hold_all(lane, hold)  # type: ignore[arg-type]
        await daemon.apply(keyed(daemon, b"dropped", KEEP))
        assert await store.totals() == {"parked": 2, "held": 1, "cancelled": 1}
        before_ms = daemon.now_ms
        await daemon.apply(keyed(daemon, b"new", DEBOUNCE))
        assert await store.totals() == {"parked": 3, "cancelled": 2}
        [(body, due_ms)] = await waiting(store)
        assert body == b"new"
        assert before_ms - 5 <= int(str(due_ms)) - CEILING_MS <= daemon.now_ms, "a new burst"


async def test_debounce_replaces_within_the_ceiling_of_the_first_message(stores: Open) -> None:
    """The start of the burst survives each replacement, by any lane and with any delay."""
    store = stores(1)
    async with store.daemon() as daemon:
        await daemon.has(1)
        before_ms = daemon.now_ms
        await daemon.apply(keyed(daemon, b"first", DEBOUNCE, 1_000))
        after_ms = daemon.now_ms
        [(_, asked_ms)] = await waiting(store)
        assert before_ms + 1_000 <= int(str(asked_ms)) <= after_ms + 1_000
        await daemon.apply(keyed(daemon, b"0", DEBOUNCE, FAR_MS), keyed(daemon, b"1", DEBOUNCE, FAR_MS))
        [(body, due_ms)] = await waiting(store)
        assert body == b"1"
        assert before_ms + CEILING_MS - 5 <= int(str(due_ms)) <= after_ms + CEILING_MS
        await pass_of(daemon, 20)
        await daemon.apply(keyed(daemon, b"2", DEBOUNCE))
        assert await waiting(store) == [(b"2", due_ms)]
        await daemon.apply(keyed(daemon, b"dropped", KEEP), keyed(daemon, b"3", DEBOUNCE, FAR_MS))
        assert await waiting(store) == [(b"3", due_ms)]


@pytest.mark.parametrize("end", [[Cancel(b"k")], [parcel(0, b"replaces", key=b"k")]], ids=["cancel", "replace"])
async def test_a_cancel_and_another_mode_end_the_burst(stores: Open, end: list[Parcel | Cancel]) -> None:
    """In the batch, and before it."""
    store = stores(1)
    async with store.daemon() as daemon:
        await daemon.has(1)
        await daemon.apply(keyed(daemon, b"first", DEBOUNCE))
        dues = [due_ms for _, due_ms in await waiting(store)]
        for batches in ([[*end, keyed(daemon, b"new", DEBOUNCE)]], [end, [keyed(daemon, b"new", DEBOUNCE)]]):
            await pass_of(daemon, 20)
            for batch in batches:
                await daemon.apply(*batch)
            [(body, due_ms)] = await waiting(store)
            assert (body, int(str(due_ms)) > int(str(dues[-1]))) == (b"new", True)
            dues.append(due_ms)


async def test_a_burst_ends_with_the_release(stores: Open) -> None:
    """A message that comes while the last one is in release begins the next burst, or replaces it after a rollback."""
    store = stores(1)
    async with store.daemon() as daemon:
        [lane] = await daemon.has(1)
        await daemon.apply(keyed(daemon, b"first", KeyMode(ceiling_ms=0)))
        for gives_up in (True, False):
            rows = await lane.claimers[0].claim(MANY, ROOM)
            replacing = asyncio.create_task(daemon.apply(keyed(daemon, b"second", KeyMode(ceiling_ms=0))))
            done, _ = await asyncio.wait([replacing], timeout=0.2)
            assert not done
            await (lane.claimers[0].give_up() if gives_up else lane.claimers[0].settle(rows, []))
            await replacing
        totals = await store.totals()
        assert totals == {"parked": 3, "cancelled": 1, "released": 1}
        assert bodies(await release_all(lane)) == [b"second"]


async def test_a_message_that_the_ceiling_makes_due_soon_wakes_its_lane(stores: Open) -> None:
    """Though its own delay would have put it into another lane, without a wake."""
    async with one_lane(stores) as (daemon, lane):
        sleeper = asyncio.create_task(lane.wait(50.0))
        await asyncio.sleep(0)
        await daemon.apply(keyed(daemon, b"now", KeyMode(ceiling_ms=0), FAR_MS))
        async with asyncio.timeout(40.0):
            await sleeper
        assert bodies(await release_all(lane)) == [b"now"]
