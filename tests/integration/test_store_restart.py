"""The whole database goes away and comes back: what was committed is there, and the same store object works on."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from delayer.core.errors import LaneLost, StoreLost
from tests.conformance.store_contract import MANY, ROOM, bodies, free_lanes, parcel, release_all, taken
from tests.integration.test_store_lane import opened
from tests.support.servers import Postgres


async def test_a_killed_database_loses_nothing_that_was_committed() -> None:
    with Postgres() as server:
        async with opened(server.url(server.add_database())) as store:
            lanes = await free_lanes(store, 2)
            for lane in lanes:
                await store.park(lane, [parcel(store.now_upper_ms(), b"%d" % n) for n in range(3)], [])
            rows = await lanes[0].claim(2, ROOM)
            server.kill()
            for lane in lanes:
                await lane.wait(30.0)
                assert not lane.held_by_us
                with pytest.raises(LaneLost):
                    await lane.settle(rows, [])
                with pytest.raises(LaneLost):
                    await store.park(lane, [parcel(store.now_upper_ms())], [])
                await lane.give_up()
                await lane.release()
            for doing in (store.look(), store.take(1), store.maintain()):
                with pytest.raises(StoreLost):
                    await doing
            assert store.now_upper_ms() > 0
            server.start()
            again = [await taken(store, lane.number) for lane in lanes]
            assert {lane.number for lane in again} == {lane.number for lane in lanes}
            for lane in again:
                assert bodies(await release_all(lane)) == [b"0", b"1", b"2"]
                rows = await lane.claim(MANY, ROOM)
                assert rows == []
                await lane.release()


async def test_a_cancelled_call_does_not_wait_for_a_database_that_hangs() -> None:
    """A daemon that is told to stop cancels what is under way; the driver alone would wait for the server's answer to
    its request to cancel the statement."""
    with Postgres() as server:
        async with opened(server.url(server.add_database())) as store:
            calls = {
                "look": store.look,
                "take": lambda: store.take(4),
                "maintain": store.maintain,
            }
            for lane in await free_lanes(store, 1):
                calls["park"] = partial(store.park, lane, [parcel(store.now_upper_ms() + 60_000)], [])
            server.pause()
            try:
                tasks = {asyncio.create_task(call(), name=name) for name, call in calls.items()}
                _, waiting = await asyncio.wait(tasks, timeout=0.2)
                assert {task.get_name() for task in waiting} == set(calls)
                for task in tasks:
                    task.cancel()
                _, waiting = await asyncio.wait(tasks, timeout=2.0)
                assert not waiting
            finally:
                server.resume()
