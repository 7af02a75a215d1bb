"""Counting the backlog on a real Postgres: row by row where it is little, by samples where it is much."""

from __future__ import annotations

import pytest

from delayer.core import horizon
from delayer.core.horizon import DAY, HOUR, MINUTE
from delayer.store.admin import listing, stats
from tests.conformance.store_contract import owned, parcel
from tests.faults.place import compact_all
from tests.integration.test_store_lane import opened, sql


async def counted(database: str) -> stats.Census:
    async with listing.looking(database, "count") as connection:
        return await stats.take_census(connection)


async def test_little_is_counted_exactly(database: str) -> None:
    async with opened(database) as store, owned(store, 2) as [one, other]:
        now = store.now_upper_ms()
        assert (await counted(database)).counts == {}
        await store.park(one, [parcel(now + HOUR // 2)._replace(route=b"a") for _ in range(5)], [])
        await store.park(
            other, [parcel(now - 1)._replace(route=b"b"), parcel(now + 900 * DAY)._replace(route=b"b")], []
        )
        found = await counted(database)
        assert found.exact
        classes = {route: horizon.by_class(counts) for route, counts in found.by_route().items()}
        assert (classes[b"a"]["hour"], classes[b"b"]["overdue"], classes[b"b"]["later"]) == (5, 1, 1)


async def test_much_is_estimated_and_adds_up(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "PAGES", 60)
    monkeypatch.setattr(stats, "FEWEST", 20)
    async with opened(database) as store, owned(store, 1) as [lane]:
        now = store.now_upper_ms()
        rows = [parcel(now + 2 * DAY + n * 1000)._replace(route=b"a" if n % 4 else b"b") for n in range(12_000)]
        soon = [parcel(now + 5 * MINUTE + n)._replace(route=b"soon") for n in range(300)]
        await store.park(lane, rows + soon, [])
        found = await counted(database)
        assert not found.exact
        by_route = {route: sum(counts.values()) for route, counts in found.by_route().items()}
        assert by_route[b"soon"] == 300, "what is near is counted"
        assert sum(by_route.values()) == pytest.approx(12_300, abs=600)
        assert by_route[b"a"] / by_route[b"b"] == pytest.approx(3, rel=0.5)


async def test_segments_are_spread_without_being_read(database: str) -> None:
    async with opened(database) as store, owned(store, 1) as [lane], sql(database) as admin:
        first = store.now_upper_ms() + 3 * DAY
        await store.park(lane, [parcel(first + n * MINUTE) for n in range(500)], [])
        assert await compact_all(admin) >= 1
        found = await counted(database)
        assert {route for route, _ in found.counts} == {stats.COMPACTED}
        assert sum(found.counts.values()) == pytest.approx(500)
