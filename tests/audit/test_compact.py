"""Compact over Spark and restore, from end to end on a real store, and their command lines."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from delayer.audit import spark
from delayer.core.units import DAY_MS
from delayer.store.admin import actions
from delayer.store.rows.partitions import name_of
from delayer.store.segments import catalog, restore
from delayer.store.segments.compact import LARGEST
from tests.audit.compacting import COUNT, FEW, ROWS, bring_back, everything, filled, lawful, pack, run_delayer
from tests.support.json_shapes import check
from tests.support.place import compact_all
from tests.support.store import blocked, owned, parcel, sql

pytestmark = pytest.mark.deadline(300)


async def test_everything_goes_into_segments_and_comes_back_as_it_was(spark: SparkSession, database: str) -> None:
    async with filled(database) as store, sql(database) as admin:
        now = store.now_upper_ms()
        async with owned(store) as [lane]:
            near = [parcel(now + n * DAY_MS, b"near") for n in range(1, 7)]
            large = b"large" * (LARGEST // 5 + 1)
            await store.park(lane, [*near, parcel(now + 12 * DAY_MS, large)], [])
        before = await everything(database)
        days = await admin.fetchval("SELECT count(*) FROM pg_inherits WHERE inhparent = 'message'::regclass")
        done = await pack(spark, database)
        assert not done.lost and not done.broken
        assert (done.totals["messages"], await everything(database)) == (COUNT, before)
        counters = await lawful(database)
        assert (counters["compacted"], counters["restored"]) == (COUNT, 0)
        assert sorted(row["body"] for row in await admin.fetch("SELECT body FROM message")) == [large] + 6 * [b"near"]
        found = await catalog.list_segments(admin)
        assert done.totals["segments"] == len(found) >= COUNT / ROWS
        assert all(one.messages <= ROWS for one in found)
        # The large row keeps its day; the other days of the far future are gone.
        assert name_of((now + 12 * DAY_MS) // DAY_MS) in done.shrunk.vacuumed
        assert len(done.shrunk.dropped) >= 5
        left = await admin.fetchval("SELECT count(*) FROM pg_inherits WHERE inhparent = 'message'::regclass")
        assert left == days - len(done.shrunk.dropped)
        assert done.shrunk.bytes_after - len(large) < (done.shrunk.bytes_before - len(large)) / 3

        again = await pack(spark, database)
        assert (again.totals["messages"], again.shrunk.dropped) == (0, ())

        back = await bring_back(database)
        assert (back.messages, back.segments, back.gone, back.lost, back.broken) == (COUNT, len(found), 0, [], [])
        assert await everything(database) == before
        assert await catalog.list_segments(admin) == []
        counters = await lawful(database)
        assert (counters["compacted"], counters["restored"]) == (COUNT, COUNT)
        in_default = await admin.fetchval("SELECT count(*) FROM message_default")
        assert in_default == 0, "partitions are made before the rows come back"


async def test_a_part_of_the_segments_is_restored(database: str) -> None:
    async with filled(database), sql(database) as admin:
        before = await everything(database)
        await compact_all(admin, ROWS)
        back = await bring_back(database, within_ms=13 * DAY_MS)
        assert 0.3 * COUNT < back.messages < 0.8 * COUNT
        rest = await catalog.list_segments(admin)
        assert sum(one.messages for one in rest) == COUNT - back.messages
        assert await everything(database) == before
        await lawful(database)


async def test_a_broken_segment_is_reported_and_the_others_are_restored(database: str) -> None:
    async with filled(database, FEW), sql(database) as admin:
        count = await compact_all(admin, ROWS)
        await admin.execute(
            "UPDATE segment SET packed = set_byte(packed, 100, get_byte(packed, 100) # 255)"
            " WHERE id = (SELECT min(id) FROM segment)"
        )
        back = await bring_back(database)
        assert back.segments == count - 1
        assert len(back.broken) == 1
        [left] = await catalog.list_segments(admin)
        assert left.broken
        await lawful(database)


@pytest.mark.parametrize(("end", "gone"), [("commit", 1), ("rollback", 0)])
async def test_a_restore_waits_for_a_segment_of_another_process(database: str, end: str, gone: int) -> None:
    async with filled(database, FEW), sql(database) as admin, sql(database) as other:
        await compact_all(admin, ROWS)
        soonest, *_ = await catalog.list_segments(admin)
        transaction = other.transaction()
        await transaction.start()
        await restore.restore_one(other, catalog.FOREVER_MS)
        restoring = asyncio.create_task(bring_back(database))
        await blocked(admin, "%FROM segment%FOR UPDATE%")
        await getattr(transaction, end)()
        back = await restoring
        assert (back.gone, back.messages) == (gone, FEW - gone * soonest.messages)
        await lawful(database)


async def test_cancelled_messages_do_not_come_back(database: str) -> None:
    async with filled(database, FEW), sql(database) as admin:
        before = await everything(database)
        await compact_all(admin, ROWS)
        chosen = sorted(before)[::7]
        outcome = await actions.cancel(admin, chosen)
        assert set(outcome) == set(chosen)
        await lawful(database)
        await bring_back(database)
        assert set(await everything(database)) == set(before) - set(chosen)
        counters = await lawful(database)
        assert counters["cancelled"] == len(chosen)


def test_local_masters_get_retries() -> None:
    assert spark.with_retries(None) == "local[*,4]"
    assert spark.with_retries("local") == "local[1,4]"
    assert spark.with_retries("local[2]") == "local[2,4]"
    assert spark.with_retries("local[*]") == "local[*,4]"
    assert spark.with_retries("local[2,7]") == "local[2,7]"
    assert spark.with_retries("spark://host:7077") == "spark://host:7077"


async def test_the_commands(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with filled(database, FEW):
        before = await everything(database)
        code, told, _ = await run_delayer(database, "compact", "--dry-run", "--json")
        planned = json.loads(told)
        assert (code, planned["messages"], planned["large"], planned["segments"]) == (0, FEW, 0, 2)
        assert planned["keyed"] == FEW / 4
        assert planned["raw_bytes"] > FEW * 200
        assert 0 < planned["packed_bytes"] < planned["saved_bytes"] < planned["log_bytes"]
        code, told, wrong = await run_delayer(database, "compact", "--master", "local[2]", "--json")
        assert code == 0, wrong
        done = check("compact", told)
        assert done["messages"] == FEW
        assert abs(planned["packed_bytes"] - done["packed_bytes"]) < done["packed_bytes"] / 5
        assert done["disk_bytes"]["after"] < done["disk_bytes"]["before"]
        assert done["partitions"]["dropped"]
        code, told, wrong = await run_delayer(database, "compact")
        assert (code, "Nothing to pack." in told, wrong) == (0, True, ""), "and no Java is started for that"
        code, told, _ = await run_delayer(database, "restore", "--all", "--dry-run")
        assert code == 0
        assert told.startswith("2,000 messages in ")
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
        code, told, wrong = await run_delayer(database, "restore", "--all")
        assert (code, "2,000 messages of" in told, wrong) == (0, True, ""), "without Java"
        assert await everything(database) == before
        await lawful(database)


async def test_a_store_out_of_reach(empty_database: str) -> None:
    nowhere = re.sub(r":\d+/", ":1/", empty_database)
    for arguments in (["compact"], ["restore", "--all"]):
        code, told, wrong = await run_delayer(nowhere, *arguments)
        assert (code, told) == (3, "")
        assert wrong.startswith("delayer: the store is out of reach")
    code, told, wrong = await run_delayer(empty_database, "compact")
    assert code == 1
    assert "delayer db upgrade" in wrong


async def test_java_is_missing(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with filled(database, FEW):
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
        code, told, wrong = await run_delayer(database, "compact")
        assert (code, told) == (3, "")
        assert f"JAVA_HOME={tmp_path} has no bin/java" in wrong
