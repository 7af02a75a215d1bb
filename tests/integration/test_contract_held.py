"""A message that is held without ever having waited is tried again on time, whatever its lane is doing meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from delayer.store import retry, statements, upgrades
from delayer.store.postgres import PostgresStore
from tests.conformance.store_contract import MANY, ROOM, bodies, owned, parcel

SOON_MS = 300
SLOWLY = "SELECT retry_at FROM (SELECT retry_at FROM held WHERE lane = $1 LIMIT 1) AS h RIGHT JOIN pg_sleep(1) ON true"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_MS", SOON_MS)


@pytest.mark.usefixtures("soon")
async def test_a_sleeping_lane_wakes_for_what_is_held(database: str) -> None:
    await upgrades.upgrade(database)
    store = await PostgresStore.connect(database)
    async with owned(store) as (lane,):
        sleeper = asyncio.create_task(lane.wait(3600.0))
        await store.hold(lane, [(parcel(store.now_ms(), b"held"), "why")])
        await sleeper
        assert bodies(await lane.claim(MANY, ROOM)) == [b"held"]
        await lane.give_up()
    await store.close()


@pytest.mark.usefixtures("soon")
async def test_what_is_held_while_the_lane_looks_at_its_retries_is_not_forgotten(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await upgrades.upgrade(database)
    store = await PostgresStore.connect(database)
    async with owned(store) as (lane,):
        await store.hold(lane, [(parcel(store.now_ms(), b"first"), "why")])
        await lane.wait(3600.0)
        rows = await lane.claim(MANY, ROOM)
        assert bodies(rows) == [b"first"]
        monkeypatch.setattr(statements, "NEXT_RETRY", SLOWLY)
        settling = asyncio.create_task(lane.settle(rows, []))
        await store.hold(lane, [(parcel(store.now_ms(), b"second"), "why")])
        await settling
        await lane.wait(3600.0)
        assert bodies(await lane.claim(MANY, ROOM)) == [b"second"]
        await lane.give_up()
    await store.close()
