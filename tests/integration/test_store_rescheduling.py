"""Another due instant by hand, against releases, compactions and restores at the same moment; and in time for it."""

from __future__ import annotations

import asyncio
import random
import time

import asyncpg
import pytest

from delayer.core.filters import Token
from delayer.core.hold import Hold, unfit
from delayer.store.admin import actions, detail
from delayer.store.admin.actions import Found, When, reschedule
from delayer.store.lanes import notify
from delayer.store.rows.partitions import DAY_MS
from delayer.store.segments import catalog
from delayer.store.segments.catalog import FOREVER_MS
from tests.conformance.store_contract import MANY, ROOM, owned, parcel, release_all
from tests.faults.place import eventually
from tests.integration.segments_store import START_MS, apart, blocked, store
from tests.integration.test_store_cancelling import NO_ONE, patiently
from tests.integration.test_store_lane import opened, sql
from tests.support.fakes import LATE, WHY
from tests.support.rows import compact, conserved, everything, put, row, rows, waiting

SOON = 0.9
"""Seconds in which a lane that is told looks again; without that it is five at the least."""


async def test_waiting_held_and_keyed_ones(database: str) -> None:
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        now = place.now_upper_ms()
        await place.park(lane, [parcel(now + DAY_MS, b"a", key=b"a"), parcel(now + DAY_MS, b"b")], [])
        await place.hold(lane, [(parcel(now, b"c"), WHY)])
        of = {one.body: one.id for one in (await waiting(admin)).values()}
        of |= dict(await admin.fetch("SELECT body, id FROM held"))
        at = now + 5 * DAY_MS
        found = await reschedule(admin, [*of.values(), 999], When(at_ms=at))
        assert found == {of[b"a"]: Found.WAITING, of[b"b"]: Found.WAITING, of[b"c"]: Found.HELD, 999: Found.NOWHERE}
        assert [one.due_us for one in (await waiting(admin)).values()] == [at * 1000] * 2
        assert await admin.fetchval("SELECT due_at FROM message_key") == at
        assert tuple(await admin.fetchrow("SELECT due_at, retry_at FROM held")) == (now, at)
        assert await conserved(admin) == NO_ONE | {"parked": 3, "held": 1}
        await place.park(lane, [], [b"a"])
        assert (await waiting(admin)).keys() == {of[b"b"]}


@pytest.mark.parametrize("hold", [LATE, unfit("no destination")])
async def test_messages_held_for_a_person_are_tried_after_a_reschedule(database: str, hold: Hold) -> None:
    """By so much later than never is from now; and it is said when that is."""
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        now = place.now_upper_ms()
        await place.hold(lane, [(parcel(now - DAY_MS, b"late"), hold), (parcel(now + DAY_MS, b"imported"), hold)])
        late_one, imported = [number for (number,) in await admin.fetch("SELECT id FROM held ORDER BY due_at")]
        assert "until somebody says so" in await fate(admin, late_one)
        await reschedule(admin, [late_one, imported], When(by_ms=600))
        soon, after = [ms for (ms,) in await admin.fetch("SELECT retry_at FROM held ORDER BY due_at")]
        assert (now + 600 <= soon < now + 60_000, after) == (True, now + DAY_MS + 600)
        assert await fate(admin, late_one) == f"it is published to there again at {soon}: attempt 2"

        async def tried() -> bool:
            return [due.id for due in await release_all(lane)] == [late_one]

        await eventually(tried, bool)
        await reschedule(admin, [imported], When(by_ms=-DAY_MS))
        assert await admin.fetchval("SELECT retry_at FROM held") == now + 600


async def fate(admin: asyncpg.Connection, number: int) -> str:
    whole = await detail.show(admin, Token(number))
    assert not isinstance(whole, Found)
    return detail.fate(whole, "there", "somebody", str)


async def test_out_of_a_segment(database: str) -> None:
    async with store(database) as admin:
        await put(admin, rows(20, START_MS))
        before = await everything(admin)
        await compact(admin)
        assert await reschedule(admin, [3, 4], When(by_ms=7)) == {3: Found.SEGMENT, 4: Found.SEGMENT}
        after = await everything(admin)
        for number, one in before.items():
            assert after[number] == (one._replace(due_us=one.due_us + 7_000) if number in (3, 4) else one)
        assert (await waiting(admin)).keys() == before.keys(), "the others of the segment are rows again"
        assert await conserved(admin) == NO_ONE | {"parked": 20, "compacted": 20, "restored": 20}


@pytest.mark.parametrize("by", ["--at", "--by"])
@pytest.mark.parametrize("packed", [False, True])
async def test_into_the_past_is_now(database: str, by: str, packed: bool) -> None:
    """Who moves something there wants it now: it is not late. What was overdue already stays where it was."""
    async with store(database) as admin:
        began = await admin.fetchval("SELECT date_trunc('milliseconds', now())")
        await put(admin, [row(1, began + DAY_MS), row(2, began - DAY_MS), row(3, began + 9 * DAY_MS)])
        if packed:
            await compact(admin)
        when = When(at_ms=began - 5 * DAY_MS) if by == "--at" else When(by_ms=-5 * DAY_MS)
        await reschedule(admin, [1, 2, 3], when)
        ended = await admin.fetchval("SELECT now()")
        dues = {one.id: one.due_us // 1000 for one in (await waiting(admin)).values()}
        assert began <= dues[1] <= ended
        assert dues[2] == began - DAY_MS
        assert began <= dues[3] <= ended if by == "--at" else dues[3] == began + 4 * DAY_MS


async def test_a_lane_is_told_and_releases_in_time(database: str) -> None:
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        await place.park(lane, [parcel(place.now_upper_ms() + DAY_MS)], [])
        assert await release_all(lane) == []
        [one] = await waiting(admin)
        sleeping = asyncio.create_task(lane.wait(30.0))
        await asyncio.sleep(0)
        began = time.monotonic()
        await reschedule(admin, [one], When(at_ms=place.now_upper_ms() - 60_000))
        await sleeping
        assert [due.id for due in await release_all(lane)] == [one]
        assert time.monotonic() - began < SOON
        await place.hold(lane, [(parcel(place.now_upper_ms()), WHY)])
        assert await release_all(lane) == []
        [held] = [number for (number,) in await admin.fetch("SELECT id FROM held")]
        sleeping = asyncio.create_task(lane.wait(30.0))
        await asyncio.sleep(0)
        await reschedule(admin, [held], When(at_ms=place.now_upper_ms()))
        await sleeping
        assert [due.id for due in await release_all(lane)] == [held]


async def test_the_next_owner_of_a_lane_begins_where_something_was_moved_to(database: str) -> None:
    async with opened(database) as place, sql(database) as admin:
        async with owned(place) as [lane]:
            await place.park(lane, [parcel(place.now_upper_ms() + DAY_MS), parcel(place.now_upper_ms())], [])
            while not await release_all(lane):
                pass
        # The past is no place to move to: so that the lane be ahead of what was moved, it is put there.
        await admin.execute("UPDATE lane SET watermark = watermark + interval '1 hour'")
        [one] = await waiting(admin)
        sooner = place.now_upper_ms() + 100
        await reschedule(admin, [one], When(at_ms=sooner))
        assert await admin.fetchval("SELECT watermark FROM lane WHERE number = $1", lane.number) == sooner
        async with owned(place) as [lane]:
            while not (released := await release_all(lane)):
                pass
            assert [due.id for due in released] == [one]


async def test_notifications_before_the_reader_opens_are_kept() -> None:
    mailbox, heard = notify.Inbox(), list[notify.Notification]()
    mailbox._on_notification(None, 1, "", "waiting 5")
    mailbox._on_notification(None, 1, "", "nonsense")
    mailbox.open(heard.append)
    mailbox._on_notification(None, 1, "", "held 6")
    assert heard == [(notify.WAITING, 5), (notify.HELD, 6)]


async def test_against_a_release_in_flight(database: str) -> None:
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        for settled, expected in ((True, Found.NOWHERE), (False, Found.WAITING)):
            await place.park(lane, [parcel(place.now_upper_ms())], [])
            [one] = await waiting(admin)
            claimed = await lane.claim(MANY, ROOM)
            async with sql(database) as other:
                moves = asyncio.create_task(reschedule(other, [one], When(by_ms=DAY_MS)))
                await blocked(admin, "%DELETE FROM message AS m%")
                await (lane.settle(claimed, []) if settled else lane.give_up())
                assert await moves == {one: expected}
        assert await release_all(lane) == []
        assert await conserved(admin) == NO_ONE | {"parked": 2, "released": 1}


async def test_a_claim_waits_for_a_move_and_leaves_it(database: str) -> None:
    """A row that is moved away under a claim is not an error to it."""
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin, sql(database) as other:
        await place.park(lane, [parcel(place.now_upper_ms(), b"moved"), parcel(place.now_upper_ms(), b"stays")], [])
        ids = {one.body: one.id for one in (await waiting(admin)).values()}
        async with other.transaction():
            await reschedule(other, [ids[b"moved"]], When(by_ms=3 * DAY_MS))
            claims = asyncio.create_task(lane.claim(MANY, ROOM))
            await blocked(admin, "%DELETE FROM message AS m%USING (%")
        claimed = await claims
        assert [due.id for due in claimed] == [ids[b"stays"]]
        await lane.settle(claimed, [])
        assert (await waiting(admin)).keys() == {ids[b"moved"]}
        await conserved(admin)


@pytest.mark.deadline(120)
async def test_everything_at_once(database: str) -> None:
    """Releasing, compacting, restoring, cancelling and moving at the same time: each message is released once or
    cancelled, never both, and what stays is there once."""
    chance = random.Random(11)
    total = 800
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        now = place.now_upper_ms()
        await put(
            admin, [row(n, now + chance.choice([-1_000, 5 * DAY_MS + n]), lane.number) for n in range(1, total + 1)]
        )
        ids = list(range(1, total + 1))
        chance.shuffle(ids)
        stop = asyncio.Event()
        cancelled: dict[int, Found] = {}
        moved: dict[int, Found] = {}
        released: list[int] = []

        async def packs(connection: asyncpg.Connection) -> None:
            while not stop.is_set():
                await patiently(compact, connection, now + DAY_MS, rows=chance.choice([20, 200]))

        async def restores(connection: asyncpg.Connection) -> None:
            while not stop.is_set():
                if await patiently(catalog.restore_one, connection, FOREVER_MS) is None:
                    await asyncio.sleep(0)

        async def cancels(connection: asyncpg.Connection) -> None:
            for start in range(0, 150, 15):
                cancelled.update(await patiently(actions.cancel, connection, ids[start : start + 15]))

        async def moves(connection: asyncpg.Connection) -> None:
            for start in range(100, 400, 20):
                when = When(at_ms=chance.choice([now - 2_000, now + 6 * DAY_MS]))
                moved.update(await patiently(reschedule, connection, ids[start : start + 20], when))

        async def releases() -> None:
            while not stop.is_set() or await lane.sleep_hint() == 0.0:
                claimed = [due.id for due in (await lane.claim(100, ROOM))]
                rows_ = lane._claim.rows if lane._claim else []
                await lane.settle(rows_, [])
                released.extend(claimed)
                await asyncio.sleep(0)

        workers = [asyncio.create_task(apart(database, work)) for work in (packs, restores)]
        release = asyncio.create_task(releases())
        await asyncio.gather(apart(database, cancels), apart(database, moves))
        stop.set()
        await asyncio.gather(*workers, release)
        gone = {number for number, where in cancelled.items() if where is not Found.NOWHERE}
        left = await everything(admin)
        assert len(released) == len(set(released))
        assert not gone & set(released)
        assert not gone & left.keys()
        assert gone | set(released) | left.keys() == set(ids)
        assert len(gone) + len(released) + len(left) == total
        assert Found.NOWHERE in moved.values() or Found.WAITING in moved.values()
        counters = await conserved(admin)
        assert (counters["cancelled"], counters["released"]) == (len(gone), len(released))
