"""A daemon's restoring over Postgres: ahead of time, shared, exact, and the handling of broken segments."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from delayer.core.counters import Counters
from delayer.core.message import Parcel
from delayer.core.segment import Locked, Restored
from delayer.core.units import DAY_MS
from delayer.store.admin.stats import overview
from delayer.store.restoring import POLL_SECONDS, SegmentRestorer
from delayer.store.rows import partitions
from tests.integration.lanes_shared import Process, running
from tests.support.place import compact_all, eventually
from tests.support.store import opened, owned, parcel, sql

HOUR_MS = 3_600_000


CUT_TWICE = """
CREATE SEQUENCE cuts;
CREATE FUNCTION cut() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF nextval('cuts') <= 2 THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER cut BEFORE DELETE ON segment FOR EACH STATEMENT EXECUTE FUNCTION cut()
"""
"""The first two restores lose their connections after the rows are written."""


def restorer(process: Process) -> tuple[SegmentRestorer, Counters]:
    """The restoring part of a daemon, and its counters."""
    counters = Counters()
    return SegmentRestorer(process.backlog, lambda: DAY_MS, counters), counters


@asynccontextmanager
async def restoring(url: str) -> AsyncIterator[Process]:
    """The part of a daemon that works on the store, with its restoring."""
    stopping = asyncio.Event()
    async with running(url) as process:
        task = asyncio.create_task(restorer(process)[0].run(stopping))
        try:
            yield process
        finally:
            stopping.set()
            await task


async def packed(url: str, parcels: Sequence[Parcel], rows: int = 10_000) -> int:
    """Park these, and pack them into segments. Return the number of segments."""
    async with opened(url) as store, owned(store) as [lane]:
        await store.park(lane, parcels, [])
    async with sql(url) as admin:
        return await compact_all(admin, rows)


async def now_ms(url: str) -> int:
    async with opened(url) as store:
        return store.now_upper_ms()


async def spoil(url: str) -> bytes:
    """Change a byte in the middle of a segment. Return its new bytes."""
    async with sql(url) as admin:
        found: bytes = await admin.fetchval(
            "UPDATE segment SET packed = set_byte(packed, length(packed) / 2, get_byte(packed, length(packed) / 2) # 1)"
            " WHERE id = (SELECT min(id) FROM segment) RETURNING packed"
        )
        return found


async def account(url: str) -> tuple[dict[str, int], int, int]:
    """The counters of all lanes, the waiting rows, and the messages in segments, after a check that they agree."""
    async with sql(url) as admin:
        rows = await admin.fetchval("SELECT count(*) FROM message")
        inside = await admin.fetchval("SELECT coalesce(sum(messages), 0) FROM segment")
    seen = await overview(url)
    assert seen.waiting == rows
    assert seen.counters["compacted"] - seen.counters["restored"] == inside == seen.segments.messages
    return seen.counters, rows, inside


async def test_segments_locked_by_another_process_are_polled_again(database: str) -> None:
    now = await now_ms(database)
    assert await packed(database, [parcel(now + HOUR_MS), parcel(now + 2 * HOUR_MS)], 1) == 2
    async with opened(database) as store, owned(store), sql(database) as another:
        await another.execute("BEGIN")
        await another.execute("SELECT FROM segment FOR UPDATE")
        assert await store.restore(now) is None
        assert await store.restore(now + DAY_MS) == Locked(now + HOUR_MS)
        await another.execute("ROLLBACK")
        found = [await store.restore(now + DAY_MS) for _ in range(3)]
    assert [type(one) for one in found] == [Restored, Restored, type(None)]


async def test_a_broken_segment_is_logged_once_and_does_not_block_others(database: str) -> None:
    now = await now_ms(database)
    parcels = [parcel(now - 3_000 + n, b"%d" % n) for n in range(300)]
    assert await packed(database, parcels, 100) == 3
    kept = await spoil(database)
    with capture_logs() as logged:
        async with running(database) as daemon:
            first, counters = restorer(daemon)
            assert [await first.poll() for _ in range(5)] == [0.0, 0.0, 0.0, POLL_SECONDS, POLL_SECONDS]
            await eventually(lambda: len(daemon.publisher.published) >= 200)
            assert counters.as_dict()["broken_segments"] == 1
        async with running(database) as daemon:
            later, counters = restorer(daemon)
            assert await later.poll() == POLL_SECONDS
            assert (counters.as_dict()["restored"], counters.as_dict()["broken_segments"]) == (0, 0)
    [said] = [line for line in logged if line["event"] == "segment broken"]
    assert "delayer restore --all" in said["next_step"]
    assert (said["log_level"], said["messages"], said["first_due_ms"]) == ("error", 100, now - 3_000)
    assert "the bytes changed" in said["reason"]
    seen = (await overview(database)).segments
    assert (seen.segments, seen.messages, seen.broken, seen.broken_messages) == (1, 100, 1, 100)
    assert seen.next_due_ms is None
    async with sql(database) as admin:
        [row] = await admin.fetch("SELECT id, packed, broken FROM segment")
        assert (row["packed"], row["broken"], row["id"]) == (kept, said["reason"], said["segment"])
    await account(database)


async def test_a_daemon_without_pyarrow_says_so_early(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await packed(database, [parcel(await now_ms(database) + 300 * DAY_MS)]) == 1
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with capture_logs() as logged:
        async with restoring(database):
            await eventually(lambda: "restoring interrupted" in [line["event"] for line in logged])
    [said] = [line for line in logged if line["event"] == "restoring interrupted"]
    assert (said["log_level"], "install delayer[segments]" in said["next_step"]) == ("error", True)
    assert (await account(database))[1:] == (0, 1)


async def test_a_restore_creates_the_partitions_of_its_rows(database: str) -> None:
    now = await now_ms(database)
    async with sql(database) as admin:
        days = {now // DAY_MS + ahead for ahead in (0, 1, 3)}
        await packed(database, [parcel(day * DAY_MS + DAY_MS - 1) for day in days])
        for day in await partitions.read_days(admin):
            await admin.execute(f"DROP TABLE {partitions.name_of(day)}")
        async with opened(database) as store, owned(store):
            assert isinstance(await store.restore(now + DAY_MS), Restored)
        assert await partitions.read_days(admin) >= days
        assert await admin.fetchval("SELECT count(*) FROM message_default") == 0


async def test_a_restore_begins_again_after_lost_connections(database: str) -> None:
    now = await now_ms(database)
    assert await packed(database, [parcel(now - n, b"%d" % n) for n in range(1_000)]) == 1
    async with sql(database) as admin:
        await admin.execute(CUT_TWICE)
        async with restoring(database) as daemon:
            await eventually(lambda: len(daemon.publisher.published) >= 1_000)
        assert await admin.fetchval("SELECT last_value FROM cuts") == 3
    counters, rows, inside = await account(database)
    assert (rows, inside, counters["released"], counters["restored"]) == (0, 0, 1_000, 1_000)


async def test_the_event_loop_is_not_blocked_while_a_large_segment_is_restored(database: str) -> None:
    """Decoding and encoding run in another thread. The bounds are wide, because the machine is busy with other work."""
    now = await now_ms(database)
    body = b'{"customer": %d, "items": [1, 2, 3], "text": "' + b"lorem ipsum dolor sit amet " * 30 + b'"}'
    made = await packed(database, [parcel(now + HOUR_MS + n, body % n) for n in range(20_000)])
    assert made >= 2
    gaps: list[float] = []

    async def watch() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()

    async with opened(database) as store, owned(store):
        await store.restore(now + DAY_MS)  # the first one loads pyarrow
        watching = asyncio.create_task(watch())
        began = time.perf_counter()
        for _ in range(made - 1):
            assert isinstance(await store.restore(now + DAY_MS), Restored)
        took = time.perf_counter() - began
        watching.cancel()
    gaps.sort()
    p99 = gaps[len(gaps) * 99 // 100]
    print(f"{made - 1} segments in {took:.3f} s; the loop's gaps: p99 {p99:.4f} s, longest {gaps[-1]:.4f} s")
    assert p99 < 0.1
    assert gaps[-1] < 0.5
