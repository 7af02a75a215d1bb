"""A commit that fails because the server's queue of notifications is full rejects no data. Before Postgres 17 that
queue has 8 GB, so here a deferred trigger fails each commit, with the same code, from a function named ``FAILING``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import asyncpg
import pytest

from delayer.core.errors import Rejected, StoreLost
from delayer.core.operations import fold
from delayer.core.units import DAY_MS
from delayer.store import pool
from delayer.store.admin import actions, audit_log
from delayer.store.errors import translate_errors
from delayer.store.lanes.lane import PostgresLane
from delayer.store.schedules import changes
from tests.integration.test_sql_reader import send
from tests.support.fakes import WHY
from tests.support.place import compact_all
from tests.support.rows import conserved
from tests.support.schedules import schedule
from tests.support.store import MANY, ROOM, Store, opened, owned, parcel, sql

FULL = """
CREATE FUNCTION full_queue() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    RAISE EXCEPTION 'too many notifications in the NOTIFY queue' USING ERRCODE = '54000';
END $$;
CREATE CONSTRAINT TRIGGER full_queue AFTER INSERT OR UPDATE ON counter
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION full_queue()
"""

FAILING = "exec_stmt_raise"
"""The function of Postgres from which RAISE comes."""


async def park(store: Store, lane: PostgresLane, _: asyncpg.Connection) -> None:
    await store.park(lane, [parcel(store.now_upper_ms())], [])


async def park_keyed(store: Store, lane: PostgresLane, _: asyncpg.Connection) -> None:
    await store.park(lane, [parcel(store.now_upper_ms(), key=b"k")], [])


async def hold(store: Store, lane: PostgresLane, _: asyncpg.Connection) -> None:
    await store.hold(lane, [(parcel(store.now_upper_ms()), WHY)])


async def move(store: Store, lane: PostgresLane, admin: asyncpg.Connection) -> None:
    ids = [number for (number,) in await admin.fetch("SELECT id FROM delayer_inbox")]
    await store.apply(lane, fold([parcel(store.now_upper_ms())]), lane.number, None, ids)


async def settle(_: Store, lane: PostgresLane, __: asyncpg.Connection) -> None:
    rows = await lane.claimers[0].claim(MANY, ROOM)
    assert len(rows) == 1
    await lane.claimers[0].settle(rows, [])


async def restore(store: Store, _: PostgresLane, __: asyncpg.Connection) -> None:
    assert await store.restore(store.now_upper_ms() + 9 * DAY_MS)


async def cancel(store: Store, _: PostgresLane, admin: asyncpg.Connection) -> None:
    with translate_errors("cancel"):
        ids = [number for (number,) in await admin.fetch("SELECT id FROM message")]
        await actions.cancel(admin, ids, {}, await audit_log.begin(admin, "test", "cancel", {}))


async def add_schedule(_: Store, __: PostgresLane, admin: asyncpg.Connection) -> None:
    with translate_errors("add a schedule"):
        await changes.add(admin, schedule("often"), who="me")


@pytest.mark.parametrize("write", [park, park_keyed, hold, move, settle, restore, cancel, add_schedule])
async def test_a_commit_that_cannot_notify_rejects_nothing(
    database: str,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Store, PostgresLane, asyncpg.Connection], Awaitable[None]],
) -> None:
    monkeypatch.setattr(pool, "NOTIFYING", FAILING)
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        now = store.now_upper_ms()
        await store.park(lane, [parcel(now + 2 * DAY_MS + n) for n in range(30)], [])
        await compact_all(admin)
        await store.park(lane, [parcel(now)], [])
        await send(admin, 1)
        before = await conserved(admin)
        await admin.execute(FULL)
        with pytest.raises(StoreLost, match="too many notifications") as lost:
            await write(store, lane, admin)
        assert not isinstance(lost.value, Rejected)
        assert "pg_notification_queue_usage" in lost.value.advice
        assert (await conserved(admin), lane.owned) == (before, True)
        await admin.execute("DROP TRIGGER full_queue ON counter")
        await write(store, lane, admin)
        assert await conserved(admin) != before


async def test_a_commit_that_writes_data_over_a_limit_rejects_them(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await admin.execute(FULL)
        with pytest.raises(Rejected):
            await park(store, lane, admin)
