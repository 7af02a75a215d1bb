"""What compaction leaves behind: emptied partitions are dropped, dead rows vacuumed, and nobody is in the way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from structlog.testing import capture_logs

from delayer.store import upgrades
from delayer.store.rows import partitions
from delayer.store.rows.partitions import DAY_MS, DAYS_AHEAD, name_of
from delayer.store.segments import compact
from tests.conformance.store_contract import bodies, owned, parcel, release_all
from tests.faults.place import compact_all, eventually
from tests.integration.test_store_lane import opened, sql
from tests.support.postgres import Postgres

KEPT = b"x" * 500
ROWS = 3_000


async def test_emptied_partitions_go_and_the_others_shrink(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        today = store.now_upper_ms() // DAY_MS
        near, emptied, partly, untouched = (today + DAYS_AHEAD + n for n in (0, 1, 2, 3))
        for day in (near, emptied, partly, untouched):
            await store.park(lane, [parcel(day * DAY_MS + n, KEPT) for n in range(ROWS)], [])
        await admin.execute("DELETE FROM message WHERE due_at < $1", partly * DAY_MS)
        await admin.execute("DELETE FROM message WHERE due_at >= $1 AND due_at < $2", *_day(partly, skip=100))
        said: list[tuple[int, int]] = []
        shrunk = await compact.shrink(database, {near, partly, emptied}, today, lambda *done: said.append(done))
        assert shrunk.dropped == (name_of(emptied),)
        assert shrunk.vacuumed == (name_of(near), name_of(partly))
        assert shrunk.left == ()
        assert said == [(0, 3), (1, 3), (2, 3), (3, 3)]
        assert shrunk.bytes_after < 0.5 * shrunk.bytes_before
        assert shrunk.bytes_after == await compact.size(database)
        assert await partitions.existing(admin) == {near, partly, untouched}
        assert await admin.fetchval("SELECT count(*) FROM message") == 100 + ROWS


def _day(day: int, skip: int) -> tuple[int, int]:
    return day * DAY_MS + skip, (day + 1) * DAY_MS


async def delete(admin: asyncpg.Connection) -> None:
    await admin.execute("DELETE FROM message")


@pytest.mark.parametrize("emptied", [delete, compact_all], ids=["deleted", "segments"])
async def test_an_empty_partition_is_dropped_without_vacuum(
    database: str, monkeypatch: pytest.MonkeyPatch, emptied: Callable[[asyncpg.Connection], Awaitable[object]]
) -> None:
    async def vacuum(_connection: object, name: str) -> bool:
        pytest.fail(f"{name} was vacuumed, to be dropped")

    monkeypatch.setattr(compact, "_vacuum", vacuum)
    async with opened(database) as store, sql(database) as admin:
        today = store.now_upper_ms() // DAY_MS
        day = today + 20
        async with owned(store) as [lane]:
            await store.park(lane, [parcel(day * DAY_MS + n, KEPT) for n in range(ROWS)], [])
        await emptied(admin)
        shrunk = await compact.shrink(database, {day}, today)
        assert (shrunk.dropped, shrunk.vacuumed, shrunk.left) == ((name_of(day),), (), ())


async def test_a_partition_with_dead_rows_is_vacuumed_before_the_drop(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compact, "PAUSE_SECONDS", 0.0)
    async with opened(database) as store, sql(database) as admin, sql(database) as reader:
        today = store.now_upper_ms() // DAY_MS
        day = today + 20
        async with owned(store) as [lane]:
            await store.park(lane, [parcel(day * DAY_MS + n, KEPT) for n in range(ROWS)], [])
        await admin.execute("DELETE FROM message")
        async with reader.transaction():
            await reader.fetch("SELECT FROM message LIMIT 1")
            shrunk = await compact.shrink(database, {day}, today)
        assert (shrunk.dropped, shrunk.left) == ((), (name_of(day),))
        vacuumed = "SELECT last_vacuum IS NOT NULL FROM pg_stat_all_tables WHERE relname = $1"
        assert await admin.fetchval(vacuumed, name_of(day))


async def test_the_next_compaction_finishes_a_dead_one(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its segments say which days it worked on: their empty pages go back, also where rows with keys are left."""
    monkeypatch.setattr(compact, "SETTLED", timedelta())
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        today = store.now_upper_ms() // DAY_MS
        emptied, partly, untouched = (today + DAYS_AHEAD + n for n in (1, 2, 3))
        await store.park(lane, [parcel(partly * DAY_MS, b"keyed", key=b"k")], [])
        for day in (emptied, partly):
            await store.park(lane, [parcel(day * DAY_MS + 1 + n, KEPT) for n in range(ROWS)], [])
        await store.park(lane, [parcel(untouched * DAY_MS, b"keyed", key=b"l")], [])
        assert await compact_all(admin) == 1
        before = await compact.size(database)
        shrunk = await compact.shrink(database, set(), today)
        assert (shrunk.dropped, shrunk.vacuumed) == ((name_of(emptied),), (name_of(partly),))
        assert await compact.size(database) < 0.2 * before
        again = await compact.shrink(database, set(), today)
        assert (again.dropped, set(again.vacuumed) - {"message_default"}) == ((), set()), "and then it is finished"


def test_days_are_unfinished_until_a_vacuum_long_after_their_segments() -> None:
    made, late = datetime(2030, 1, 1, tzinfo=UTC), compact.SETTLED
    names = {1: "one", 2: "two", 3: "three", 5: "gone"}
    vacuumed = {"one": made + late, "two": made + late / 2, "three": None, "message_default": made + late}
    assert compact.unfinished(dict.fromkeys(range(1, 6), made), names, vacuumed) == {2, 3}
    assert compact.unfinished({4: made + late}, names, vacuumed) == {4}, "a day without a partition"
    assert compact.unfinished({}, names, vacuumed) == set()


async def test_room_that_an_older_snapshot_keeps_is_told_and_comes_back_the_next_time(database: str) -> None:
    """A dump, a nightly audit, a replica's query: VACUUM removes nothing that they may still see."""
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin, sql(database) as reader:
        today = store.now_upper_ms() // DAY_MS
        day = today + DAYS_AHEAD + 2
        await store.park(lane, [parcel(day * DAY_MS, b"keyed", key=b"k")], [])
        await store.park(lane, [parcel(day * DAY_MS + 1 + n, KEPT) for n in range(ROWS)], [])
        before = await compact.size(database)
        async with reader.transaction(isolation="repeatable_read", readonly=True):
            await reader.fetch("SELECT FROM lane")
            assert await compact_all(admin) == 1
            with capture_logs() as logged:
                shrunk = await compact.shrink(database, set(), today)
            assert (shrunk.dropped, shrunk.vacuumed, shrunk.left) == ((), (), (name_of(day),))
            assert [entry["event"] for entry in logged] == ["partition not vacuumed"]
            assert await compact.size(database) >= before
        shrunk = await compact.shrink(database, set(), today)
        assert (shrunk.vacuumed, shrunk.left) == ((name_of(day),), ())
        assert await compact.size(database) < 0.3 * before


async def test_a_daemon_that_knew_the_partition_goes_on_without_it(database: str) -> None:
    """Its rows wait in the default partition, and are released from there; upkeep tells it what is there."""
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        today = store.now_upper_ms() // DAY_MS
        day = today + 20
        await store.park(lane, [parcel(day * DAY_MS, b"first")], [])
        await admin.execute("DELETE FROM message")
        await compact.shrink(database, {day}, today)
        await store.park(lane, [parcel(day * DAY_MS, b"second"), parcel(store.now_upper_ms(), b"now")], [])
        assert await admin.fetchval("SELECT count(*) FROM message_default") == 1
        assert bodies(await release_all(lane)) == [b"now"]
        await store.maintain()
        await store.park(lane, [parcel(day * DAY_MS, b"third")], [])
        assert await admin.fetchval(f"SELECT count(*) FROM {name_of(day)}") == 2


async def test_rows_of_no_partition_are_vacuumed_where_they_are(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        today = store.now_upper_ms() // DAY_MS
        day = today + partitions.FARTHEST_DAYS + 100
        await store.park(lane, [parcel(day * DAY_MS, KEPT) for _ in range(ROWS)], [])
        await admin.execute("DELETE FROM message")
        shrunk = await compact.shrink(database, {day}, today)
        assert (shrunk.dropped, shrunk.vacuumed) == ((), ("message_default",))
        assert await admin.fetchval("SELECT pg_relation_size('message_default')") == 0


async def test_dropping_gives_way(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "PAUSE_SECONDS", 0.0)
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin, sql(database) as reader:
        today = store.now_upper_ms() // DAY_MS
        day = today + 20
        await store.park(lane, [parcel(day * DAY_MS)], [])
        await admin.execute("DELETE FROM message")
        async with reader.transaction():
            await reader.fetch("SELECT FROM message LIMIT 1")
            with capture_logs() as logged:
                shrunk = await compact.shrink(database, set(), today)
        assert (shrunk.dropped, shrunk.left) == ((), (name_of(day),))
        assert [entry["event"] for entry in logged] == ["partition not dropped"]
        assert (await compact.shrink(database, set(), today)).dropped == (name_of(day),)


async def test_a_partition_that_somebody_else_vacuums_is_left_for_the_next_time(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compact, "VACUUM_LOCK_MS", 1)
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin, sql(database) as other:
        today = store.now_upper_ms() // DAY_MS
        day = today + 20
        await store.park(lane, [parcel(day * DAY_MS + n, KEPT) for n in range(ROWS)], [])
        await admin.execute("DELETE FROM message WHERE due_at > $1", day * DAY_MS)
        async with other.transaction():
            await other.execute(f"LOCK TABLE {name_of(day)} IN SHARE UPDATE EXCLUSIVE MODE")  # a VACUUM's
            with capture_logs() as logged:
                shrunk = await compact.shrink(database, {day}, today)
        assert (shrunk.dropped, shrunk.vacuumed, shrunk.left) == ((), (), (name_of(day),))
        assert [(entry["event"], entry["partition"]) for entry in logged] == [("partition not vacuumed", name_of(day))]
        assert (await compact.shrink(database, {day}, today)).vacuumed == (name_of(day),)


async def test_autovacuum_keeps_no_partition_from_being_dropped() -> None:
    """What is emptied is what it vacuums. It is made to take for ever here, and gives way to whoever waits."""
    slowest = {"autovacuum_vacuum_cost_delay": "100ms", "autovacuum_vacuum_cost_limit": 1}
    with Postgres(settings={"autovacuum_naptime": "1s", **slowest}) as server:
        database = server.url(server.add_database())
        await upgrades.upgrade(database)
        async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
            today = store.now_upper_ms() // DAY_MS
            day = today + 20
            await store.park(lane, [parcel(day * DAY_MS + n, KEPT) for n in range(ROWS)], [])
            await admin.execute(f"ALTER TABLE {name_of(day)} SET (autovacuum_vacuum_threshold = 1)")
            await admin.execute("DELETE FROM message")
            at_work = f"SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'autovacuum: VACUUM%{name_of(day)}'"
            await eventually(lambda: admin.fetchval(at_work), lambda count: count == 1)
            shrunk = await compact.shrink(database, {day}, today)
            assert (shrunk.dropped, shrunk.left) == ((name_of(day),), ())
