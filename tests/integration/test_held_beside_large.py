"""A backlog of large messages, each claim of which is full by its bytes, keeps no held message from its turn."""

from __future__ import annotations

import pytest

from delayer.core import backoff
from delayer.store import upgrades
from delayer.store.postgres import PostgresStore
from tests.conformance.store_contract import MANY, bodies, owned, parcel
from tests.support.fakes import WHY

ROOM = 100_000
BACKLOG = 60
HELD = 3


@pytest.mark.parametrize("size", [ROOM // 20, ROOM // 2, 3 * ROOM], ids=["many a claim", "two a claim", "one a claim"])
async def test_held_messages_have_their_turn(database: str, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(backoff, "FIRST_MS", 1)
    await upgrades.upgrade(database)
    store = await PostgresStore.connect(database)
    async with owned(store) as (lane,):
        now_ms = store.now_upper_ms()
        await store.hold(lane, [(parcel(now_ms - 1000, b"held %d" % number), WHY) for number in range(HELD)])
        await store.park(lane, [parcel(now_ms - 1000, bytes(size))] * BACKLOG, [])
        came: list[bytes] = []
        turns = 0
        while len(came) < BACKLOG + HELD:
            rows = await lane.claim(MANY, ROOM)
            assert sum(map(len, bodies(rows))) <= ROOM + size, "one more than there is room for, and no two"
            came += bodies(rows)
            turns += 1
            await lane.settle(rows, [])
        held = [place for place, body in enumerate(came) if body.startswith(b"held")]
        assert len(held) == HELD
        assert held[-1] < BACKLOG // 2, "and not behind all the others"
    await store.close()
