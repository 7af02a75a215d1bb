"""Notifications for nothing, which every role may send, as many as it likes: a lane is neither stuck nor spins, and one
that is stuck still says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import asyncpg
import pytest

from delayer.core.filters import EARLIEST_MS
from delayer.core.message import Due
from delayer.store import inbox
from delayer.store.lanes import lane as module
from delayer.store.lanes import session, settling
from delayer.store.lanes.lane import PostgresClaimer, PostgresLane
from delayer.store.lanes.notify import HELD, INBOX, VAIN_SECONDS, WAITING, VainPace, channel
from tests.integration.lanes_shared import migrated, running
from tests.integration.test_sql_reader import process, read, send
from tests.integration.test_store_rejects import reject
from tests.support.fakes import NO_CONFIRM
from tests.support.place import eventually
from tests.support.store import MANY, ROOM, opened, owned, parcel, sql

STUCK = 0.1
LIMITED = b"limited.in"


def test_only_what_follows_a_vain_query_within_a_moment_is_delayed() -> None:
    pace = VainPace()
    assert [pace.pause(now) for now in (10.0, 10.015, 10.015, 11.0)] == pytest.approx([0, 0.005, 0.025, 0])


@asynccontextmanager
async def flood(database: str, payload: str, *channels: str) -> AsyncIterator[None]:
    """Another session notifies these channels again and again."""

    async def send_on(connection: asyncpg.Connection) -> None:
        while True:
            await connection.execute("SELECT pg_notify(name, $1) FROM unnest($2::text[]) AS name", payload, channels)

    async with sql(database) as connection:
        sending = asyncio.create_task(send_on(connection))
        try:
            yield
        finally:
            sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending


@pytest.mark.parametrize("kind", [WAITING, HELD])
@pytest.mark.parametrize("at_ms", [0, EARLIEST_MS])
async def test_an_idle_lane_in_a_flood_is_not_stuck(
    database: str, monkeypatch: pytest.MonkeyPatch, kind: str, at_ms: int
) -> None:
    monkeypatch.setattr(module, "STUCK_SECONDS", STUCK)
    monkeypatch.setattr(module, "BEHIND_SECONDS", STUCK)
    async with opened(database) as store, owned(store) as [lane]:
        began = lane.clock.monotonic()
        for _ in range(50):
            lane.cursor.note_notification(kind, at_ms)
            assert lane.sleep_hint() == 0
            assert not (lane.stuck or lane.behind)
            assert await lane.claimers[0].claim(MANY, ROOM) == []
        assert lane.clock.monotonic() - began > 48 * VAIN_SECONDS > STUCK


@pytest.mark.parametrize("kind", [WAITING, HELD])
async def test_a_flood_does_not_multiply_claims(database: str, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """In an ordinary lane, and in that of a limited route."""
    claims = 0
    claim = PostgresClaimer.claim

    async def counted(claimer: PostgresClaimer, limit: int, max_bytes: int) -> list[Due]:
        nonlocal claims
        claims += 1
        return await claim(claimer, limit, max_bytes)

    monkeypatch.setattr(PostgresClaimer, "claim", counted)
    await migrated(database)
    async with running(database, rates={LIMITED: 1000}) as daemon:
        await eventually(lambda: asyncio.sleep(0, daemon.backlog.numbers), lambda found: len(found) == 5)
        numbers = daemon.backlog.numbers
        loop = asyncio.get_running_loop()
        async with flood(database, f"{kind} 0", *map(channel, numbers)):
            claims, began = 0, loop.time()
            for n in range(5):
                soon = daemon.now_upper_ms() + 200
                await daemon.backlog.apply([parcel(soon), parcel(soon, route=LIMITED)])
                await eventually(
                    lambda: asyncio.sleep(0, daemon.publisher.published), lambda it, n=n: len(it) == 2 * n + 2
                )
            took = loop.time() - began
        assert claims <= 25 + 5 * took / VAIN_SECONDS


async def notified(lane: PostgresLane, claim: Callable[[], Awaitable[object]]) -> None:
    """Claim in a flood until the lane counts as stuck."""
    while not lane.stuck:
        lane.cursor.note_notification(WAITING, 0)
        lane.cursor.note_notification(HELD, 0)
        lane.sleep_hint()
        await claim()


@pytest.fixture
def soon_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STUCK_SECONDS", STUCK)


async def test_rows_that_never_settle_are_stuck_in_a_flood(database: str, soon_stuck: None) -> None:
    async with opened(database) as store, owned(store) as [lane]:
        await store.park(lane, [parcel(store.now_upper_ms())], [])
        [claimer, _] = lane.claimers

        async def claim_and_give_up() -> None:
            await claimer.claim(MANY, ROOM)
            await claimer.give_up()

        await notified(lane, claim_and_give_up)


async def test_held_rows_that_never_settle_are_stuck_in_a_flood(database: str, soon_stuck: None) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await store.hold(lane, [(parcel(store.now_upper_ms()), NO_CONFIRM)])
        await admin.execute("UPDATE held SET retry_at = statement_timestamp()")
        [claimer, _] = lane.claimers

        async def claim_and_give_up() -> None:
            await claimer.claim(MANY, ROOM)
            await claimer.give_up()

        await notified(lane, claim_and_give_up)


async def test_rejected_rows_are_stuck_in_a_flood(
    database: str, soon_stuck: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they are more than a lane skips."""
    monkeypatch.setattr(settling, "MOST", 1)
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await store.park(lane, [parcel(store.now_upper_ms(), b"%d" % n) for n in range(3)], [])
        await reject(admin, "DELETE", "message", "true")
        await notified(lane, lambda: lane.claimers[0].claim(MANY, ROOM))


async def test_a_locked_row_is_stuck_in_a_flood(database: str, soon_stuck: None) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as other:
        await store.park(lane, [parcel(store.now_upper_ms())], [])
        async with other.transaction():
            await other.execute("SELECT FROM message FOR UPDATE")
            claiming = asyncio.create_task(lane.claimers[0].claim(MANY, ROOM))
            await notified(lane, lambda: asyncio.sleep(0.01))
            assert not claiming.done()
        assert len(await claiming) == 1
        await lane.claimers[0].give_up()


async def test_claims_that_wait_for_their_session_are_stuck_in_a_flood(
    database: str, soon_stuck: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "TURN_SECONDS", 0.05)
    async with opened(database) as store, owned(store) as [lane]:
        await store.park(lane, [parcel(store.now_upper_ms())], [])
        async with lane.sessions[0].claims:
            await notified(lane, lambda: lane.claimers[0].claim(MANY, ROOM))


async def test_a_flood_does_not_multiply_reads_of_the_inbox(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0
    subscription_read = inbox.InboxSubscription._read

    async def counted(*args: object) -> object:
        nonlocal reads
        reads += 1
        return await subscription_read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(inbox.InboxSubscription, "_read", counted)
    async with process(database) as one, sql(database) as app:
        subscription = one.subscribe()
        assert await read(subscription) == []
        loop = asyncio.get_running_loop()
        async with flood(database, "", INBOX):
            reads, began = 0, loop.time()
            assert await read(subscription) == []
            assert 2 <= reads <= 5 + (loop.time() - began) / VAIN_SECONDS
            await send(app, 1)
            assert len(await read(subscription)) == 1, "and what is there is read"
