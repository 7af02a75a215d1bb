"""The figures of `delayer status` from the store, and the census of the backlog on a real Postgres."""

from __future__ import annotations

import pytest

from delayer.core import horizon
from delayer.core.message import Target
from delayer.core.units import DAY_MS, HOUR_MS, MINUTE_MS
from delayer.schedule.schedule import SCHEDULE
from delayer.store.admin import census
from delayer.store.admin.stats import RESTORED_MS, overview, restored_ms
from delayer.store.session import read_connection
from tests.support.fakes import WHY
from tests.support.place import compact_all
from tests.support.raw import Props, text
from tests.support.store import MANY, ROOM, opened, owned, parcel, release_all, sql


async def test_an_overview_shows_lanes_counters_and_the_next_due_instant(database: str) -> None:
    async with opened(database, owner="another") as store:
        now = store.now_upper_ms()
        async with owned(store, 4) as [empty, near, far, last]:
            await store.park(near, [parcel(now - 1), parcel(now + 3 * DAY_MS), parcel(now + 2 * DAY_MS)], [])
            await store.park(
                far, [parcel(now + 900 * DAY_MS), parcel(now + 30 * DAY_MS), parcel(now + 800 * DAY_MS)], []
            )
            await store.hold(far, [(parcel(now), WHY)])
            rows = await near.claimers[0].claim(MANY, ROOM)
            await near.claimers[0].settle(rows, [])
            whole = await overview(database)
            assert [lane.number for lane in whole.lanes] == [empty.number, near.number, far.number, last.number]
            assert {(lane.owner, lane.alive) for lane in whole.lanes} == {("another", True)}
            assert [lane.waiting for lane in whole.lanes] == [0, 2, 3, 0]
            assert [lane.held for lane in whole.lanes] == [0, 0, 1, 0]
            assert [lane.next_due_ms for lane in whole.lanes] == [None, now + 2 * DAY_MS, now + 30 * DAY_MS, None]
            retries = [lane.next_retry_ms for lane in whole.lanes]
            assert retries[:2] == [None, None]
            assert retries[2] is not None
            assert (whole.waiting, whole.held, whole.next_due_ms) == (5, 1, now + 2 * DAY_MS)
            assert (whole.counters["parked"], whole.counters["released"]) == (7, 1)
            assert not whole.upgrade_pending
            assert abs(whole.store_now_ms - store.now_upper_ms()) < 10_000
        assert not any(lane.alive for lane in (await overview(database)).lanes)


async def test_a_lane_with_due_messages_that_settles_nothing_is_stuck(database: str) -> None:
    old = "now() - interval '50 seconds'"
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:

        async def look() -> tuple[int, int]:
            """How long the lane is behind and stuck, in units of ten seconds."""
            [seen, *_] = (await overview(database)).lanes
            return seen.behind_ms // 10_000, seen.stuck_ms // 10_000

        await store.park(lane, [parcel(store.now_upper_ms() - 60_000), parcel(store.now_upper_ms() + 9_000)], [])
        assert await look() == (0, 0), "it was parked just now"
        await admin.execute(f"UPDATE message SET parked_at = {old} WHERE due_at < now()")
        assert await look() == (5, 5)
        await store.park(lane, [parcel(store.now_upper_ms() - 70_000, b"other")], [])
        await admin.execute(f"UPDATE message SET parked_at = {old} WHERE body = 'other'")
        await lane.claimers[0].settle(await lane.claimers[0].claim(1, ROOM), [])
        assert await look() == (5, 0), "it advances"
        await admin.execute(f"UPDATE counter SET at = {old}")
        await store.park(lane, [parcel(store.now_upper_ms() + 9_000)], [])
        assert await look() == (5, 5), "a park is no advance"
        await release_all(lane)
        await admin.execute(f"UPDATE counter SET at = {old}")
        assert await look() == (0, 0), "nothing is due"


async def test_segments_that_should_be_rows_again_are_late(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        now = store.now_upper_ms()
        await store.park(lane, [parcel(now + RESTORED_MS + 30_000 + n) for n in range(30)], [])
        assert await compact_all(admin) == 1
        assert (await overview(database)).late == (0, 0, None)
        await admin.execute("UPDATE segment SET first_due = first_due - interval '1 minute'")
        assert (await overview(database)).late == (1, 30, now + RESTORED_MS - 30_000)
        # A daemon that restores half an hour ahead may still have it as a segment.
        assert (await overview(database, RESTORED_MS // 2)).late == (0, 0, None)
        await admin.execute("UPDATE segment SET broken_at = now()")
        assert (await overview(database)).late == (0, 0, None), "another alarm tells of these"


def test_how_late_is_late_follows_from_when_daemons_restore() -> None:
    assert [restored_ms(ahead_ms) for ahead_ms in (DAY_MS, 7_200_000, 3_600_000, 1000)] == [
        RESTORED_MS, RESTORED_MS, 1_800_000, 500,
    ]  # fmt: skip


async def counted(database: str, **more: int) -> census.Census:
    async with read_connection(database, "count") as connection:
        return await census.take_census(connection, **more)


async def test_a_small_backlog_is_counted_exactly(database: str) -> None:
    async with opened(database) as store, owned(store, 2) as [one, other]:
        now = store.now_upper_ms()
        assert (await counted(database)).counts == {}
        await store.park(one, [parcel(now + HOUR_MS // 2)._replace(route=b"a") for _ in range(5)], [])
        await store.park(
            other, [parcel(now - 1)._replace(route=b"b"), parcel(now + 900 * DAY_MS)._replace(route=b"b")], []
        )
        found = await counted(database)
        assert found.exact
        classes = {route: horizon.by_class(counts) for route, counts in found.by_route().items()}
        assert (classes[b"a"]["hour"], classes[b"b"]["overdue"], classes[b"b"]["later"]) == (5, 1, 1)
        (there,) = found.destinations.values()
        assert there == (7, now - 1, 0)


async def test_messages_of_schedules_have_a_row_of_their_own(database: str) -> None:
    """They have no route, like messages that came straight to the queue."""
    properties = Props(headers=((SCHEDULE, text("tick")),)).encode()
    async with opened(database) as store, owned(store, 1) as [lane]:
        now = store.now_upper_ms()
        made, plain = (parcel(now + HOUR_MS, properties=one)._replace(route=b"") for one in (properties, b"\0\0"))
        await store.park(lane, [made, made, plain], [])
        await store.hold(lane, [(made, WHY)])
        found = await counted(database)
        counts = {route: sum(counts.values()) for route, counts in found.by_route().items()}
        assert (counts, found.held) == ({census.SCHEDULES: 2, b"": 1}, {census.SCHEDULES: 1})


async def test_destinations_have_their_waiting_and_held_messages(database: str) -> None:
    async with opened(database) as store, owned(store, 1) as [lane]:
        now = store.now_upper_ms()
        a, b, rare, lost = (Target(b"x", b"a"), Target(b"x", b"b"), Target(b"", b"rare"), Target(b"x", b"lost"))
        far = [parcel(now + 2 * DAY_MS + n * 1000, target=b if n % 4 else a) for n in range(12_000)]
        few = [parcel(now + HOUR_MS // 2 + n, target=rare) for n in range(3)]
        await store.park(lane, far + few, [])
        await store.hold(lane, [(parcel(now, target=lost), WHY)])
        found = await counted(database, most_pages=20)
        assert not found.exact
        there = found.destinations
        assert there[b].waiting / there[a].waiting == pytest.approx(3, rel=0.5)
        assert there[rare] == (3, now + HOUR_MS // 2, 0), "messages due soon are counted exactly"
        assert there[lost] == (0, None, 1)
        assert far[0].due_ms <= (there[a].next_due_ms or 0) <= far[-1].due_ms


async def test_a_large_backlog_is_estimated_and_adds_up(database: str) -> None:
    async with opened(database) as store, owned(store, 1) as [lane]:
        now = store.now_upper_ms()
        rows = [parcel(now + 2 * DAY_MS + n * 1000)._replace(route=b"a" if n % 4 else b"b") for n in range(12_000)]
        soon = [parcel(now + 5 * MINUTE_MS + n)._replace(route=b"soon") for n in range(300)]
        await store.park(lane, rows + soon, [])
        found = await counted(database, most_pages=20)
        assert not found.exact
        by_route = {route: sum(counts.values()) for route, counts in found.by_route().items()}
        assert by_route[b"soon"] == 300, "messages due soon are counted exactly"
        assert sum(by_route.values()) == pytest.approx(12_300, abs=600)
        assert by_route[b"a"] / by_route[b"b"] == pytest.approx(3, rel=0.5)


async def test_segments_are_spread_without_being_read(database: str) -> None:
    async with opened(database) as store, owned(store, 1) as [lane], sql(database) as admin:
        first = store.now_upper_ms() + 3 * DAY_MS
        await store.park(lane, [parcel(first + n * MINUTE_MS) for n in range(500)], [])
        assert await compact_all(admin) >= 1
        found = await counted(database)
        assert {route for route, _ in found.counts} == {census.COMPACTED}
        assert sum(found.counts.values()) == pytest.approx(500)
