"""What living owners of lanes say of themselves."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest
import structlog.testing

from delayer.audit import compact, restore
from delayer.store import owners, session
from delayer.store.partitions import DAY_MS
from delayer.store.segments import Fence
from tests.conformance.store_contract import owned, parcel
from tests.integration.test_store_lane import opened

WEEK_MS = 7 * DAY_MS


def test_a_mark_is_the_brokers_and_the_virtual_hosts() -> None:
    marks = {owners.mark_of(cluster, vhost) for cluster in ("rabbit@a", "rabbit@b") for vhost in ("/", "work")}
    assert len(marks) == 4
    assert owners.mark_of("", "work") == ""
    for mark in ("", *marks):
        name = owners.application_of(32_767, mark)
        assert owners.broker_of(name) == mark
        assert len(name) < 64, "Postgres cuts longer ones"
    assert owners.broker_of("delayer lane 7") == ""


async def test_daemons_of_another_broker_are_told(database: str) -> None:
    """Each by the other, once; nobody by who does not know its broker yet."""
    mine, theirs = owners.mark_of("rabbit@a", "/"), owners.mark_of("rabbit@a", "work")
    async with opened(database, broker=lambda: theirs) as other, opened(database, broker=lambda: mine) as store:
        async with owned(other, 2) as strange, owned(store), opened(database) as unknowing, owned(unknowing):
            with structlog.testing.capture_logs() as logs:
                for one in (store, store, unknowing, other):
                    await one.maintain()
            told = [event["lanes"] for event in logs if event["event"] == "store shared"]
            assert told == [[lane.number for lane in strange], [3]]
        with structlog.testing.capture_logs() as logs:
            await store.maintain()
        assert [event for event in logs if event["event"] == "store shared"] == []


async def test_what_was_perhaps_undone_is_in_no_total(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(_: asyncpg.Connection) -> None:
        raise ConnectionResetError("gone")

    async with opened(database) as store, owned(store) as [lane]:
        await store.park(lane, [parcel(store.now_ms() + 10 * DAY_MS) for _ in range(3)], [])
        planned = await compact.plan(database, WEEK_MS, 100)
        monkeypatch.setattr(session, "flush", fails)
        [packed] = await asyncio.to_thread(compact.work, database, 100, planned.windows)
        assert (packed.segments, packed.messages, packed.raw_bytes, packed.perhaps) == (0, 0, 0, 3)
        assert "perhaps 3 messages more were packed" in str(packed.lost)
        [one] = (await restore.plan(database, None)).segments
        fence = Fence(lane.number, lane.epoch)  # type: ignore[attr-defined]
        [back] = await asyncio.to_thread(restore.work, database, fence, [one.id])
        assert back.messages == 0
        assert "perhaps its 3 messages are restored" in str(back.lost)
