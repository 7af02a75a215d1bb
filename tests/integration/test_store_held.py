"""Held messages in a store: retried on time, also by a busy lane, without blocking other messages."""

from __future__ import annotations

import asyncio

import pytest

from delayer.core.backoff import FIRST_MS
from delayer.core.hold import Hold, HoldKind
from delayer.store import statements
from delayer.store.admin import actions, audit_log
from delayer.store.admin.actions import NewDue, reschedule
from delayer.store.admin.detail import FoundIn
from delayer.store.admin.stats import overview
from tests.support.fakes import NO_CONFIRM, WHY
from tests.support.store import MANY, ROOM, blocked, bodies, claim_when_due, opened, owned, parcel, release_all, sql

LOOK = "SELECT h.retry_at FROM (SELECT retry_at FROM held WHERE lane = $1 LIMIT 1) AS h"
WAITING_LOOK = f"{LOOK} RIGHT JOIN pg_advisory_xact_lock(1) ON true"


async def retry(url: str) -> None:
    """Let all held messages be retried now, by hand."""
    async with sql(url) as admin:
        ids = [number for (number,) in await admin.fetch("SELECT id FROM held")]
        await actions.retry_held(admin, ids, {}, await audit_log.begin(admin, "test", "held retry", {}))


async def test_a_held_message_wakes_a_sleeping_lane(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane]:
        assert await release_all(lane) == []
        sleeper = asyncio.create_task(lane.wait(3600.0))
        assert lane.sleep_hint() > FIRST_MS / 1000
        await store.hold(lane, [(parcel(store.now_upper_ms(), b"held"), WHY)])
        await asyncio.wait_for(sleeper, FIRST_MS / 1000 + 5)
        assert bodies(await lane.claimers[0].claim(MANY, ROOM)) == [b"held"]
        await lane.claimers[0].give_up()


async def test_a_held_message_keeps_the_id_of_its_publish(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane]:
        before = parcel(store.now_upper_ms(), b"before")._replace(token=b"0123456789abcdef0123456789abcdef")
        await store.hold(lane, [(before, NO_CONFIRM), (parcel(store.now_upper_ms(), b"never"), WHY)])
        for _ in range(2):
            tokens: dict[bytes, bytes] = {}
            await retry(database)
            while len(tokens) < 2:
                rows = await claim_when_due(lane)
                tokens |= {row.parcel.body: row.parcel.token for row in rows if row.sound}
                await lane.claimers[0].settle([], [(row, WHY) for row in rows])
            assert tokens == {b"before": before.token, b"never": b""}


async def test_a_message_held_while_retries_are_queried_is_retried(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        assert await release_all(lane) == []
        await store.hold(lane, [(parcel(store.now_upper_ms(), b"first"), WHY)])
        await retry(database)
        rows = await claim_when_due(lane)
        assert bodies(rows) == [b"first"]
        monkeypatch.setattr(statements, "NEXT_RETRY", WAITING_LOOK)
        await admin.execute("SELECT pg_advisory_lock(1)")
        settling = asyncio.create_task(lane.claimers[0].settle([], [(rows[0], WHY)]))
        await blocked(admin, f"{LOOK}%")
        await store.hold(lane, [(parcel(store.now_upper_ms(), b"second"), WHY)])
        await admin.execute("SELECT pg_advisory_unlock(1)")
        await settling
        assert lane.sleep_hint() <= FIRST_MS / 1000


async def test_a_retry_by_hand_is_never_early(database: str) -> None:
    """An import holds a message due in a month if its queue does not exist yet. No retry may release it early."""
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        month = store.now_upper_ms() + 30 * 86_400_000
        held = [(parcel(month, b"in a month"), WHY), (parcel(store.now_upper_ms(), b"now"), WHY)]
        await store.hold(lane, held)
        ids = [number for (number,) in await admin.fetch("SELECT id FROM held ORDER BY due_at")]
        found = await actions.retry_held(admin, ids, {}, await audit_log.begin(admin, "test", "held retry", {}))
        assert found == dict.fromkeys(ids, FoundIn.HELD)
        await lane.wait(3600.0)
        rows = await lane.claimers[0].claim(MANY, ROOM)
        assert bodies(rows) == [b"now"]
        await lane.claimers[0].settle(rows, [])
        assert (await admin.fetchval("SELECT retry_at FROM held")) == month
        await reschedule(admin, ids[1:], when=NewDue(by_ms=-1000))
        assert tuple(await admin.fetchrow("SELECT due_at, retry_at FROM held")) == (month - 1000, month - 1000)
        soon = store.now_upper_ms() + 200
        await reschedule(admin, ids[1:], when=NewDue(at_ms=soon))
        await lane.wait(3600.0)
        [row] = await lane.claimers[0].claim(MANY, ROOM)
        assert (row.parcel.body, row.due_ms) == (b"in a month", soon)
        await lane.claimers[0].give_up()


async def test_after_a_retry_by_hand_the_pauses_start_over(database: str) -> None:
    """The destination was repaired, and its breaker stays open for half a minute: the pause must not be an hour."""
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await store.hold(lane, [(parcel(store.now_upper_ms()), NO_CONFIRM)])
        await admin.execute("UPDATE held SET attempts = 12")
        id = await admin.fetchval("SELECT id FROM held")
        found = await actions.retry_held(admin, [id], {}, await audit_log.begin(admin, "test", "held retry", {}))
        assert found == {id: FoundIn.HELD}
        await lane.wait(3600.0)
        rows = await lane.claimers[0].claim(MANY, ROOM)
        await lane.claimers[0].settle([], [(due, NO_CONFIRM) for due in rows])
        assert await admin.fetchval("SELECT retry_at - now() < interval '21 seconds' FROM held")


SMALL_ROOM = 100_000


BACKLOG = 60


HELD = 3


@pytest.mark.parametrize(
    "size", [SMALL_ROOM // 20, SMALL_ROOM // 2, 3 * SMALL_ROOM], ids=["many a claim", "two a claim", "one a claim"]
)
async def test_held_messages_have_their_turn(database: str, size: int) -> None:
    async with opened(database) as store, owned(store) as [lane]:
        now_ms = store.now_upper_ms()
        await store.hold(lane, [(parcel(now_ms - 1000, b"held %d" % number), WHY) for number in range(HELD)])
        await store.park(lane, [parcel(now_ms - 1000, bytes(size))] * BACKLOG, [])
        await retry(database)
        came: list[bytes] = []
        turns = 0
        while len(came) < BACKLOG + HELD:
            rows = await lane.claimers[0].claim(MANY, SMALL_ROOM)
            assert sum(map(len, bodies(rows))) <= SMALL_ROOM + size, "at most one more than there is room for"
            came += bodies(rows)
            turns += 1
            await lane.claimers[0].settle(rows, [])
        held = [place for place, body in enumerate(came) if body.startswith(b"held")]
        assert len(held) == HELD
        assert held[-1] < BACKLOG // 2, "and not behind all the others"


@pytest.mark.words
async def test_held_rows_are_claimed_again_until_they_are_released(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await store.park(lane, [parcel(store.now_upper_ms() - 9 + n, b"%d" % n) for n in range(3)], [])
        rows = await lane.claimers[0].claim(MANY, ROOM)
        await lane.claimers[0].settle(rows[:1], [(due, WHY) for due in rows[1:]])
        await store.hold(lane, [(parcel(store.now_upper_ms(), b"3"), NO_CONFIRM)])
        pauses = (
            "SELECT (extract(epoch FROM retry_at - now()) / 5)::int, attempts, kind, reason, may_be_delivered, isolated"
            " FROM held ORDER BY id"
        )
        assert [tuple(row) for row in await admin.fetch(pauses)] == [
            (2, 1, "nacked", "why", False, False),
            (2, 1, "nacked", "why", False, False),
            (2, 1, "unanswered", "no confirm", True, False),
        ]
        await admin.execute("UPDATE held SET retry_at = now()")
        await lane.scan()
        await store.park(lane, [parcel(store.now_upper_ms() - 1, b"fresh")], [])
        assert lane.sleep_hint() == 0.0
        rows = await lane.claimers[0].claim(MANY, ROOM)
        assert [(due.parcel.body, due.attempts) for due in rows] == [(b"1", 1), (b"2", 1), (b"3", 1)]
        assert [due.hold for due in rows] == [WHY, WHY, NO_CONFIRM]
        closed = Hold(HoldKind.CLOSED_CONNECTION, "so", may_be_delivered=True, isolated=True)
        await lane.claimers[0].settle(rows[:1], [(due, closed) for due in rows[1:]])
        rows = await lane.claimers[0].claim(MANY, ROOM)
        assert [(due.parcel.body, due.attempts, due.hold) for due in rows] == [(b"fresh", 0, None)]
        await lane.claimers[0].settle(rows, [])
        held = await admin.fetch(
            "SELECT attempts, kind, reason, may_be_delivered, isolated,"
            " (extract(epoch FROM retry_at - now()) / 10)::int FROM held"
        )
        assert {tuple(row) for row in held} == {(2, "closed_connection", "so", True, True, 2)}
        [of] = [one for one in (await overview(database)).lanes if one.number == lane.number]
        assert dict(of.counters) == {
            "parked": 5,
            "restored": 0,
            "released": 3,
            "cancelled": 0,
            "compacted": 0,
            "held": 2,
        }
        assert (of.waiting, of.next_due_ms) == (0, None)


async def test_held_rows_cannot_crowd_out_the_waiting(database: str) -> None:
    async with opened(database) as store, sql(database) as admin:
        async with owned(store) as [lane]:
            await store.hold(lane, [(parcel(store.now_upper_ms()), WHY) for _ in range(100)])
            await store.park(lane, [parcel(store.now_upper_ms()) for _ in range(100)], [])
        await admin.execute("UPDATE held SET retry_at = now()")
        async with owned(store) as [lane]:
            for limit, few in ((50, 5), (1, 1)):
                claims = []
                for _ in range(4):
                    claims.append([due.attempts for due in await lane.claimers[0].claim(limit, ROOM)])
                    await lane.claimers[0].give_up()
                assert claims == [[1] * few, [0] * limit] * 2


async def test_a_locked_held_row_is_queried_only_after_a_pause(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as other:
        await store.hold(lane, [(parcel(store.now_upper_ms(), b"held"), WHY)])
        await other.execute("UPDATE held SET retry_at = now()")
        await lane.scan()
        async with other.transaction():
            await other.fetch("SELECT FROM held FOR UPDATE")
            for _ in range(3):
                await lane.wait(lane.sleep_hint())
                for _ in range(2):  # The second checks whether the row is locked, or only too large for the first.
                    assert await lane.claimers[0].claim(MANY, ROOM) == []
                assert 0.5 < lane.sleep_hint() <= 1.1
            await store.park(lane, [parcel(store.now_upper_ms(), b"fresh")], [])
            assert bodies(await claim_when_due(lane)) == [b"fresh"], "waiting messages do not wait for locked ones"
            await lane.claimers[0].give_up()
            assert bodies(await release_all(lane)) == [b"fresh"]
        assert bodies(await claim_when_due(lane)) == [b"held"]
        await lane.claimers[0].give_up()
