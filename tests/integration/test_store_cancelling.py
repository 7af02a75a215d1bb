"""Cancelling by id, wherever a message is, and whoever moves it at that moment."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import asyncpg
import pytest

from delayer.core.filters import Filter
from delayer.core.segment import Restored
from delayer.store.admin import actions, audit_log, listing
from delayer.store.admin.actions import Found, cancel
from delayer.store.errors import WORTH_REPEATING
from delayer.store.rows.partitions import DAY_MS
from delayer.store.segments import catalog
from delayer.store.segments.catalog import FOREVER_MS
from tests.conformance.store_contract import MANY, ROOM, owned, parcel, release_all
from tests.integration.segments_store import START_MS, blocked, restore_all, store
from tests.integration.test_store_lane import opened, sql
from tests.support.fakes import WHY
from tests.support.rows import compact, conserved, everything, put, row, rows, waiting

NO_ONE = {"parked": 0, "restored": 0, "released": 0, "cancelled": 0, "compacted": 0, "held": 0}


async def test_waiting_rows(database: str) -> None:
    async with store(database, 2) as admin:
        await put(admin, rows(50, START_MS, span_ms=2 * DAY_MS) + rows(5, START_MS, lane=2, first_id=100))
        assert await cancel(admin, []) == {}
        assert await cancel(admin, [3, 999, 102]) == {3: Found.WAITING, 999: Found.NOWHERE, 102: Found.WAITING}
        assert await cancel(admin, [3]) == {3: Found.NOWHERE}
        assert len(await waiting(admin)) == 53
        assert await conserved(admin) == NO_ONE | {"parked": 55, "cancelled": 2}


async def test_a_row_between_two_milliseconds(database: str) -> None:
    async with store(database) as admin:
        await put(admin, [row(1, START_MS)._replace(due_us=START_MS * 1000 + 999)])
        assert await cancel(admin, [1]) == {1: Found.WAITING}


async def test_held_and_keyed_ones(database: str) -> None:
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        now = place.now_upper_ms()
        await place.park(lane, [parcel(now + DAY_MS, b"a", key=b"a"), parcel(now + DAY_MS, b"b", key=b"b")], [])
        await place.hold(lane, [(parcel(now, b"c"), WHY), (parcel(now, b"d", key=b"d"), WHY)])
        of = {one.body: one.id for one in (await waiting(admin)).values()}
        of |= dict(await admin.fetch("SELECT body, id FROM held"))
        found = await cancel(admin, [of[b"a"], of[b"c"], of[b"d"]])
        assert list(found.values()) == [Found.WAITING, Found.HELD, Found.HELD]
        assert [bytes(key) for (key,) in await admin.fetch("SELECT key FROM message_key")] == [b"b"]
        assert [one.body for one in (await waiting(admin)).values()] == [b"b"]
        assert await conserved(admin) == NO_ONE | {"parked": 4, "cancelled": 3}
        await place.park(lane, [], [b"a", b"b"])
        assert await conserved(admin) == NO_ONE | {"parked": 4, "cancelled": 4}


async def test_a_key_that_stands_for_a_newer_message_stays(database: str) -> None:
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        await place.park(lane, [parcel(place.now_upper_ms() + DAY_MS, b"old", key=b"k")], [])
        [old] = await waiting(admin)
        await admin.execute("UPDATE message_key SET id = id + 1")
        assert await cancel(admin, [old]) == {old: Found.WAITING}
        assert await admin.fetchval("SELECT id FROM message_key") == old + 1


async def test_messages_in_segments(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "IDS_AT_ONCE", 2)  # so that it takes several statements
    chance = random.Random(5)
    async with store(database) as admin:
        await put(admin, rows(100, START_MS, span_ms=20 * DAY_MS) + rows(100, START_MS, lane=2, first_id=101))
        made = await compact(admin, rows=10)
        assert len(made) > 5
        before = await everything(admin)
        some = chance.sample(range(1, 201), 60)
        assert await cancel(admin, [*some, 777]) == dict.fromkeys(some, Found.SEGMENT) | {777: Found.NOWHERE}
        assert await cancel(admin, some) == dict.fromkeys(some, Found.NOWHERE)
        left = {number: one for number, one in before.items() if number not in some}
        assert await everything(admin) == left
        lanes = Counter(before[number].lane for number in some)
        for number in lanes:
            counted = "SELECT n FROM counter WHERE lane = $1 AND kind = 'cancelled'"
            assert await admin.fetchval(counted, number) == lanes[number]
        await conserved(admin)
        await restore_all(admin)
        assert (await waiting(admin)).keys() == left.keys()
        assert await conserved(admin) == NO_ONE | {"parked": 200, "cancelled": 60, "compacted": 200, "restored": 200}


async def test_the_others_of_a_segment_are_rows_again(database: str) -> None:
    async with store(database) as admin:
        await put(admin, rows(3, START_MS))
        [made] = await compact(admin)
        assert await cancel(admin, [1, 2]) == {1: Found.SEGMENT, 2: Found.SEGMENT}
        assert (await catalog.count(admin))[:2] == (0, 0)
        assert await catalog.restore(admin, made.segment) is None
        assert list(await waiting(admin)) == [3]
        assert await conserved(admin) == NO_ONE | {"parked": 3, "cancelled": 2, "compacted": 3, "restored": 3}


async def test_ids_that_take_more_than_the_head_of_a_file(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayer.store.segments.codec.HEAD", 64)
    async with store(database) as admin:
        await put(admin, rows(500, START_MS))
        await compact(admin)
        assert await cancel(admin, [250]) == {250: Found.SEGMENT}


async def test_a_broken_segment_says_that_it_cannot_say(database: str) -> None:
    async with store(database) as admin:
        await put(admin, rows(20, START_MS) + rows(5, START_MS, lane=2, first_id=10_000))
        first, _ = await compact(admin)
        await admin.execute("UPDATE segment SET packed = set_byte(packed, 20, 255) WHERE id = $1", first.segment)
        found = await cancel(admin, [5, 500, 10_001])
        assert found == {5: Found.UNREADABLE, 500: Found.NOWHERE, 10_001: Found.SEGMENT}
        assert (await conserved(admin))["cancelled"] == 1


async def test_messages_that_may_be_in_a_broken_segment_do_not_count_as_cancelled(database: str) -> None:
    """Three rows are released between the listing and the cancel, and a broken segment has a range around their ids."""
    async with store(database, 2) as admin, sql(database) as other:
        both = rows(20, START_MS)
        await put(admin, [one for one in both if one.id % 2 == 0])
        await compact(admin)
        await put(admin, [one for one in both if one.id % 2])
        await admin.execute("UPDATE segment SET packed = set_byte(packed, 20, 255)")
        act = await audit_log.begin(admin, "me", "cancel", {})

        async def do(
            connection: asyncpg.Connection, ids: Collection[int], dues: Mapping[int, int], act: int
        ) -> dict[int, Found]:
            await admin.execute("DELETE FROM message WHERE id = ANY('{3,5,7}')")
            return await cancel(connection, ids, dues, act)

        done = await actions.every(other, do, Filter(), None, act=act, say=lambda _: None)
        assert done == {Found.WAITING: 7, Found.UNREADABLE: 3}
        assert actions.met(done) == 7 == await admin.fetchval("SELECT messages FROM audit_log")


async def test_a_command_that_stands_still_keeps_its_locks_for_ten_seconds(database: str) -> None:
    async with store(database), actions.acting(database, "cancel") as connection:
        assert await connection.fetchval("SHOW idle_in_transaction_session_timeout") == "10s"


async def test_cancel_against_a_restore_in_flight(database: str) -> None:
    """It waits for the restore, and then cancels the row."""
    async with store(database) as admin, sql(database) as holder, sql(database) as one, sql(database) as two:
        await put(admin, rows(10, START_MS))
        await compact(admin)
        await admin.execute("INSERT INTO counter VALUES (1, 'restored', 0)")
        await holder.execute("BEGIN")
        await holder.execute("SELECT FROM counter WHERE kind = 'restored' FOR UPDATE")
        restoring = asyncio.create_task(catalog.restore_one(one, FOREVER_MS))
        await blocked(admin, "%INSERT INTO counter%")
        cancels = asyncio.create_task(cancel(two, [4]))
        await blocked(admin, "SELECT id, lane, first_due, messages, format, digest FROM segment%")
        await holder.execute("COMMIT")
        assert await restoring == Restored(1, 10, min(r.due_us for r in rows(10, START_MS)) // 1000)
        assert await cancels == {4: Found.SEGMENT}
        assert len(await waiting(admin)) == 9
        await conserved(admin)


async def test_cancel_against_a_compaction_in_flight(database: str) -> None:
    """It waits for the compaction, and then finds the message in the segment."""
    async with store(database) as admin, sql(database) as holder, sql(database) as one, sql(database) as two:
        await put(admin, rows(10, START_MS))
        await admin.execute("INSERT INTO counter VALUES (1, 'compacted', 0)")
        await holder.execute("BEGIN")
        await holder.execute("SELECT FROM counter WHERE kind = 'compacted' FOR UPDATE")
        compacts = asyncio.create_task(compact(one))
        await blocked(admin, "%INSERT INTO counter%")
        cancels = asyncio.create_task(cancel(two, [4]))
        await blocked(admin, "%DELETE FROM message AS m%USING unnest%")
        await holder.execute("COMMIT")
        assert [made.messages for made in await compacts] == [10]
        assert await cancels == {4: Found.SEGMENT}
        assert len(await everything(admin)) == 9
        await conserved(admin)


async def test_cancel_against_a_release_in_flight(database: str) -> None:
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        for settled, expected in ((True, Found.NOWHERE), (False, Found.WAITING)):
            await place.park(lane, [parcel(place.now_upper_ms())], [])
            [one] = await waiting(admin)
            claimed = await lane.claim(MANY, ROOM)
            async with sql(database) as other:
                cancels = asyncio.create_task(cancel(other, [one]))
                await blocked(admin, "%DELETE FROM message AS m%USING unnest%")
                await (lane.settle(claimed, []) if settled else lane.give_up())
                assert await cancels == {one: expected}
        await release_all(lane)
        assert await conserved(admin) == NO_ONE | {"parked": 2, "released": 1, "cancelled": 1}


async def patiently(work: Any, *of: Any, **more: Any) -> Any:
    """Again, when it lost against another transaction."""
    while True:
        try:
            return await work(*of, **more)
        except WORTH_REPEATING:
            continue
