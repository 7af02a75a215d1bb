"""A store that has hardly any connections left: what can be had is taken, and nothing that is due waits for more."""

from __future__ import annotations

import pytest

from delayer.core.errors import StoreLost
from delayer.store import session
from delayer.store.postgres import PostgresStore
from tests.conformance.store_contract import MANY, owned, parcel
from tests.integration.test_store_lane import opened


async def test_lanes_are_taken_as_far_as_connections_go(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connect, left = session.connect, 3

    async def few(url: str, application: str, *more: dict[str, str]) -> object:
        nonlocal left
        if left == 0:
            raise StoreLost("connect: TooManyConnectionsError: sorry, too many clients already")
        left -= 1
        return await connect(url, application, *more)

    async with opened(database) as store:
        async with owned(store, 6) as lanes:
            for lane in lanes:
                await store.park(lane, [parcel(store.now_ms())], [])
        monkeypatch.setattr(session, "connect", few)
        adopted = await store.adopt(MANY)
        assert len(adopted) == 3
        with pytest.raises(StoreLost):
            await store.adopt(MANY)
        left = 2
        own = await store.own_lanes(4)
        assert len(own) == 2
        with pytest.raises(StoreLost):
            await store.own_lanes(4)
        assert isinstance(store, PostgresStore)
        for lane in (*adopted, *own):
            await lane.release()
