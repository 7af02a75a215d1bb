"""Partitions: made when needed, filled from the default one, dropped when passed, and never blocking."""

from __future__ import annotations

import asyncio

from delayer.core.units import DAY_MS
from delayer.store.rows import partitions
from delayer.store.rows.partitions import PartitionResult, name_of
from tests.support.logged import capture_logs
from tests.support.store import bodies, opened, owned, parcel, release_all, sql

BY_DAY = "SELECT floor(extract(epoch FROM due_at) / 86400)::int AS day, count(*) AS n FROM {} GROUP BY 1"
COUNT = "SELECT tableoid::regclass::text AS name, count(*) AS n FROM message GROUP BY 1 ORDER BY 1"
FILL = """
INSERT INTO message (due_at, checksum, lane, format, route, exchange, routing_key, to_exchange, to_key,
                     properties, body)
SELECT statement_timestamp() + interval '500 days', 0, 1, 1, '', '', '', '', '', '', ''
FROM generate_series(1, $1::int)
"""


async def test_rows_are_in_the_partition_of_their_day(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        midnight = (store.now_upper_ms() // DAY_MS + 3) * DAY_MS
        await store.park(lane, [parcel(midnight - 1), parcel(midnight), parcel(midnight + DAY_MS - 1)], [])
        day = midnight // DAY_MS
        assert [tuple(row) for row in await admin.fetch(COUNT)] == [(name_of(day - 1), 1), (name_of(day), 2)]
        options = "SELECT reloptions::text FROM pg_class WHERE relname = $1"
        assert "vacuum_truncate=off" in await admin.fetchval(options, name_of(day))


async def test_too_far_and_too_old_go_to_the_default_partition(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        now = store.now_upper_ms()
        dues = [now - 2 * DAY_MS, now - DAY_MS, now + 400 * DAY_MS, now + 402 * DAY_MS, now + 3650 * DAY_MS, 0]
        await store.park(lane, [parcel(due) for due in dues], [])
        counts = {row["name"]: row["n"] for row in await admin.fetch(COUNT)}
        assert counts.pop("message_default") == 4
        assert counts == {name_of(due // DAY_MS): 1 for due in (now - DAY_MS, now + 400 * DAY_MS)}


async def test_maintenance_creates_a_week_ahead_and_drops_past_days(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        today = store.now_upper_ms() // DAY_MS
        for day in range(today - 5, today - 1):
            assert await partitions.make(admin, day, today - 10) is PartitionResult.DONE
        await admin.execute(f"ALTER TABLE message DETACH PARTITION {name_of(today - 4)}")
        await admin.execute(f"DROP TABLE {name_of(today - 4)}")
        await store.park(lane, [parcel((today - 3) * DAY_MS, b"old")], [])
        await store.maintain()
        kept = {today - 3, *range(today, today + 8)}
        assert await partitions.read_days(admin) == kept
        assert bodies(await release_all(lane)) == [b"old"]
        await store.maintain()
        assert await partitions.read_days(admin) == kept - {today - 3}


async def test_a_new_partition_takes_its_rows_from_the_default_one(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        now = store.now_upper_ms()
        await store.park(lane, [parcel(now + 401 * DAY_MS, b"%d" % n, key=b"%d" % n) for n in range(3)], [])
        assert await partitions.make(admin, now // DAY_MS + 401, now // DAY_MS) is PartitionResult.DONE
        assert [row["name"] for row in await admin.fetch(COUNT)] == [name_of(now // DAY_MS + 401)]
        await store.park(lane, [], [b"1"])
        assert await admin.fetchval("SELECT count(*) FROM message") == 2


async def test_rows_of_a_day_without_a_partition_wait_in_the_default_one(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        today = store.now_upper_ms() // DAY_MS
        await admin.execute(FILL, partitions.MOVED_AT_MOST + 1)
        assert await partitions.make(admin, today + 500, today) is PartitionResult.NOT_NOW
        await admin.execute(
            "UPDATE message SET due_at = statement_timestamp() WHERE id = (SELECT min(id) FROM message)"
        )
        for known in (today, today - 1):  # a process that began before midnight learns the day from the store
            assert await partitions.make(admin, today, known) is PartitionResult.NOT_NOW, "its rows may be in a release"
        await store.park(lane, [parcel(store.now_upper_ms(), b"due")], [])
        assert [row["name"] for row in await admin.fetch(COUNT)] == ["message_default"]
        assert len(await release_all(lane)) == 2


async def test_partitions_are_not_waited_for(database: str) -> None:
    """Another session reads the default partition for long: no day is made, and parks still go through."""
    async with opened(database) as store, owned(store) as [lane], sql(database) as reader, sql(database) as admin:
        now = store.now_upper_ms()
        with capture_logs() as logged:
            async with reader.transaction():
                await reader.fetch("SELECT FROM message_default")
                for first in range(0, 400, 100):
                    await store.park(lane, [parcel(now + (first + day) * DAY_MS) for day in range(100)], [])
                assert [entry["event"] for entry in logged] == ["partition not made"], "one wait, not one a day"
                await store.maintain()
                reasons = [entry["reason"] for entry in logged]
                assert reasons == ["canceling statement due to lock timeout"], (
                    "the next attempt of any process is a minute away"
                )
        assert [tuple(row) for row in await admin.fetch(COUNT)] == [("message_default", 400)]


async def test_one_park_creates_some_partitions_and_the_next_parks_the_rest(database: str) -> None:
    async with opened(database) as store, sql(database) as admin:
        today, days = store.now_upper_ms() // DAY_MS, partitions.Days(())
        wanted = range(today, today + partitions.MADE_AT_ONCE + 4)
        with capture_logs() as logged:
            await days.ensure(admin, wanted, today, 0.0, 600.0)
        assert logged[-1] == {
            "event": "partition not made",
            "log_level": "warning",
            "days": 4,
            "reason": "no time for more; the next parks go on",
        }
        assert await partitions.read_days(admin) == set(wanted[:-4])
        await days.ensure(admin, wanted, today, 0.0, 600.0)
        assert await partitions.read_days(admin) == set(wanted)


async def test_drops_skip_locked_partitions(database: str) -> None:
    """A dump locks all partitions: after the first failure the upkeep skips the rest, without a wait for each."""
    async with opened(database) as store, sql(database) as reader, sql(database) as admin:
        today = store.now_upper_ms() // DAY_MS
        for day in (today - 7, today - 6, today - 5):
            assert await partitions.make(admin, day, today - 10) is PartitionResult.DONE
        async with reader.transaction():
            await reader.fetch("SELECT FROM message LIMIT 1")
            with capture_logs() as logged:
                assert await partitions.drop_passed(admin, today) == []
        assert [(entry["partition"], entry["skipped"]) for entry in logged] == [(name_of(today - 7), 2)]
        assert await partitions.drop_passed(admin, today) == [name_of(today - n) for n in (7, 6, 5)]


async def test_a_slow_default_partition_is_left_alone_without_a_lock(database: str) -> None:
    async with opened(database) as store, sql(database) as reader, sql(database) as admin:
        await admin.execute(FILL, 50_000)
        today = store.now_upper_ms() // DAY_MS
        async with reader.transaction():
            await reader.fetch("SELECT FROM message_default LIMIT 1")  # a lock would wait, and give another reason
            with capture_logs() as logged:
                assert await partitions.make(admin, today + 1, today, 0.001) is PartitionResult.SLOW
            assert await partitions.read_days(admin) == set()
        [entry] = logged
        assert (entry["reason"], entry["partition"]) == (
            "the default partition takes too long to read",
            name_of(today + 1),
        )
        assert "VACUUM FULL" in entry["next_step"]


SLEEP = """
CREATE FUNCTION sleep() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM pg_sleep(1); RETURN OLD; END$$;
CREATE TRIGGER sleep BEFORE DELETE ON message_default FOR EACH ROW EXECUTE FUNCTION sleep()
"""


async def test_moving_rows_under_the_lock_is_bounded(database: str) -> None:
    async with opened(database) as store, sql(database) as admin:
        await admin.execute(FILL, 9)
        await admin.execute(SLEEP)
        today = store.now_upper_ms() // DAY_MS
        with capture_logs() as logged:
            assert await partitions.make(admin, today + 500, today) is PartitionResult.NOT_NOW
        assert logged[0]["reason"] == "moving that day's 9 rows takes longer than 2 s"
        assert await partitions.read_days(admin) == set()
        assert await admin.fetchval("SELECT count(*) FROM ONLY message_default") == 9
        assert await admin.fetchval("SHOW statement_timeout") == "30s"


async def test_upkeep_remembers_failures(database: str) -> None:
    async with opened(database) as store, sql(database) as reader, sql(database) as admin:
        today, days = store.now_upper_ms() // DAY_MS, partitions.Days(())
        with capture_logs() as logged:
            async with reader.transaction():
                await reader.fetch("SELECT FROM message_default")
                for second in range(0, 120, 10):
                    await partitions.make_ahead(admin, today, days, float(second))
        assert len(logged) == 2, "after 0 and 60 seconds"
        await partitions.make_ahead(admin, today, days, 120.0)
        assert await partitions.read_days(admin) == set(range(today, today + 8))


async def test_daemons_that_need_the_same_days_create_each_once(database: str) -> None:
    async with opened(database) as one, opened(database) as two, owned(one) as [lane], owned(two) as [other]:
        now = one.now_upper_ms()
        batch = [parcel(now + day * DAY_MS) for day in range(10)]
        with capture_logs() as said:
            await asyncio.gather(one.park(lane, batch, []), two.park(other, batch, []), one.park(lane, batch, []))
        made = [event["partition"] for event in said if event["event"] == "partition made"]
        assert len(set(made)) == len(made)
        async with sql(database) as admin:
            # On a busy machine a park may stop waiting for a day: its row is in the default partition then.
            elsewhere = {row["day"] for row in await admin.fetch(BY_DAY.format("message_default"))}
            assert len(set(await partitions.read_days(admin)) | elsewhere) == 10
            assert [row["n"] for row in await admin.fetch(BY_DAY.format("message"))] == [3] * 10
