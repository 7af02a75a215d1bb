"""The work after a compaction: it drops emptied partitions and vacuums dead rows, without blocking other sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import asyncpg

from delayer.core.units import DAY_MS
from delayer.release.ports import Lane
from delayer.store.admin import shrink as shrinking
from delayer.store.rows import partitions
from delayer.store.rows.partitions import DAYS_AHEAD, name_of
from tests.integration.segments_store import apart
from tests.support.logged import capture_logs
from tests.support.place import compact_all, eventually
from tests.support.postgres import Postgres
from tests.support.store import Store, bodies, opened, owned, parcel, release_all, sql

KEPT = b"x" * 500
ROWS = 3_000


class Scene(NamedTuple):
    """A store, a lane of it, a connection for its administration, and one of another program."""

    url: str
    store: Store
    lane: Lane
    admin: asyncpg.Connection
    other: asyncpg.Connection
    today: int

    async def park(self, day: int, count: int = ROWS, key: bytes | None = None) -> None:
        await self.store.park(self.lane, [parcel(day * DAY_MS + n, KEPT, key=key) for n in range(count)], [])

    async def empty(self) -> None:
        await self.admin.execute("DELETE FROM message")

    async def shrink(self, *days: int, **more: int) -> shrinking.ShrinkResult:
        return await shrinking.shrink(self.url, set(days), self.today, lambda _done, _of: None, **more)


KEEP_KEYED = "SELECT FROM message WHERE key IS NOT NULL FOR UPDATE"
"""Rows that a compaction leaves, because another session has them locked."""


@asynccontextmanager
async def scene(url: str) -> AsyncIterator[Scene]:
    async with opened(url) as store, owned(store) as [lane], sql(url) as admin, sql(url) as other:
        yield Scene(url, store, lane, admin, other, store.now_upper_ms() // DAY_MS)


async def test_emptied_partitions_are_dropped_and_the_rest_shrink(database: str) -> None:
    async with scene(database) as it:
        near, emptied, partly, untouched = (it.today + DAYS_AHEAD + n for n in (0, 1, 2, 3))
        for day in (near, emptied, partly, untouched):
            await it.park(day)
        await it.admin.execute("DELETE FROM message WHERE due_at < $1", partly * DAY_MS)
        first, last = partly * DAY_MS + 100, (partly + 1) * DAY_MS
        await it.admin.execute("DELETE FROM message WHERE due_at >= $1 AND due_at < $2", first, last)
        said: list[tuple[int, int]] = []
        shrunk = await shrinking.shrink(database, {near, partly, emptied}, it.today, lambda *done: said.append(done))
        assert shrunk.dropped == (name_of(emptied),)
        assert shrunk.vacuumed == (name_of(near), name_of(partly))
        assert shrunk.left == ()
        assert said == [(0, 3), (1, 3), (2, 3), (3, 3)]
        assert shrunk.bytes_after < 0.5 * shrunk.bytes_before
        assert shrunk.bytes_after == await shrinking.size(it.admin)
        assert await partitions.read_days(it.admin) == {near, partly, untouched}
        assert await it.admin.fetchval("SELECT count(*) FROM message") == 100 + ROWS


async def test_the_next_compaction_finishes_a_killed_one(database: str) -> None:
    """The server knows the places of dead rows: it frees their empty pages even if other rows remain."""
    async with scene(database) as it:
        emptied, partly, untouched = (it.today + DAYS_AHEAD + n for n in (1, 2, 3))
        for day in (partly, untouched):  # first, so that the pages after them are empty in the end
            await it.park(day, 1, key=b"%d" % day)
        for day in (emptied, partly):
            await it.park(day)
        async with it.other.transaction():
            await it.other.execute(KEEP_KEYED)
            assert await apart(database, compact_all) == 1
        before = await shrinking.size(it.admin)
        shrunk = await it.shrink()
        assert (shrunk.dropped, shrunk.vacuumed) == ((name_of(emptied),), (name_of(partly),))
        assert await shrinking.size(it.admin) < 0.2 * before
        again = await it.shrink()
        assert (again.dropped, set(again.vacuumed) - {"message_default"}) == ((), set()), "no work is left"


async def test_space_kept_by_an_older_snapshot_is_reported_and_freed_the_next_time(database: str) -> None:
    """A dump, a nightly audit or a query of a replica may still see dead rows, so VACUUM must not remove them."""
    async with scene(database) as it:
        day = it.today + DAYS_AHEAD + 2
        await it.park(day, 1, key=b"k")
        await it.park(day)
        before = await shrinking.size(it.admin)
        async with it.other.transaction(isolation="repeatable_read"):
            await it.other.execute(KEEP_KEYED)
            assert await apart(database, compact_all) == 1
            with capture_logs() as logged:
                shrunk = await it.shrink()
            assert (shrunk.dropped, shrunk.vacuumed, shrunk.left) == ((), (), (name_of(day),))
            assert [entry["event"] for entry in logged] == ["partition not vacuumed"]
            # Postgres 16 and later add pages in advance, and VACUUM returns those that never had a row.
            assert await shrinking.size(it.admin) >= 0.9 * before
        shrunk = await it.shrink()
        assert (shrunk.vacuumed, shrunk.left) == ((name_of(day),), ())
        assert await shrinking.size(it.admin) < 0.3 * before


async def test_a_daemon_that_knew_a_dropped_partition_keeps_working(database: str) -> None:
    """Its rows wait in the default partition, and are released from there; upkeep updates its list of partitions."""
    async with scene(database) as it:
        day = it.today + 20
        await it.park(day, 1)
        await it.empty()
        await it.shrink(day)
        await it.park(day, 1)
        await it.store.park(it.lane, [parcel(it.store.now_upper_ms(), b"now")], [])
        assert await it.admin.fetchval("SELECT count(*) FROM message_default") == 1
        assert bodies(await release_all(it.lane)) == [b"now"]
        await it.store.maintain()
        await it.park(day, 1)
        assert await it.admin.fetchval(f"SELECT count(*) FROM {name_of(day)}") == 2


async def test_rows_of_no_day_are_vacuumed_in_the_default_partition(database: str) -> None:
    async with scene(database) as it:
        day = it.today + partitions.FARTHEST_DAYS + 100
        await it.park(day)
        await it.empty()
        shrunk = await it.shrink(day)
        assert (shrunk.dropped, shrunk.vacuumed) == ((), ("message_default",))
        assert await it.admin.fetchval("SELECT pg_relation_size('message_default')") == 0


async def test_dropping_yields_to_other_locks_but_dead_rows_are_vacuumed(database: str) -> None:
    async with scene(database) as it:
        day = it.today + 20
        await it.park(day)
        await it.empty()
        async with it.other.transaction():
            await it.other.fetch("SELECT FROM message LIMIT 1")
            with capture_logs() as logged:
                shrunk = await it.shrink(day)
        assert (shrunk.dropped, shrunk.left) == ((), (name_of(day),))
        assert "partition not dropped" in [entry["event"] for entry in logged]
        vacuumed = "SELECT last_vacuum IS NOT NULL FROM pg_stat_all_tables WHERE relname = $1"
        assert await it.admin.fetchval(vacuumed, name_of(day))
        assert (await it.shrink()).dropped == (name_of(day),)


async def test_a_partition_under_vacuum_is_left_for_the_next_time(database: str) -> None:
    async with scene(database) as it:
        day = it.today + 20
        await it.park(day)
        await it.admin.execute("DELETE FROM message WHERE due_at > $1", day * DAY_MS)
        async with it.other.transaction():
            await it.other.execute(f"LOCK TABLE {name_of(day)} IN SHARE UPDATE EXCLUSIVE MODE")  # a VACUUM's
            with capture_logs() as logged:
                shrunk = await it.shrink(day, lock_ms=1)
        assert (shrunk.dropped, shrunk.vacuumed, shrunk.left) == ((), (), (name_of(day),))
        assert [(entry["event"], entry["partition"]) for entry in logged] == [("partition not vacuumed", name_of(day))]
        assert (await it.shrink(day)).vacuumed == (name_of(day),)


async def test_autovacuum_does_not_prevent_a_drop() -> None:
    """Autovacuum works on emptied partitions. Here it never finishes by itself, and yields to a waiting session."""
    slowest = {"autovacuum_vacuum_cost_delay": "100ms", "autovacuum_vacuum_cost_limit": 1}
    with Postgres(settings={"autovacuum_naptime": "1s", **slowest}) as server:
        url = server.url(server.add_store())
        async with scene(url) as it:
            day = it.today + 20
            await it.park(day)
            await it.admin.execute(f"ALTER TABLE {name_of(day)} SET (autovacuum_vacuum_threshold = 1)")
            await it.empty()
            at_work = f"SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'autovacuum: VACUUM%{name_of(day)}'"
            await eventually(lambda: it.admin.fetchval(at_work), lambda count: count == 1)
            shrunk = await it.shrink(day)
            assert (shrunk.dropped, shrunk.left) == ((name_of(day),), ())
