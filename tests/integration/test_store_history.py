"""The history has a row for each message that was released, held or cancelled, in the transaction of the change."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import asyncpg
import pytest

from delayer.core.hold import Hold, HoldKind
from delayer.core.message import Due
from delayer.core.units import DAY_MS
from delayer.store.admin import actions
from delayer.store.admin.stats import counters
from delayer.store.rows import history
from delayer.store.rows.partitions import name_of
from tests.integration.rights import as_owner, statements_of, store
from tests.support.fakes import WHY
from tests.support.logged import capture_logs
from tests.support.store import Store, claim_when_due, opened, owned, parcel, release_all, sql

__all__ = ["store"]


async def written(admin: asyncpg.Connection) -> list[dict[str, Any]]:
    return [dict(row) for row in await admin.fetch("SELECT * FROM history ORDER BY at, id")]


async def agrees(admin: asyncpg.Connection) -> None:
    """Check the history's released and cancelled messages against the counters."""
    found = Counter(one["what"] for one in await written(admin))
    kinds = await counters(admin)
    assert (found["released"], found["cancelled"]) == (kinds["released"], kinds["cancelled"])


async def test_each_change_is_written_once(database: str) -> None:
    async with opened(database, history_days=7) as store, owned(store) as lanes, sql(database) as admin:
        [lane, *_] = lanes
        now = store.now_lower_ms()
        await store.park(lane, [parcel(now + ms, b"body" * 10) for ms in (5, 10, 15, 20)], [])
        rows: list[Due] = []
        while len(rows) < 4:
            rows += await claim_when_due(lane)
        late = [float(due.due_ms + 7) for due in rows[1:]]
        await lane.claimers[0].settle(rows[1:], [(rows[0], WHY)], lambda: late)

        found = await written(admin)
        assert [one["what"] for one in found] == ["held", *["released"] * 3]
        for one, due in zip(found, rows, strict=True):
            told = (one["id"], one["due_at"], one["route"], one["to_exchange"], one["to_key"], one["size"])
            assert told == (due.id, due.due_ms, b"delayer.in", b"delayer.out", b"orders.eu", 43)
            parked_ms = due.due_ms - one["delay_ms"]
            assert now - 1_000 <= parked_ms <= now + 10_000
            assert abs(one["at"] - store.now_lower_ms()) < 60_000
        assert [one["late_ms"] for one in found[1:]] == [7, 7, 7]
        assert found[0]["kind"] == WHY.kind
        assert found[0]["late_ms"] >= 0

        # Held again: no second row. Then released.
        await admin.execute("UPDATE held SET retry_at = now()")
        await lane.scan()
        again = await claim_when_due(lane)
        await lane.claimers[0].settle([], [(due, WHY) for due in again])
        await admin.execute("UPDATE held SET retry_at = now()")
        await lane.scan()
        await release_all(lane)
        found = await written(admin)
        assert [one["what"] for one in found] == ["held", *["released"] * 4]
        assert found[-1]["delay_ms"] is None
        await agrees(admin)


async def test_cancels_are_written(database: str) -> None:
    """By key, by a replacement, within one park, by hand, and of a held message."""
    async with opened(database, history_days=7) as store, owned(store) as lanes, sql(database) as admin:
        lane, now = lanes[0], store.now_lower_ms()
        later = now + DAY_MS
        await store.park(
            lane, [parcel(later, key=b"a"), parcel(later, key=b"b"), parcel(later), parcel(later, key=b"b")], []
        )
        await store.park(lane, [parcel(later + 5, key=b"a")], [b"b"])
        await store.hold(lane, [(parcel(now, key=b"h"), Hold(HoldKind.NACKED, "why"))])
        ids = [number for (number,) in await admin.fetch("SELECT id FROM message UNION ALL SELECT id FROM held")]
        assert len(ids) == 3
        await actions.cancel(admin, ids)
        found = await written(admin)
        assert Counter(one["what"] for one in found) == {"cancelled": 6, "held": 1}
        assert [one["kind"] for one in found if one["what"] == "held"] == ["nacked"]
        assert [one["delay_ms"] is None for one in found].count(True) == 2, "of the held message alone"
        assert all(DAY_MS - 60_000 < one["delay_ms"] <= DAY_MS + 5 for one in found if one["delay_ms"] is not None)
        await agrees(admin)


async def test_a_rolled_back_release_leaves_no_row(database: str) -> None:
    async with opened(database, history_days=7) as store, owned(store) as lanes, sql(database) as admin:
        lane = lanes[0]
        await store.park(lane, [parcel(store.now_lower_ms() + 5)], [])
        rows = await claim_when_due(lane)
        await lane.claimers[0].give_up()
        assert await written(admin) == []
        rows = await claim_when_due(lane)
        await lane.claimers[0].settle(rows, [])
        assert len(await written(admin)) == 1


async def test_without_history_nothing_is_written(database: str) -> None:
    async with opened(database) as store, owned(store) as lanes, sql(database) as admin:
        lane, now = lanes[0], store.now_lower_ms()
        await store.park(lane, [parcel(now + 5), parcel(now + DAY_MS, key=b"a")], [])
        await store.park(lane, [], [b"a"])
        await store.hold(lane, [(parcel(now + DAY_MS), WHY)])
        await lane.claimers[0].settle(await claim_when_due(lane), [])
        await actions.cancel(admin, [number for (number,) in await admin.fetch("SELECT id FROM held")])
        await store.maintain()
        assert await written(admin) == []
        assert (await counters(admin))["cancelled"] == 2


async def partitions(admin: asyncpg.Connection) -> list[str]:
    names = [one["name"] for one in await admin.fetch(
        "SELECT inhrelid::regclass::text AS name FROM pg_inherits WHERE inhparent = 'history'::regclass"
    )]  # fmt: skip
    return sorted(name.removeprefix("history_p") for name in names if name != "history_default")


def days(first: int, count: int) -> list[str]:
    return [name_of(day, "history").removeprefix("history_p") for day in range(first, first + count)]


async def test_days_are_created_ahead_and_dropped_as_a_whole(database: str) -> None:
    async with opened(database), sql(database) as admin:
        today = await admin.fetchval("SELECT statement_timestamp()") // DAY_MS
        for day in range(today - 6, today + 1):
            await history.run_upkeep(admin, day, 3)
        assert await partitions(admin) == days(today - 3, 6)
        # A row without a partition is in the default one, and goes with its days.
        await admin.execute(
            "INSERT INTO history SELECT at, 'released', 1, '', '', '', at, 0, 0, 0 FROM"
            " unnest(ARRAY[now() - interval '20 days', now()]) AS at"
        )
        await history.run_upkeep(admin, today, 3)
        assert await admin.fetchval("SELECT count(*) FROM history") == 1
        await history.run_upkeep(admin, today, 0)
        assert (await partitions(admin), await admin.fetchval("SELECT count(*) FROM history")) == ([], 0)


async def test_a_reader_delays_a_drop_but_not_releases(database: str) -> None:
    async with opened(database, history_days=3) as store, owned(store) as lanes, sql(database) as admin:
        today = store.now_lower_ms() // DAY_MS
        async with sql(database) as reader, reader.transaction():
            await reader.fetch("SELECT count(*) FROM history")
            with capture_logs() as logs:
                await history.run_upkeep(admin, today + 50, 3)
            assert any(one["event"] == "history partition not changed" for one in logs)
            await store.park(lanes[0], [parcel(store.now_lower_ms() + 5)], [])
            async with asyncio.timeout(30):
                await lanes[0].claimers[0].settle(await claim_when_due(lanes[0]), [])
        await history.run_upkeep(admin, today + 50, 3)
        assert await partitions(admin) == days(today + 50, 3)


async def test_two_daemons_create_the_same_days_at_once(database: str) -> None:
    async with opened(database):
        stores = await asyncio.gather(*(Store.connect(lambda: database, history_days=3) for _ in range(3)))
        async with sql(database) as admin:
            today = stores[0].now_lower_ms() // DAY_MS
            assert await partitions(admin) == days(today, 3)
        for one in stores:
            await one.close()


@pytest.mark.deadline(120)
async def test_the_rights_of_the_page_are_enough(store: str) -> None:
    """The daemon's role can keep a history with block 4 of docs/security.md, and needs none of it without a history."""
    without = await Store.connect(lambda: store)
    await without.maintain()
    await without.close()
    await as_owner(store.replace("//delayer@", "//delayer_owner@"), statements_of(4))
    daemon = await Store.connect(lambda: store, history_days=2)
    try:
        async with owned(daemon, 1) as [lane]:
            await daemon.park(lane, [parcel(daemon.now_lower_ms() + 5)], [])
            await lane.claimers[0].settle(await claim_when_due(lane), [])
            await daemon.maintain()
        async with sql(store) as admin:
            assert await admin.fetchval("SELECT count(*) FROM history") == 1
            await history.run_upkeep(admin, 40_000, 2)
            assert await partitions(admin) == days(40_000, 3)
    finally:
        await daemon.close()
