"""A daemon's restoring over Postgres: ahead of time, shared, exact, and what becomes of a segment that is broken."""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Count
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from delayer.broker.ports import Lane, Store
from delayer.core.counters import Counters
from delayer.core.message import Outcome, Outgoing, Parcel
from delayer.core.segment import Broken, Locked, Restored
from delayer.release import restore as service
from delayer.release.lane_manager import LaneManager
from delayer.release.loop import Release
from delayer.release.restore import Restoring
from delayer.store.admin import actions
from delayer.store.admin.stats import overview
from delayer.store.postgres import PostgresStore
from delayer.store.rows import partitions
from delayer.store.rows.partitions import DAY_MS
from tests.acceptance.world import wait_for
from tests.conformance.store_contract import owned, parcel, release_all
from tests.faults.place import compact_all, eventually
from tests.integration.test_store_lane import cut, opened, sql
from tests.support.fakes import Heartbeat, ScriptedLive, ScriptedPublisher

HOUR_MS = 3_600_000
CONTENT = (b"", b"\0", bytes(range(256)), b'{"order": 1}' * 40, b"\xff" * 5_000)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayer.release.lane_manager.LOOK_SECONDS", 0.02)
    monkeypatch.setattr("delayer.release.loop.SLICE", 0.05)
    monkeypatch.setattr(service, "LOOK_SECONDS", 0.1)


class Witness(ScriptedPublisher):
    """Notes when everything was published, too."""

    def __init__(self) -> None:
        super().__init__()
        self.at_ms: dict[bytes, float] = {}

    async def publish(self, batch: Sequence[Outgoing]) -> list[Outcome]:
        self.at_ms |= {message.body: time.time() * 1000 for message in batch}
        return await super().publish(batch)


class Daemon:
    """The store's half of a daemon, and its restoring."""

    def __init__(self, url: str, ahead_ms: int = DAY_MS) -> None:
        self._url = url
        self.publisher = Witness()
        self.counters = Counters()
        self.lanes = LaneManager(self._release, heartbeat=Heartbeat(), counters=self.counters)
        self.lanes.configure(self._connect)
        self.restoring = Restoring(self.lanes, ahead_ms=lambda: ahead_ms, counters=self.counters)

    async def _connect(self) -> Store:
        return await PostgresStore.connect(self._url)

    def _release(self, lane: Lane) -> Release:
        return Release(lane, self.publisher, ScriptedLive(), heartbeat=Heartbeat(), counters=Counters())

    @property
    def restored(self) -> int:
        return self.counters.as_dict()["restored"]

    @property
    def broken(self) -> int:
        return self.counters.as_dict()["broken_segments"]


@asynccontextmanager
async def running(url: str, ahead_ms: int = DAY_MS) -> AsyncIterator[Daemon]:
    daemon, stopping, settled = Daemon(url, ahead_ms), asyncio.Event(), asyncio.Event()
    keeping = asyncio.create_task(daemon.lanes.run(settled))
    restoring = asyncio.create_task(daemon.restoring.run(stopping))
    try:
        await daemon.lanes.ready.wait()
        yield daemon
    finally:
        stopping.set()
        await restoring
        settled.set()
        await keeping


async def packed(url: str, parcels: Sequence[Parcel], rows: int = 10_000) -> int:
    """Park these, and pack them into segments; how many there are of them."""
    async with opened(url) as store, owned(store) as [lane]:
        await store.park(lane, parcels, [])
    async with sql(url) as admin:
        return await compact_all(admin, rows)


async def now_ms(url: str) -> int:
    async with opened(url) as store:
        return store.now_upper_ms()


async def spoil(url: str, segment: str = "(SELECT min(id) FROM segment)") -> bytes:
    """Change a byte in the middle of a segment; its bytes as they are now."""
    async with sql(url) as admin:
        found: bytes = await admin.fetchval(
            "UPDATE segment SET packed = set_byte(packed, length(packed) / 2, get_byte(packed, length(packed) / 2) # 1)"
            f" WHERE id = {segment} RETURNING packed"
        )
        return found


async def account(url: str) -> tuple[dict[str, int], int, int]:
    """The counters of all lanes, the rows that wait, and the messages in segments; they agree."""
    async with sql(url) as admin:
        rows = await admin.fetchval("SELECT count(*) FROM message")
        inside = await admin.fetchval("SELECT coalesce(sum(messages), 0) FROM segment")
    seen = await overview(url)
    assert seen.waiting == rows
    assert seen.counters["compacted"] - seen.counters["restored"] == inside == seen.segments.messages
    return seen.counters, rows, inside


async def test_a_row_is_the_row_it_was(database: str) -> None:
    """Everything about it, its id and the time that it was parked at included; only the lane may be another."""
    columns = "id, due_at, parked_at, checksum, format, route, exchange, routing_key, to_exchange, to_key, properties"
    question = f"SELECT {columns}, body, key FROM message ORDER BY id"
    now = await now_ms(database)
    parcels = [
        parcel(now + HOUR_MS * (n % 3), body, properties=body[:300], routing_key=body[:200], exchange=b"\xfe")
        for n, body in enumerate(CONTENT * 3)
    ]
    async with opened(database) as store, owned(store, 2) as [lane, other]:
        await store.park(lane, parcels, [])
        await store.park(other, [parcel(now + HOUR_MS, b"keyed", key=b"k")], [])
        async with sql(database) as admin:
            before = await admin.fetch(question)
            assert await compact_all(admin) == 1
            assert await admin.fetchval("SELECT count(*) FROM message") == 1, "rows with keys stay rows"
            found = await store.restore(now + DAY_MS)
            assert isinstance(found, Restored)
            assert (found.messages, found.first_due_ms) == (len(parcels), now)
            assert await admin.fetch(question) == before
            assert await admin.fetchval("SELECT count(*) FROM segment") == 0
            assert {row["lane"] for row in await admin.fetch("SELECT lane FROM message")} == {lane.number, other.number}
        assert await store.restore(now + DAY_MS) is None
    await account(database)


async def test_on_time_and_once(database: str) -> None:
    """Soon, late and later than the horizon."""
    now = await now_ms(database)
    due = {b"%d" % n: now + 2_500 + n % 700 for n in range(2_000)}
    late = {b"late %d" % n: now - HOUR_MS - n for n in range(1_000)}
    far = [parcel(now + 2 * DAY_MS + n, b"far %d" % n) for n in range(500)]
    near = [parcel(due_ms, body) for body, due_ms in (due | late).items()]
    made = await packed(database, [*near, *far], 500)
    assert made == 7
    async with running(database) as daemon:
        await wait_for(lambda: len(daemon.publisher.published) >= 3_000)
        assert daemon.restored == 3_000
        at_ms = daemon.publisher.at_ms
        assert {body: at_ms[body] >= due_ms for body, due_ms in due.items()} == dict.fromkeys(due, True), "early"
        assert max(at_ms[body] - due_ms for body, due_ms in due.items()) < 1_000, "late"
        assert Count(message.body for message in daemon.publisher.published) == Count([*due, *late])
    counters, rows, inside = await account(database)
    assert (rows, inside, counters["released"]) == (0, 500, 3_000)


async def test_two_daemons_share(database: str) -> None:
    now = await now_ms(database)
    parcels = [parcel(now + HOUR_MS + n, b"%d" % n) for n in range(4_000)]
    assert await packed(database, parcels, 100) == 40
    async with running(database) as one, running(database) as two:
        await wait_for(lambda: one.restored + two.restored >= 4_000)
        print(f"shared: {one.restored}, {two.restored}")
        assert one.restored
        assert two.restored
        assert one.restored + two.restored == 4_000
    counters, rows, inside = await account(database)
    assert (rows, inside, counters["restored"]) == (4_000, 0, 4_000)
    async with sql(database) as admin:
        assert await admin.fetchval("SELECT count(DISTINCT body) FROM message") == 4_000


async def test_segments_locked_by_another_process_are_looked_at_again(database: str) -> None:
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


async def test_a_broken_segment_is_said_once_and_stands_in_nobodys_way(database: str) -> None:
    now = await now_ms(database)
    parcels = [parcel(now - 3_000 + n, b"%d" % n) for n in range(300)]
    assert await packed(database, parcels, 100) == 3
    kept = await spoil(database)
    with capture_logs() as logged:
        async with running(database) as daemon:
            await wait_for(lambda: len(daemon.publisher.published) >= 200)
            await wait_for(lambda: daemon.broken >= 1)
            await asyncio.sleep(5 * service.LOOK_SECONDS)  # a time in which nothing must happen
            assert daemon.broken == 1
        async with running(database) as later:
            await asyncio.sleep(3 * service.LOOK_SECONDS)
            assert (later.restored, later.broken) == (0, 0), "it is no news"
    [said] = [line for line in logged if line["event"] == "segment broken"]
    assert "delayer restore --all" in said["next_step"]
    assert (said["log_level"], said["messages"], said["first_due_ms"]) == ("error", 100, now - 3_000)
    assert "checksum" in said["reason"]
    seen = (await overview(database)).segments
    assert (seen.segments, seen.messages, seen.broken, seen.broken_messages) == (1, 100, 1, 100)
    assert seen.next_due_ms is None
    async with sql(database) as admin:
        [row] = await admin.fetch("SELECT id, packed, broken FROM segment")
        assert (row["packed"], row["broken"], row["id"]) == (kept, said["reason"], said["segment"])
    await account(database)


async def test_one_whose_messages_are_there_already_is_broken(database: str) -> None:
    """It can never be restored: it must not be tried for ever, before all others."""
    now = await now_ms(database)
    assert await packed(database, [parcel(now + HOUR_MS, b"twin"), parcel(now + HOUR_MS + 1, b"other")], 1) == 2
    async with sql(database) as admin:
        await admin.execute(
            "INSERT INTO message (id, due_at, checksum, lane, format, route, exchange, routing_key, to_exchange,"
            " to_key, properties, body) SELECT first_id, first_due, 0, n, 1, '', '', '', '', '', '', '' FROM segment,"
            " generate_series(1, 2) AS n WHERE id = (SELECT min(id) FROM segment)"
        )
    async with opened(database) as store, owned(store, 2):
        found = [await store.restore(now + DAY_MS) for _ in range(3)]
    kinds = [type(one) for one in found]
    assert kinds == [Broken, Restored, type(None)], found


async def test_partitions_are_there_for_what_is_restored(database: str) -> None:
    now = await now_ms(database)
    async with sql(database) as admin:
        days = {now // DAY_MS + ahead for ahead in (0, 1, 3)}
        await packed(database, [parcel(day * DAY_MS + DAY_MS - 1) for day in days])
        for day in await partitions.existing(admin):
            await admin.execute(f"DROP TABLE {partitions.name_of(day)}")
        async with opened(database) as store, owned(store):
            assert isinstance(await store.restore(now + DAY_MS), Restored)
        assert await partitions.existing(admin) >= days
        assert await admin.fetchval("SELECT count(*) FROM message_default") == 0


async def test_a_daemon_that_loses_its_connections_in_the_middle_begins_again(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = await now_ms(database)
    assert await packed(database, [parcel(now - n, b"%d" % n) for n in range(1_000)]) == 1
    cuts: list[asyncio.Task[None]] = []

    def reach(point: str) -> None:
        if point == "restore.copied" and len(cuts) < 2:
            cuts.append(asyncio.create_task(cut(database, "delayer park")))

    monkeypatch.setattr("delayer.store.segments.catalog.reach", reach)
    monkeypatch.setattr("delayer.broker.retry.pause", lambda *_: 0.05)
    async with running(database) as daemon:
        await wait_for(lambda: len(daemon.publisher.published) >= 1_000)
        await asyncio.gather(*cuts)
        assert len(cuts) >= 1
    counters, rows, inside = await account(database)
    assert (rows, inside, counters["released"], counters["restored"]) == (0, 0, 1_000, 1_000)


async def test_the_event_loop_goes_on_while_a_large_segment_is_restored(database: str) -> None:
    """Decoding and encoding happen beside it. The bounds are wide, for this machine does other things as well."""
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


async def test_a_message_cancelled_meanwhile_does_not_come_back(database: str) -> None:
    now = await now_ms(database)
    assert await packed(database, [parcel(now - 5 + n, b"%d" % n) for n in range(5)]) == 1
    async with sql(database) as admin:
        ids = [row["id"] for row in await admin.fetch("SELECT generate_series(first_id, last_id) AS id FROM segment")]
        await actions.cancel(admin, ids[1:3])
    async with running(database) as daemon:
        await wait_for(lambda: len(daemon.publisher.published) >= 3)
    assert [message.body for message in daemon.publisher.published] == [b"0", b"3", b"4"]
    counters, rows, inside = await account(database)
    assert (rows, inside, counters["cancelled"], counters["restored"]) == (0, 0, 2, 5)


def bodies(rows: Sequence[Any]) -> list[bytes]:
    return [row.parcel.body for row in rows]


async def test_a_restored_row_behind_the_watermark_is_found_at_once(database: str) -> None:
    """The lane has released up to now; what comes back late is before that."""
    now = await now_ms(database)
    assert await packed(database, [parcel(now - 10 * DAY_MS, b"late")]) == 1
    async with opened(database) as store, owned(store) as [lane]:
        assert await release_all(lane) == []
        await store.restore(now + DAY_MS)
        # The owner hears of it by a notification, which arrives soon after the commit.
        await eventually(lane.sleep_hint, lambda hint: hint == 0.0)
        assert bodies(await release_all(lane)) == [b"late"]
