"""Large messages: at any time only one claim of a process has one, and they do not delay the release of the rest."""

from __future__ import annotations

import pytest

from delayer.core.hold import Hold, HoldKind
from delayer.store.admin import actions, audit_log
from delayer.store.lanes import session
from delayer.store.lanes.lane import PostgresClaimer
from tests.support.store import MANY, ROOM, opened, owned, parcel, sql

LARGE = b"x" * (2 << 20)
WHY = Hold(HoldKind.RETURNED, "why")


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "TURN_SECONDS", 0.05)


async def claim(claimer: PostgresClaimer) -> bytes:
    """The first bytes of the rows claimed. The first claim may find that a row is large, and the next claim take it."""
    for _ in range(3):
        if rows := await claimer.claim(MANY, 1 << 18):
            return b"".join(row.parcel.body[:1] for row in rows)
    return b""


async def settle(claimer: PostgresClaimer) -> None:
    assert claimer.opened is not None
    await claimer.settle(claimer.opened.rows, [])


async def retry_held(database: str) -> None:
    async with sql(database) as admin:
        ids = [number for (number,) in await admin.fetch("SELECT id FROM held")]
        await actions.retry_held(admin, ids, {}, await audit_log.begin(admin, "test", "held retry", {}))


async def test_one_claim_takes_one_large_row_in_its_order(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane]:
        now = store.now_upper_ms()
        await store.park(lane, [parcel(now - 9 + n, b"%d" % n + LARGE * (n % 2)) for n in range(5)], [])
        first, second = lane.claimers
        assert await claim(first) == b"0"
        assert await claim(second) == b"1"
        await settle(first)
        assert await claim(first) == b"2"
        await settle(first)
        assert await claim(first) == b"", "the other large one waits for its turn"
        await settle(second)
        assert await claim(first) == b"3"
        await settle(first)
        assert await claim(first) == b"4"


async def test_lanes_share_the_large_row_lock_and_small_rows_do_not_need_it(database: str) -> None:
    async with opened(database) as store, owned(store, 2) as [one, two]:
        now = store.now_upper_ms()
        await store.park(one, [parcel(now, b"1" + LARGE)], [])
        await store.park(two, [parcel(now - 1, b"s"), parcel(now, b"2" + LARGE)], [])
        assert await claim(one.claimers[0]) == b"1"
        assert await claim(two.claimers[0]) == b"s"
        await settle(two.claimers[0])
        assert await claim(two.claimers[0]) == b""
        await one.close()
        assert await claim(two.claimers[0]) == b"2", "a lane that closes gives its turn back"


async def test_a_large_held_row_is_retried_next_to_rows_that_are_due(database: str) -> None:
    async with opened(database) as store, owned(store, 2) as [lane, other]:
        now = store.now_upper_ms()
        await store.park(other, [parcel(now, b"o" + LARGE)], [])
        await store.hold(lane, [(parcel(now, b"h" + LARGE), WHY)])
        await retry_held(database)
        assert await claim(other.claimers[0]) == b"o"
        claimed = []
        for round in range(10):
            await store.park(lane, [parcel(store.now_upper_ms() - 1000, b"w")], [])
            claimed.append(await claim(lane.claimers[round % 2]))
            await settle(lane.claimers[round % 2])
            if round == 3:
                assert claimed == [b"w"] * 4, "waiting rows go on while the held one has no turn"
                await settle(other.claimers[0])
                lane.cursor.note_held(0)
        assert b"h" in claimed


async def test_a_claim_that_fails_frees_the_large_row_lock(database: str) -> None:
    async with opened(database) as store, owned(store, 2) as [one, two]:
        now = store.now_upper_ms()
        await store.park(one, [parcel(now, b"1" + LARGE)], [])
        await store.park(two, [parcel(now, b"2" + LARGE)], [])
        assert await claim(one.claimers[0]) == b"1"
        await one.claimers[0].give_up()
        assert await claim(two.claimers[0]) == b"2"
        assert await two.claimers[1].claim(MANY, ROOM) == []
        await settle(two.claimers[0])
        assert await claim(one.claimers[1]) == b"1"
