"""Cancelling and rescheduling by id, in every place of a message, also while another process moves it."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping

import asyncpg
import pytest

from delayer.core.filters import Filter, Token
from delayer.core.hold import Hold, unfit
from delayer.core.readable import instant
from delayer.core.units import DAY_MS
from delayer.store import waiting as read_model
from delayer.store.admin import actions, audit_log, detail, draining
from delayer.store.admin.actions import NewDue, cancel, reschedule
from delayer.store.admin.changes import StoredChange
from delayer.store.admin.detail import FoundIn
from delayer.store.segments import catalog, restore
from tests.integration.segments_store import START_MS, restore_all, store
from tests.support.fakes import LATE, WHY
from tests.support.place import eventually
from tests.support.rows import compact, conserved, everything, put, row, rows, waiting
from tests.support.store import MANY, ROOM, blocked, opened, owned, parcel, release_all, sql

NO_ONE = {"parked": 0, "restored": 0, "released": 0, "cancelled": 0, "compacted": 0, "held": 0}


async def test_cancel_of_a_row_between_two_milliseconds(database: str) -> None:
    async with store(database) as admin:
        await put(admin, [row(1, START_MS)._replace(due_us=START_MS * 1000 + 999)])
        assert await cancel(admin, [1]) == {1: FoundIn.WAITING}


async def test_a_drain_leaves_messages_with_too_long_properties(database: str) -> None:
    async with store(database) as admin:
        await put(admin, [row(1, START_MS), row(2, START_MS)._replace(properties=b"\0" * 1_001)])
        async with actions.audit_entry(database, "tester", "drain to native", {}) as (connection, act):
            places = [one.place for one in (await read_model.find(connection, Filter(), 10)).messages]
            async with draining.drain_rows(connection, places, act, 1_000) as taken:
                assert ([one.id for one in taken.sound], taken.unsound) == ([1], 1)
        assert list(await waiting(admin)) == [2]


async def test_cancel_of_held_messages_and_messages_with_keys(database: str) -> None:
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        now = place.now_upper_ms()
        await place.park(lane, [parcel(now + DAY_MS, b"a", key=b"a"), parcel(now + DAY_MS, b"b", key=b"b")], [])
        await place.hold(lane, [(parcel(now, b"c"), WHY), (parcel(now, b"d", key=b"d"), WHY)])
        of = {one.body: one.id for one in (await waiting(admin)).values()}
        of |= dict(await admin.fetch("SELECT body, id FROM held"))
        found = await cancel(admin, [of[b"a"], of[b"c"], of[b"d"]])
        assert list(found.values()) == [FoundIn.WAITING, FoundIn.HELD, FoundIn.HELD]
        assert [bytes(key) for (key,) in await admin.fetch("SELECT key FROM message_key")] == [b"b"]
        assert [one.body for one in (await waiting(admin)).values()] == [b"b"]
        assert await conserved(admin) == NO_ONE | {"parked": 4, "cancelled": 3}
        await place.park(lane, [], [b"a", b"b"])
        assert await conserved(admin) == NO_ONE | {"parked": 4, "cancelled": 4}


async def test_a_key_that_points_to_a_newer_message_stays(database: str) -> None:
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        await place.park(lane, [parcel(place.now_upper_ms() + DAY_MS, b"old", key=b"k")], [])
        [old] = await waiting(admin)
        await admin.execute("UPDATE message_key SET id = id + 1")
        assert await cancel(admin, [old]) == {old: FoundIn.WAITING}
        assert await admin.fetchval("SELECT id FROM message_key") == old + 1


async def test_cancel_of_messages_in_segments(database: str) -> None:
    chance = random.Random(5)
    async with store(database) as admin:
        await put(admin, rows(100, START_MS, span_ms=20 * DAY_MS) + rows(100, START_MS, lane=2, first_id=101))
        made = await compact(admin, rows=10)
        assert len(made) > 5
        before = await everything(admin)
        some = chance.sample(range(1, 201), 60)
        assert await cancel(admin, [*some, 777]) == dict.fromkeys(some, FoundIn.SEGMENT) | {777: FoundIn.NOWHERE}
        assert await cancel(admin, some) == dict.fromkeys(some, FoundIn.NOWHERE)
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


async def test_the_other_messages_of_a_segment_become_rows_again(database: str) -> None:
    async with store(database) as admin:
        await put(admin, rows(3, START_MS))
        [made] = await compact(admin)
        assert await cancel(admin, [1, 2]) == {1: FoundIn.SEGMENT, 2: FoundIn.SEGMENT}
        assert (await catalog.count(admin))[:2] == (0, 0)
        assert await restore.restore(admin, made.segment) is None
        assert list(await waiting(admin)) == [3]
        assert await conserved(admin) == NO_ONE | {"parked": 3, "cancelled": 2, "compacted": 3, "restored": 3}


async def test_messages_in_a_broken_segment_are_unreadable(database: str) -> None:
    async with store(database) as admin:
        await put(admin, rows(20, START_MS) + rows(5, START_MS, lane=2, first_id=10_000))
        first, _ = await compact(admin)
        await admin.execute("UPDATE segment SET packed = set_byte(packed, 20, 255) WHERE id = $1", first.segment)
        found = await cancel(admin, [5, 500, 10_001])
        assert found == {5: FoundIn.UNREADABLE, 500: FoundIn.NOWHERE, 10_001: FoundIn.SEGMENT}
        assert (await conserved(admin))["cancelled"] == 1


async def test_messages_released_during_a_cancel_do_not_count_as_cancelled(database: str) -> None:
    """Three rows are released between the listing and the cancel, and a broken segment has other messages."""
    async with store(database, 2) as admin, sql(database) as other:
        both = rows(20, START_MS)
        await put(admin, [one for one in both if one.id % 2 == 0])
        await compact(admin)
        await put(admin, [one for one in both if one.id % 2])
        await admin.execute("UPDATE segment SET packed = set_byte(packed, 20, 255)")
        act = await audit_log.begin(admin, "me", "cancel", {})

        async def do(
            connection: asyncpg.Connection, ids: Collection[int], dues: Mapping[int, int], act: int
        ) -> dict[int, FoundIn]:
            await admin.execute("DELETE FROM message WHERE id = ANY('{3,5,7}')")
            return await cancel(connection, ids, dues, act)

        done = await actions.apply_to_matching(
            other, do, actions.waiting_pages(other, Filter()), log_id=act, say=lambda _: None
        )
        assert done == {FoundIn.WAITING: 7, FoundIn.NOWHERE: 3}
        assert actions.count_found(done) == 7 == await admin.fetchval("SELECT messages FROM audit_log")


@pytest.mark.parametrize("change", ["cancel", "reschedule", "held retry", "held drop"])
async def test_the_figures_of_a_change_that_races_with_the_release_add_up(database: str, change: str) -> None:
    """Of 20 messages 15 are released between the count and the change. Then the count is too small."""
    verb, held = change.rpartition(" ")[2], change.startswith("held")
    when = NewDue(by_ms=5) if verb == "reschedule" else None
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        parcels = [parcel(place.now_upper_ms() + DAY_MS, b"%d" % n) for n in range(20)]
        await (place.hold(lane, [(one, WHY) for one in parcels]) if held else place.park(lane, parcels, []))
        acted = StoredChange(database, verb, Filter(), when=when)
        counted = await acted.count()
        assert counted.heading == "Matched: 20"
        table = "held" if held else "message"
        await admin.execute(f"DELETE FROM {table} WHERE id IN (SELECT id FROM {table} ORDER BY id OFFSET 5)")
        said: list[int] = []
        result = await acted.carry_out("me", counted, said.append)
        assert (result.number, said[-1]) == ("5 of 20", 5)
        assert list(result.lines) == ["15 were delivered or moved in the meantime."]
        if verb in ("reschedule", "retry"):
            result = await acted.carry_out("me", counted._replace(messages=3))
            assert (result.number, list(result.lines)) == ("5", ["2 of these came after the count."])


async def test_a_hung_command_keeps_its_locks_for_ten_seconds(database: str) -> None:
    async with store(database), actions.change_connection(database, "cancel") as connection:
        assert await connection.fetchval("SHOW idle_in_transaction_session_timeout") == "10s"


@pytest.mark.parametrize("kind", ["compacted", "restored"])
async def test_cancel_against_a_compaction_or_a_restore_in_flight(database: str, kind: str) -> None:
    """The cancel waits for the other to finish, and then finds the message in its new place."""
    async with store(database) as admin, sql(database) as holder, sql(database) as one, sql(database) as two:
        await put(admin, rows(10, START_MS))
        if kind == "restored":
            await compact(admin)
        await admin.execute("INSERT INTO counter VALUES (1, $1, 0) ON CONFLICT DO NOTHING", kind)
        await holder.execute("BEGIN")
        await holder.execute("SELECT FROM counter WHERE kind = $1 FOR UPDATE", kind)
        moving = asyncio.create_task(compact(one) if kind == "compacted" else restore_all(one))
        await blocked(admin, "%INSERT INTO counter%")
        cancels = asyncio.create_task(cancel(two, [4]))
        waits = "%DELETE FROM message AS m%USING unnest%" if kind == "compacted" else "SELECT id, lane, first_due%"
        await blocked(admin, waits)
        await holder.execute("COMMIT")
        assert [done.messages for done in await moving] == [10]
        assert await cancels == {4: FoundIn.SEGMENT}
        assert len(await everything(admin)) == 9
        await conserved(admin)


SOON = 4.0
"""A notified lane polls again within these seconds; without a notification it takes at least five."""


async def test_reschedule_of_waiting_and_held_messages_and_of_those_with_keys(database: str) -> None:
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        now = place.now_upper_ms()
        await place.park(lane, [parcel(now + DAY_MS, b"a", key=b"a"), parcel(now + DAY_MS, b"b")], [])
        await place.hold(lane, [(parcel(now, b"c"), WHY)])
        of = {one.body: one.id for one in (await waiting(admin)).values()}
        of |= dict(await admin.fetch("SELECT body, id FROM held"))
        at = now + 5 * DAY_MS
        found = await reschedule(admin, [*of.values(), 999], when=NewDue(at_ms=at))
        assert found == {
            of[b"a"]: FoundIn.WAITING,
            of[b"b"]: FoundIn.WAITING,
            of[b"c"]: FoundIn.HELD,
            999: FoundIn.NOWHERE,
        }
        assert [one.due_us for one in (await waiting(admin)).values()] == [at * 1000] * 2
        assert await admin.fetchval("SELECT due_at FROM message_key") == at
        assert tuple(await admin.fetchrow("SELECT due_at, retry_at FROM held")) == (now, at)
        assert await conserved(admin) == NO_ONE | {"parked": 3, "held": 1}
        await place.park(lane, [], [b"a"])
        assert (await waiting(admin)).keys() == {of[b"b"]}


@pytest.mark.parametrize("hold", [LATE, unfit("no destination")])
async def test_messages_that_wait_for_an_operator_are_tried_after_a_reschedule(database: str, hold: Hold) -> None:
    """A held message without a retry instant moves relative to now, and its details name the new instant."""
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        now = place.now_upper_ms()
        await place.hold(lane, [(parcel(now - DAY_MS, b"late"), hold), (parcel(now + DAY_MS, b"imported"), hold)])
        late_one, imported = [number for (number,) in await admin.fetch("SELECT id FROM held ORDER BY due_at")]
        assert "until an operator runs" in await fate(admin, late_one)
        await reschedule(admin, [late_one, imported], when=NewDue(by_ms=600))
        soon, after = [ms for (ms,) in await admin.fetch("SELECT retry_at FROM held ORDER BY due_at")]
        assert (now + 600 <= soon < now + 60_000, after) == (True, now + DAY_MS + 600)
        assert (await fate(admin, late_one)).endswith(f" again at {instant(soon)}: attempt 2")

        async def tried() -> bool:
            return [due.id for due in await release_all(lane)] == [late_one]

        await eventually(tried)
        await reschedule(admin, [imported], when=NewDue(by_ms=-DAY_MS))
        assert await admin.fetchval("SELECT retry_at FROM held") == now + 600


async def fate(admin: asyncpg.Connection, number: int) -> str:
    whole = await detail.find_message(admin, Token(number))
    assert not isinstance(whole, FoundIn)
    return detail.predict(whole)


async def test_reschedule_out_of_a_segment(database: str) -> None:
    async with store(database) as admin:
        await put(admin, rows(20, START_MS))
        before = await everything(admin)
        await compact(admin)
        assert await reschedule(admin, [3, 4], when=NewDue(by_ms=7)) == {3: FoundIn.SEGMENT, 4: FoundIn.SEGMENT}
        after = await everything(admin)
        for number, one in before.items():
            assert after[number] == (one._replace(due_us=one.due_us + 7_000) if number in (3, 4) else one)
        assert (await waiting(admin)).keys() == before.keys(), "the others of the segment are rows again"
        assert await conserved(admin) == NO_ONE | {"parked": 20, "compacted": 20, "restored": 20}


@pytest.mark.parametrize("by", ["--at", "--by"])
@pytest.mark.parametrize("packed", [False, True])
async def test_reschedule_into_the_past_is_now(database: str, by: str, packed: bool) -> None:
    """A message moved into the past is due now, and not late. Messages that were overdue already stay unchanged."""
    async with store(database) as admin:
        began = await admin.fetchval("SELECT date_trunc('milliseconds', now())")
        await put(admin, [row(1, began + DAY_MS), row(2, began - DAY_MS), row(3, began + 9 * DAY_MS)])
        if packed:
            await compact(admin)
        when = NewDue(at_ms=began - 5 * DAY_MS) if by == "--at" else NewDue(by_ms=-5 * DAY_MS)
        await reschedule(admin, [1, 2, 3], when=when)
        ended = await admin.fetchval("SELECT now()")
        dues = {one.id: one.due_us // 1000 for one in (await waiting(admin)).values()}
        assert began <= dues[1] <= ended
        assert dues[2] == began - DAY_MS
        assert began <= dues[3] <= ended if by == "--at" else dues[3] == began + 4 * DAY_MS


async def test_a_lane_is_notified_of_a_reschedule_and_releases_on_time(database: str) -> None:
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        await place.park(lane, [parcel(place.now_upper_ms() + DAY_MS)], [])
        assert await release_all(lane) == []
        [one] = await waiting(admin)
        sleeping = asyncio.create_task(lane.wait(30.0))
        await asyncio.sleep(0)
        began = time.monotonic()
        await reschedule(admin, [one], when=NewDue(at_ms=place.now_upper_ms() - 60_000))
        await sleeping
        assert [due.id for due in await release_all(lane)] == [one]
        assert time.monotonic() - began < SOON
        await place.hold(lane, [(parcel(place.now_upper_ms()), WHY)])
        assert await release_all(lane) == []
        [held] = [number for (number,) in await admin.fetch("SELECT id FROM held")]
        sleeping = asyncio.create_task(lane.wait(30.0))
        await asyncio.sleep(0)
        await reschedule(admin, [held], when=NewDue(at_ms=place.now_upper_ms()))
        await sleeping
        assert [due.id for due in await release_all(lane)] == [held]


async def test_the_next_owner_of_a_lane_begins_at_a_rescheduled_row(database: str) -> None:
    async with opened(database) as place, sql(database) as admin:
        async with owned(place) as [lane]:
            await place.park(lane, [parcel(place.now_upper_ms() + DAY_MS), parcel(place.now_upper_ms())], [])
            while not await release_all(lane):
                pass
        # No message can move into the past, so the test puts the lane ahead of the moved message.
        await admin.execute("UPDATE lane SET watermark = watermark + interval '1 hour'")
        [one] = await waiting(admin)
        sooner = place.now_upper_ms() + 100
        await reschedule(admin, [one], when=NewDue(at_ms=sooner))
        assert await admin.fetchval("SELECT watermark FROM lane WHERE number = $1", lane.number) == sooner
        async with owned(place) as [lane]:
            while not (released := await release_all(lane)):
                pass
            assert [due.id for due in released] == [one]


async def move(connection: asyncpg.Connection, ids: list[int]) -> dict[int, FoundIn]:
    return await reschedule(connection, ids, when=NewDue(by_ms=DAY_MS))


@pytest.mark.parametrize(("act", "cancelled"), [(cancel, 1), (move, 0)])
async def test_a_change_waits_for_a_release_in_flight(
    database: str, act: Callable[[asyncpg.Connection, list[int]], Awaitable[dict[int, FoundIn]]], cancelled: int
) -> None:
    """The action waits for the release to end, and then takes the row if it still exists."""
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        for settled, expected in ((True, FoundIn.NOWHERE), (False, FoundIn.WAITING)):
            await place.park(lane, [parcel(place.now_upper_ms())], [])
            [one] = await waiting(admin)
            claimed = await lane.claimers[0].claim(MANY, ROOM)
            async with sql(database) as other:
                acting = asyncio.create_task(act(other, [one]))
                await blocked(admin, "%DELETE FROM message AS m%")
                await (lane.claimers[0].settle(claimed, []) if settled else lane.claimers[0].give_up())
                assert await acting == {one: expected}
        assert await release_all(lane) == []
        assert await conserved(admin) == NO_ONE | {"parked": 2, "released": 1, "cancelled": cancelled}


async def test_a_claim_waits_for_a_move_and_leaves_it(database: str) -> None:
    """A row that moves away during a claim causes no error in it."""
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin, sql(database) as other:
        await place.park(lane, [parcel(place.now_upper_ms(), b"moved"), parcel(place.now_upper_ms(), b"stays")], [])
        ids = {one.body: one.id for one in (await waiting(admin)).values()}
        async with other.transaction():
            await reschedule(other, [ids[b"moved"]], when=NewDue(by_ms=3 * DAY_MS))
            claims = asyncio.create_task(lane.claimers[0].claim(MANY, ROOM))
            await blocked(admin, "%DELETE FROM message AS m%USING (%")
        claimed = await claims
        assert [due.id for due in claimed] == [ids[b"stays"]]
        await lane.claimers[0].settle(claimed, [])
        assert (await waiting(admin)).keys() == {ids[b"moved"]}
        await conserved(admin)
