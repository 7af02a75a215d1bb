"""A message that is held without ever having waited is tried again on time, whatever its lane is doing meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from delayer.core import backoff
from delayer.store import statements, upgrades
from delayer.store.admin import audit_log, detail
from delayer.store.admin.actions import When, reschedule
from delayer.store.postgres import PostgresStore
from tests.conformance.store_contract import MANY, ROOM, bodies, owned, parcel
from tests.integration.test_store_lane import sql
from tests.support.fakes import NO_CONFIRM, WHY

SOON_MS = 300
SLOWLY = "SELECT retry_at FROM (SELECT retry_at FROM held WHERE lane = $1 LIMIT 1) AS h RIGHT JOIN pg_sleep(1) ON true"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "FIRST_MS", SOON_MS)


@pytest.mark.usefixtures("soon")
async def test_a_sleeping_lane_wakes_for_what_is_held(database: str) -> None:
    await upgrades.upgrade(database)
    store = await PostgresStore.connect(database)
    async with owned(store) as (lane,):
        sleeper = asyncio.create_task(lane.wait(3600.0))
        await store.hold(lane, [(parcel(store.now_upper_ms(), b"held"), WHY)])
        await sleeper
        assert bodies(await lane.claim(MANY, ROOM)) == [b"held"]
        await lane.give_up()
    await store.close()


@pytest.mark.usefixtures("soon")
async def test_an_id_that_it_was_published_under_before_stays(database: str) -> None:
    await upgrades.upgrade(database)
    store = await PostgresStore.connect(database)
    async with owned(store) as (lane,):
        before = parcel(store.now_upper_ms(), b"before")._replace(token=b"0123456789abcdef0123456789abcdef")
        await store.hold(lane, [(before, NO_CONFIRM), (parcel(store.now_upper_ms(), b"never"), WHY)])
        for _ in range(2):
            tokens: dict[bytes, bytes] = {}
            while len(tokens) < 2:
                await lane.wait(await lane.sleep_hint())
                rows = await lane.claim(MANY, ROOM)
                tokens |= {row.parcel.body: row.parcel.token for row in rows if row.sound}
                await lane.settle([], [(row, WHY) for row in rows])
            assert tokens == {b"before": before.token, b"never": b""}
    await store.close()


@pytest.mark.usefixtures("soon")
async def test_a_message_held_during_a_look_at_retries_is_retried(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await upgrades.upgrade(database)
    store = await PostgresStore.connect(database)
    async with owned(store) as (lane,):
        await store.hold(lane, [(parcel(store.now_upper_ms(), b"first"), WHY)])
        await lane.wait(3600.0)
        rows = await lane.claim(MANY, ROOM)
        assert bodies(rows) == [b"first"]
        monkeypatch.setattr(statements, "NEXT_RETRY", SLOWLY)
        settling = asyncio.create_task(lane.settle(rows, []))
        await store.hold(lane, [(parcel(store.now_upper_ms(), b"second"), WHY)])
        await settling
        await lane.wait(3600.0)
        assert bodies(await lane.claim(MANY, ROOM)) == [b"second"]
        await lane.give_up()
    await store.close()


@pytest.mark.usefixtures("soon")
async def test_a_retry_by_hand_is_never_early(database: str) -> None:
    """An import holds what is due in a month, if its queue is not there yet. Whatever becomes of that: never early."""
    await upgrades.upgrade(database)
    store = await PostgresStore.connect(database)
    async with owned(store) as (lane,), sql(database) as admin:
        month = store.now_upper_ms() + 30 * 86_400_000
        held = [(parcel(month, b"in a month"), WHY), (parcel(store.now_upper_ms(), b"now"), WHY)]
        await store.hold(lane, held)
        ids = [number for (number,) in await admin.fetch("SELECT id FROM held ORDER BY due_at")]
        assert await detail.retry(admin, ids, await audit_log.begin(admin, "test", "held retry", {})) == 2
        await lane.wait(3600.0)
        rows = await lane.claim(MANY, ROOM)
        assert bodies(rows) == [b"now"]
        await lane.settle(rows, [])
        assert (await admin.fetchval("SELECT retry_at FROM held")) == month
        await reschedule(admin, ids[1:], When(by_ms=-1000))
        assert tuple(await admin.fetchrow("SELECT due_at, retry_at FROM held")) == (month - 1000, month - 1000)
        soon = store.now_upper_ms() + 200
        await reschedule(admin, ids[1:], When(at_ms=soon))
        await lane.wait(3600.0)
        [row] = await lane.claim(MANY, ROOM)
        assert (row.parcel.body, row.due_ms) == (b"in a month", soon)
        await lane.give_up()
    await store.close()
