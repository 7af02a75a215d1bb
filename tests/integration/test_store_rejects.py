"""A row rejected by the database is found among a hundred good rows. The lane keeps its claims, and continues."""

from __future__ import annotations

import asyncpg
import pytest

from delayer.core.hold import Hold, HoldKind
from delayer.core.message import Due
from delayer.core.segment import Broken, Restored
from delayer.core.units import DAY_MS
from delayer.store.admin import actions, audit_log
from delayer.store.lanes import settling
from delayer.store.lanes.lane import PostgresLane
from delayer.store.segments.restore import restore_one
from tests.support.place import compact_all
from tests.support.rows import conserved
from tests.support.store import MANY, ROOM, Store, bodies, claim_when_due, opened, owned, parcel, sql

STATES = ["22021", "23514", "27000", "38000", "44000", "54000", "P0001"]
JAPANESE = Hold(HoldKind.RETURNED, "returned: 404 no exchange '日本'")


async def reject(admin: asyncpg.Connection, events: str, table: str, when: str, state: str = "22021") -> None:
    """Let ``table`` reject rows for which ``when`` is true, in ``events``."""
    await admin.execute(
        f"CREATE FUNCTION rejected_{table}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF {when} THEN"
        f" RAISE EXCEPTION 'planted' USING ERRCODE = '{state}'; END IF; RETURN coalesce(NEW, OLD); END $$;"
        f" CREATE TRIGGER rejecting BEFORE {events} ON {table} FOR EACH ROW EXECUTE FUNCTION rejected_{table}()"
    )


async def counted(admin: asyncpg.Connection) -> tuple[int, int, int]:
    """The messages parked, released and held, from counters that match the tables."""
    of = await conserved(admin)
    return of["parked"], of["released"], of["held"]


async def park(store: Store, lane: PostgresLane, *, key: bytes | None = None, bad: bytes = b"bad") -> None:
    """Park 101 messages that are due, "bad" among them."""
    now = store.now_upper_ms()
    names = [b"%d" % n for n in range(60)] + [bad] + [b"%d" % n for n in range(60, 100)]
    await store.park(lane, [parcel(now - 1000 + at, body) for at, body in enumerate(names)], [])
    if key is not None:
        await store.park(lane, [parcel(now, b"keyed", key=key)], [])


async def settle(lane: PostgresLane, rows: list[Due], hold: Hold | None = JAPANESE) -> None:
    """Settle all of them as released, but hold "bad" if ``hold`` is given."""
    held = [(due, hold) for due in rows if hold is not None and due.parcel.body == b"bad"]
    await lane.claimers[0].settle([due for due in rows if hold is None or due.parcel.body != b"bad"], held)


@pytest.mark.parametrize("state", STATES)
async def test_a_reason_that_is_rejected_becomes_a_plain_one(database: str, state: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await reject(admin, "INSERT", "held", "NEW.reason ~ '[^ -~]'", state)
        await park(store, lane, key=b"k")
        rows = await claim_when_due(lane)
        assert len(rows) == 102
        await settle(lane, rows)
        assert (lane.owned, await lane.claimers[0].claim(MANY, ROOM)) == (True, []), "nothing is released again"
        [held] = await admin.fetch("SELECT body, kind, reason, retry_at IS NULL FROM held")
        assert held["body"] == b"bad" and held["kind"] == "returned" and held["reason"].isascii()
        assert state in held["reason"]
        assert not await admin.fetchval("SELECT count(*) FROM message_key")
        assert await counted(admin) == (102, 101, 1)


async def test_a_row_that_cannot_be_held_is_skipped_for_a_while(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "pause_ms", lambda times, _: times * 1500)
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await reject(admin, "INSERT", "held", "NEW.body = 'bad'")
        await park(store, lane)
        await settle(lane, await claim_when_due(lane))
        await store.park(lane, [parcel(store.now_upper_ms() - 5000, b"next")], [])
        assert bodies(await claim_when_due(lane)) == [b"next"], "the lane goes on without the bad one"
        await lane.claimers[0].give_up()
        await lane.scan()
        rows = await claim_when_due(lane)
        assert bodies(rows) == [b"next"]
        await settle(lane, rows)
        for pauses in range(2, 4):
            rows = await claim_when_due(lane)
            assert bodies(rows) == [b"bad"], "it comes again after its pause"
            if pauses == 3:
                await admin.execute("DROP TRIGGER rejecting ON held")
            await settle(lane, rows)
        assert await admin.fetchval("SELECT reason FROM held") == JAPANESE.text
        assert await counted(admin) == (102, 101, 1)


@pytest.mark.parametrize(("state", "bad"), [*((state, b"bad") for state in STATES), (STATES[0], b"bad" * (1 << 20))])
async def test_a_row_that_cannot_be_claimed_is_skipped(database: str, state: str, bad: bytes) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await reject(admin, "DELETE", "message", "substring(OLD.body FROM 1 FOR 3) = 'bad'", state)
        await park(store, lane, bad=bad)
        released: list[Due] = []
        while len(released) < 100 or not lane.skipped.ids:
            rows = await lane.claimers[0].claim(1000, min(ROOM, 1 << 18))
            await lane.claimers[0].settle(rows, [])
            released += rows
        assert sorted(bodies(released)) == sorted(b"%d" % n for n in range(100))
        assert lane.owned
        assert (await lane.claimers[0].claim(1000, ROOM), lane.sleep_hint() > 1) == ([], True), "it waits for the next"
        assert await counted(admin) == (101, 100, 0)


async def test_more_rejected_rows_than_are_skipped_slow_the_lane(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "MOST", 3)
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await reject(admin, "DELETE", "message", "true")
        await park(store, lane)
        while not lane.skipped.full:
            assert await lane.claimers[0].claim(1000, ROOM) == []
        began = store.clock.monotonic()
        assert await lane.claimers[0].claim(1000, ROOM) == []
        assert store.clock.monotonic() - began > 0.9
        assert (len(lane.skipped.ids), lane.owned) == (3, True)


@pytest.mark.parametrize("state", STATES)
async def test_a_release_whose_history_is_rejected_is_a_release(database: str, state: str) -> None:
    async with opened(database, history_days=1) as store, owned(store) as [lane], sql(database) as admin:
        await park(store, lane)
        rows = await claim_when_due(lane)
        [bad] = [due.id for due in rows if due.parcel.body == b"bad"]
        await reject(admin, "INSERT", "history", f"NEW.id = {bad}", state)
        await settle(lane, rows, hold=None)
        assert await admin.fetchval("SELECT count(*) FROM history WHERE what = 'released'") == 100
        assert await lane.claimers[0].claim(MANY, ROOM) == []
        assert await counted(admin) == (101, 101, 0)


@pytest.mark.parametrize("update", [False, True])
async def test_a_held_row_that_cannot_be_deleted_is_not_published_again(database: str, update: bool) -> None:
    """It waits for an operator. If even that cannot be written, the lane skips it."""
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        now = store.now_upper_ms()
        await store.hold(lane, [(parcel(now, body), JAPANESE) for body in (b"1", b"bad", b"2")])
        ids = [number for (number,) in await admin.fetch("SELECT id FROM held")]
        await actions.retry_held(admin, ids, {}, await audit_log.begin(admin, "test", "held retry", {}))
        await reject(admin, "DELETE OR UPDATE" if update else "DELETE", "held", "OLD.body = 'bad'")
        released: list[Due] = []
        while len(released) < 3:
            rows = await claim_when_due(lane)
            await settle(lane, rows, hold=None)
            released += rows
        assert sorted(bodies(released)) == [b"1", b"2", b"bad"]
        assert await lane.claimers[0].claim(MANY, ROOM) == []
        [held] = await admin.fetch("SELECT body, kind, may_be_delivered FROM held")
        assert held["body"] == b"bad"
        assert (held["kind"], held["may_be_delivered"]) == (("returned", False) if update else ("unfit", True))
        assert await counted(admin) == (3, 2, 1)


async def test_a_segment_with_a_rejected_row_is_marked_and_another_one_restored(database: str) -> None:
    async with opened(database) as store, owned(store, 2) as [one, two], sql(database) as admin:
        now = store.now_upper_ms()
        for lane, days, body in ((one, 2, b"bad"), (two, 3, b"good")):
            await store.park(lane, [parcel(now + days * DAY_MS + n, body) for n in range(30)], [])
        assert await compact_all(admin) == 2
        await reject(admin, "INSERT", "message", "NEW.body = 'bad'")
        broken, restored = [await restore_one(admin, now + 9 * DAY_MS) for _ in range(2)]
        assert isinstance(broken, Broken)
        assert broken.reason == "its messages cannot be written: planted"
        assert isinstance(restored, Restored)
        assert await admin.fetchval("SELECT count(*) FROM message WHERE body = 'good'") == 30
