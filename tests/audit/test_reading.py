"""The data source, the snapshot and the extract: Spark sees all rows of Postgres, as of one instant."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from delayer.audit import extract, source
from delayer.audit.extract import Extract
from delayer.audit.tasks import StageWatcher
from delayer.core.errors import StoreLost
from delayer.core.secret import SecretUrl
from delayer.core.units import DAY_MS
from tests.support import rows
from tests.support.fakes import LATE, WHY
from tests.support.postgres import Postgres
from tests.support.store import MANY, ROOM, opened, owned, parcel, sql

WEEK_MS = 7 * DAY_MS


def run(work: Callable[[asyncpg.Connection], Awaitable[Any]], url: str) -> Any:
    async def connected() -> Any:
        async with sql(url) as connection:
            return await work(connection)

    return asyncio.run(connected())


def execute(url: str, statement: str, *arguments: object) -> None:
    async def work(connection: asyncpg.Connection) -> None:
        await connection.execute(statement, *arguments)

    run(work, url)


def fetch(url: str, statement: str) -> list[tuple[Any, ...]]:
    async def work(connection: asyncpg.Connection) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in await connection.fetch(statement)]

    rows: list[tuple[Any, ...]] = run(work, url)
    return rows


def fill(url: str, count: int = 3000) -> None:
    """Two lanes; rows due on ten days and in ten years, bodies of all sizes, some with a key, two held.
    None of them is overdue, however long an audit takes to begin."""

    async def work() -> None:
        async with opened(url) as store, owned(store, 2) as lanes:
            now = store.now_upper_ms()
            parcels = [
                parcel(
                    now + (n % 10 + 1) * DAY_MS + n if n % 50 else now + 3650 * DAY_MS + n,
                    b"\x00" * 3000 if n % 100 == 0 else b"%d" % n * (n % 40),
                    key=b"key %d" % n if n % 20 == 0 else None,
                    routing_key=b"r\xff%d" % (n % 3),
                )
                for n in range(count)
            ]
            for turn, start in enumerate(range(0, count, 300)):
                await store.park(lanes[turn % 2], parcels[start : start + 300], [])
            await store.hold(lanes[0], [(parcel(now + DAY_MS), WHY), (parcel(now + 6), LATE)])

    asyncio.run(work())


@pytest.fixture
def filled(database: str) -> str:
    fill(database)
    return database


def load(spark: SparkSession, url: str, relation: str, **options: object) -> DataFrame:
    spark.dataSource.register(source.data_source_for(SecretUrl(url)))
    texts = {name: str(value) for name, value in options.items()}
    return spark.read.format("delayer").options(relation=relation, **texts).load()


def take(spark: SparkSession, url: str, work: str, **more: Any) -> Extract:
    watching = StageWatcher(spark, lambda _what, _done, _of: None)
    return extract.write_extract(spark, SecretUrl(url), Path(work).as_uri(), watching, **more)


# ---- the data source


def test_every_row_is_read_once_as_it_is(spark: SparkSession, filled: str) -> None:
    frame = load(spark, filled, "message", split_bytes=64 << 10, batch_bytes=32 << 10)
    assert frame.rdd.getNumPartitions() > 5
    found = {row["id"]: row.asDict() for row in frame.collect()}
    names = ("route", "to_exchange", "to_key", "key")
    expected = fetch(
        filled,
        "SELECT id, lane, due_at, octet_length(properties) + octet_length(body), properties, body,"
        f" {', '.join(names)} FROM message",
    )
    assert len(found) == len(expected) == frame.count() == 3000
    for id_, lane, due_ms, size, properties, body, *carried in expected:
        row = found[id_]
        assert (row["lane"], row["due_ms"], row["kind"], row["size"]) == (lane, due_ms, "waiting", size)
        assert [row[name] for name in names] == carried
        assert (row["faults"], row["segment"], row["retry_ms"]) == ([], None, None)
        assert all(value not in (properties, body) for name, value in row.items() if name not in names and value)


def test_the_progress_tells_rows(spark: SparkSession, filled: str) -> None:
    watching, step = StageWatcher(spark, lambda *_: None), "reading, for its progress"
    with watching(step):
        load(spark, filled, "message", split_bytes=64 << 10).write.format("noop").mode("overwrite").save()
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
    rows, done, of = watching.seen(step)
    assert rows == 3000
    assert done == of > 5


def test_instants_that_have_no_number_are_at_the_ends_of_the_calendar(spark: SparkSession, filled: str) -> None:
    execute(filled, "UPDATE message SET due_at = 'infinity' WHERE id = 1")
    execute(filled, "UPDATE message SET due_at = '0001-01-01 00:00:00+00 BC' WHERE id = 2")
    execute(filled, "UPDATE message SET due_at = '1969-12-31 23:59:59.9995+00' WHERE id = 3")
    found = {row.id: row.due_ms for row in load(spark, filled, "message").where("id < 4").collect()}
    assert found[1] == 253402214400000  # the last day of 9999
    assert found[2] == -62135596800000  # the first of the year 1
    assert found[3] == -1  # rounded down, before 1970 too


def test_a_missing_relation_is_named(spark: SparkSession, database: str) -> None:
    with pytest.raises(PySparkException, match="there are message, held"):
        load(spark, database, "messages")


def test_a_store_that_goes_away_is_a_loss_of_the_store(spark: SparkSession) -> None:
    with Postgres() as server:
        url = server.url(server.add_database())
        fill(url, 300)
        frame = load(spark, url, "message")
        assert frame.count() == 300
        gone = load(spark, url, "held")
        server.stop()
        with pytest.raises(StoreLost, match="connect: "), StageWatcher(spark, lambda *_: None)("reading"):
            gone.count()


# ---- the snapshot


def test_everything_is_of_one_instant(spark: SparkSession, filled: str) -> None:
    with extract.hold_snapshot(SecretUrl(filled)) as held:
        fill(filled, 100)
        execute(filled, "DELETE FROM message WHERE id % 2 = 0")
        execute(filled, "DELETE FROM held")
        execute(filled, "VACUUM message")
        assert load(spark, filled, "message", snapshot=held.id).distinct().count() == 3000
        assert load(spark, filled, "held", snapshot=held.id).count() == 2
    assert [(load(spark, filled, "message").count(),)] == fetch(filled, "SELECT count(*) FROM message")


def test_the_driver_reads_lanes_and_empty_tables(filled: str) -> None:
    async def work() -> tuple[Any, ...]:
        async with opened(filled, owner="another") as store, owned(store, 1) as [lane]:
            return lane.number, await asyncio.to_thread(look)

    def look() -> tuple[Any, ...]:
        with extract.hold_snapshot(SecretUrl(filled)) as held:
            return held.store.lanes, held.store.behind_ms, held.empty

    number, (lanes, behind_ms, empty) = asyncio.run(work())
    assert {lane.number: lane.alive for lane in lanes}[number] is True
    assert [lane.alive for lane in lanes if lane.number != number] == [False] * (len(lanes) - 1)
    assert behind_ms == 0
    assert empty == {"segment", "history"}


def test_only_ddl_waits_for_the_snapshot(filled: str) -> None:
    with extract.hold_snapshot(SecretUrl(filled)):
        execute(filled, "UPDATE message SET route = 'x' WHERE id = 5")
        with pytest.raises(asyncpg.LockNotAvailableError):
            day = fetch(filled, "SELECT tableoid::regclass::text FROM message WHERE id = 5")[0][0]
            execute(filled, f"SET lock_timeout = '100ms'; DROP TABLE {day}")
    execute(filled, f"SET lock_timeout = '100ms'; DROP TABLE {day}")


def test_a_lost_snapshot_is_a_loss_of_the_store(spark: SparkSession, filled: str) -> None:
    with extract.hold_snapshot(SecretUrl(filled)) as held:
        frame = load(spark, filled, "held", snapshot=held.id)
    with pytest.raises(StoreLost) as raised, StageWatcher(spark, lambda *_: None)("reading"):
        frame.count()
    assert "run the job again" in raised.value.advice


# ---- the extract


def pack(url: str, after_days: int = 3) -> int:
    """Compact the messages due after this many days, and return their number."""

    async def work() -> int:
        async with sql(url) as connection:
            after_ms = await connection.fetchval("SELECT clock_timestamp()") + after_days * DAY_MS
            return sum(made.messages for made in await rows.compact(connection, after_ms, 400))

    return asyncio.run(work())


def messages(spark: SparkSession, where: str = "true") -> DataFrame:
    return spark.table("messages").where(where)


def test_messages_of_segments_are_messages(spark: SparkSession, filled: str, work: str) -> None:
    take(spark, filled, work + "/before")
    before = messages(spark).drop("kind", "segment").orderBy("id").collect()
    packed = pack(filled)
    assert packed > 500
    take(spark, filled, work + "/after")
    assert messages(spark, "kind = 'segment'").count() == packed
    assert messages(spark).drop("kind", "segment").orderBy("id").collect() == before
    segments = spark.table("segment").collect()
    assert sum(one.messages for one in segments) == packed
    assert all(one.packed_bytes > 0 and one.broken_ms is None for one in segments)


def test_broken_segments(spark: SparkSession, filled: str, work: str) -> None:
    packed = pack(filled)
    (broken, lost), *_ = fetch(filled, "SELECT id, messages FROM segment ORDER BY id")
    execute(
        filled, f"UPDATE segment SET packed = set_byte(packed, 300, get_byte(packed, 300) # 255) WHERE id = {broken}"
    )
    take(spark, filled, work)
    assert messages(spark, "kind = 'segment'").count() == packed - lost
    unpacked = spark.table("segment_message")
    assert [row.id for row in unpacked.where(f"segment = {broken}").collect()] == [None]


def test_neither_bodies_nor_headers_are_on_the_disk_of_the_job(spark: SparkSession, filled: str, work: str) -> None:
    found = take(spark, filled, work)
    assert found.whole
    assert spark.table("message_key").count() == 150
    assert messages(spark, "kind = 'held'").count() == 2
    assert not any(b"\x00" * 3000 in path.read_bytes() for path in Path(work).rglob("*.parquet"))


def test_an_empty_store(spark: SparkSession, database: str, work: str) -> None:
    async def prepare() -> None:
        async with opened(database):
            pass

    asyncio.run(prepare())
    found = take(spark, database, work)
    assert [spark.table(name).count() for name in ("messages", "segment", "message_key")] == [0] * 3
    assert len(found.lanes) == 4  # a new store has its lanes


def test_a_sample_reads_a_share(spark: SparkSession, database: str, work: str) -> None:
    fill(database, 20_000)
    assert not take(spark, database, work, sample=0.3).whole
    assert 0 < messages(spark).count() < 20_000


def test_the_workplace_is_private_and_goes(tmp_path: Path) -> None:
    place = tmp_path / "work"
    with pytest.raises(RuntimeError), extract.workplace(str(place)) as url:
        [made] = [path for path in place.iterdir() if path.is_dir()]  # the lock is a file next to it
        assert made.as_uri() == url
        assert made.stat().st_mode & 0o077 == 0
        (made / "file").write_text("x")
        raise RuntimeError
    assert list(place.iterdir()) == []
    with extract.workplace(None) as url:
        assert url.startswith("file:///")


def test_a_workplace_of_the_cluster_goes_too(spark: SparkSession, tmp_path: Path) -> None:
    with extract.workplace(tmp_path.as_uri(), spark) as url:
        spark.range(3).write.parquet(f"{url}/x")
        [made] = tmp_path.iterdir()
        assert made.stat().st_mode & 0o777 == 0o700, "keys, headers and destinations are in it"
    assert list(tmp_path.iterdir()) == []


def test_claimed_rows_are_still_waiting(spark: SparkSession, database: str, work: str) -> None:
    """A release in flight has committed nothing: its rows still count as waiting, and the law holds."""

    async def scene() -> int:
        async with opened(database) as store, owned(store, 1) as [lane]:
            now = store.now_upper_ms()
            await store.park(lane, [parcel(now - n) for n in range(10)], [])
            assert len(await lane.claimers[0].claim(MANY, ROOM)) == 10
            await asyncio.to_thread(take, spark, database, work)
            return await asyncio.to_thread(messages(spark).count)

    assert asyncio.run(scene()) == 10
