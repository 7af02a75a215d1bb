"""Lanes are given back: their number does not grow with the restarts, and nothing is late or lost because of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from delayer.services import in_hand
from delayer.services import lanes as service
from delayer.services.counting import Counters
from delayer.services.lanes import Lanes
from delayer.services.ports import Lane, Store
from delayer.services.release import Portion, Release
from delayer.store import handover, outlook, partitions, session, statements
from delayer.store import lane as store_lane
from delayer.store.partitions import DAY_MS
from delayer.store.postgres import PostgresStore
from tests.acceptance.world import wait_for
from tests.conformance.store_contract import MANY, SOON_MS, bodies, claim_when_due, owned, parcel, release_all
from tests.integration.test_store_lane import opened, sql
from tests.rig.fakes import Pulse, ScriptedPublisher

HOUR_MS = 3_600_000
WANTED = 2


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LOOK_AROUND", 0.02)
    monkeypatch.setattr(in_hand, "TOGETHER", 1)  # however few messages are parked, each lane has its share
    monkeypatch.setattr("delayer.services.release.SLICE", 0.05)
    monkeypatch.setattr(store_lane, "FIRST_LOOK_SECONDS", 0.2)
    monkeypatch.setattr(store_lane, "LONGEST_SLEEP", 0.5)


class Daemon:
    """The store's half of a daemon."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.publisher = ScriptedPublisher()
        self.lanes = Lanes(self._connect, WANTED, self._release, pulse=Pulse(), counters=Counters())

    async def _connect(self) -> Store:
        return await PostgresStore.connect(self._url)

    def _release(self, lane: Lane) -> Release:
        return Release(lane, self.publisher, portion=Portion(), pulse=Pulse(), counters=Counters())

    def now_ms(self) -> int:
        now = self.lanes.now_ms()
        assert now is not None
        return now

    async def until(self, numbers: set[int]) -> None:
        await wait_for(lambda: set(self.lanes.numbers) == numbers)

    async def looked(self, times: int) -> None:
        """Until it has looked around so often, and found its own lanes in hand each time."""
        seen = self.lanes._complete
        await wait_for(lambda: self.lanes._complete >= seen + times)


@asynccontextmanager
async def running(url: str) -> AsyncIterator[Daemon]:
    daemon, stopping = Daemon(url), asyncio.Event()
    task = asyncio.create_task(daemon.lanes.run(stopping))
    try:
        await daemon.lanes.ready.wait()
        yield daemon
    finally:
        stopping.set()
        await task


async def migrated(url: str) -> None:
    async with opened(url):
        pass


async def in_store(url: str) -> list[int]:
    async with sql(url) as admin:
        return [number for (number,) in await admin.fetch("SELECT number FROM lane ORDER BY number")]


async def test_twenty_restarts_beside_a_living_daemon_make_no_lanes(database: str) -> None:
    """With a long backlog in every lane: what is due later stays free, and is owned by whoever comes."""
    await migrated(database)
    async with running(database) as living:
        mine = set(living.lanes.numbers)
        for turn in range(20):
            async with running(database) as other:
                far = [parcel(other.now_ms() + HOUR_MS + n, b"%d" % turn) for n in range(4)]
                await asyncio.gather(*(other.lanes.park([one], []) for one in far))
            await living.looked(3)
            assert set(living.lanes.numbers) == mine
        assert await in_store(database) == [1, 2, 3, 4]
    async with sql(database) as admin:
        assert await admin.fetchval("SELECT count(*) FROM message") == 80
        assert await admin.fetchval("SELECT count(DISTINCT lane) FROM message") == WANTED


async def test_restarts_beside_a_dense_backlog_make_no_lanes(database: str) -> None:
    """Something is always due within minutes: the lanes of who stops are adopted, and handed over to who comes back."""
    await migrated(database)
    async with running(database) as living:
        mine = set(living.lanes.numbers)
        for turn in range(5):
            async with running(database) as other:
                theirs = set(other.lanes.numbers)
                assert len(theirs) == WANTED
                assert not theirs & mine
                soon = [parcel(other.now_ms() + 60_000 + 1_000 * n, b"%d" % turn) for n in range(4)]
                await asyncio.gather(*(other.lanes.park([one], []) for one in soon))
            await living.until(mine | theirs)
            assert await in_store(database) == [1, 2, 3, 4]


async def test_who_asks_waits_a_moment_for_an_owner_that_does_not_answer(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner that looks at nothing keeps its spare lanes; the asker makes new ones, and asks no more."""
    monkeypatch.setattr(handover, "SECONDS", 0.3)
    async with opened(database) as store, opened(database) as newcomer:
        async with owned(store) as [lane]:
            await store.park(lane, [parcel(store.now_ms() + 60_000)], [])
        [spare] = await store.adopt(MANY)
        assert await store.wanted([spare.number]) == set()
        asking = asyncio.create_task(newcomer.own_lanes(1))
        await asked_for(store, {spare.number}, {spare.number})
        [new] = await asking
        assert new.number != spare.number
        await asked_for(store, {spare.number}, set())
        await new.release()
        await spare.release()


async def test_what_somebody_asks_for_is_not_adopted_by_a_third(database: str) -> None:
    async with opened(database) as store, opened(database) as newcomer, opened(database) as third:
        async with owned(store) as [lane]:
            await store.park(lane, [parcel(store.now_ms() + 60_000)], [])
        [spare] = await store.adopt(MANY)
        asking = asyncio.create_task(newcomer.own_lanes(1))
        await asked_for(store, {spare.number}, {spare.number})
        releasing = asyncio.create_task(spare.release())
        assert await third.adopt(MANY) == []
        [taken] = await asking
        assert taken.number == spare.number
        await releasing
        assert await third.wanted([taken.number]) == set(), "owned, and not spare any more"
        await taken.release()


async def test_a_lane_that_is_kept_is_offered_to_nobody(database: str) -> None:
    async with opened(database) as store, sql(database) as asker:
        async with owned(store) as [lane]:
            await store.park(lane, [parcel(store.now_ms() + 60_000)], [])
        [spare] = await store.adopt(MANY)
        await spare.keep()
        assert await handover.ask(asker, 5) == set()
        await spare.release()


async def test_a_question_ends_with_its_connection(database: str) -> None:
    """An asker that dies keeps no lane from those who adopt; test_handover_faults.py has those that hang."""
    async with opened(database) as store, sql(database) as asker:
        async with owned(store) as [lane]:
            await store.park(lane, [parcel(store.now_ms() + 60_000)], [])
        [spare] = await store.adopt(MANY)
        assert await handover.ask(asker, 5) == {spare.number}
        await spare.release()
        assert await store.adopt(MANY) == []
        asker.terminate()
        await asked_for(store, {spare.number}, set())
        [again] = await store.adopt(MANY)
        await again.release()


async def asked_for(store: PostgresStore, numbers: set[int], expected: set[int]) -> None:
    """Until so many of the lanes are asked for."""
    while await store.wanted(numbers) != expected:  # noqa: ASYNC110 - the locks of another session set no event
        await asyncio.sleep(0.01)


async def test_an_emptied_lane_is_let_go_and_owned_by_the_next(database: str) -> None:
    await migrated(database)
    async with running(database) as living:
        mine = set(living.lanes.numbers)
        async with running(database) as other:
            theirs = set(other.lanes.numbers)
            due_ms = other.now_ms() + 1_500
            for n in range(WANTED):
                await other.lanes.park([parcel(due_ms, b"%d" % n), parcel(due_ms + 2 * HOUR_MS)], [])
        await living.until(mine | theirs)
        assert living.now_ms() < due_ms, "adopted before the rows are due"
        await wait_for(lambda: len(living.publisher.published) >= WANTED)
        assert living.now_ms() < due_ms + 1_000
        await living.until(mine)
        async with running(database) as again:
            assert set(again.lanes.numbers) == theirs
        assert await in_store(database) == sorted(mine | theirs)
    async with sql(database) as admin:
        assert await admin.fetchval("SELECT count(*) FROM message") == WANTED


async def test_a_service_that_starts_again_owns_its_lanes_and_makes_none(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, with everything overdue: each has its share before anybody adopts."""
    monkeypatch.setattr(service, "LOOK_AROUND", 1.0)  # the patience is counted in looks
    await migrated(database)
    async with running(database) as one, running(database) as two, running(database) as three:
        for daemon in (one, two, three):
            await daemon.lanes.park([parcel(daemon.now_ms() + HOUR_MS)], [])
            await daemon.lanes.park([parcel(daemon.now_ms() + HOUR_MS)], [])
    async with sql(database) as admin:
        await admin.execute("UPDATE message SET due_at = now() - interval '1 minute'")
        await admin.execute("UPDATE lane SET watermark = '-infinity'")
    async with running(database) as one, running(database) as two, running(database) as three:
        numbers = [set(daemon.lanes.numbers) for daemon in (one, two, three)]
        assert sorted(map(len, numbers)) == [WANTED] * 3
        assert set.union(*numbers) == {1, 2, 3, 4, 5, 6}
        await wait_for(lambda: sum(len(each.publisher.published) for each in (one, two, three)) >= 6)


async def test_a_row_before_the_watermark_of_a_free_lane_is_found(database: str) -> None:
    """By the reading from the beginning, which comes first and then once a minute."""
    async with opened(database) as store, opened(database) as later, sql(database) as admin:
        async with owned(store) as [lane]:
            await store.park(lane, [parcel(store.now_ms() + HOUR_MS, b"moved")], [])
            await release_all(lane)
        assert await later.adopt(MANY) == []
        await admin.execute("UPDATE message SET due_at = now() - interval '1 hour'")
        assert await later.adopt(MANY) == [], "near the watermark only"
        later._taker._thorough_at = 0.0
        [adopted] = await later.adopt(MANY)
        assert bodies(await claim_when_due(adopted)) == [b"moved"]
        await adopted.release()


async def test_a_row_a_little_before_the_watermark_is_found_at_once(database: str) -> None:
    """A park that was under way when the watermark was written, and its daemon gone before it wrote another one."""
    async with opened(database) as store, sql(database) as admin:
        async with owned(store) as [lane]:
            await store.park(lane, [parcel(store.now_ms() - 5_000)], [])
        await admin.execute("UPDATE lane SET watermark = now()")
        store._taker._thorough_at = store._clock.monotonic() + 60.0
        [adopted] = await store.adopt(MANY)
        assert len(await claim_when_due(adopted)) == 1
        await adopted.release()


async def test_limits_are_apart(database: str) -> None:
    """A lane let go is not adopted again before some minutes have passed."""
    assert outlook.SOON_MS == SOON_MS
    assert outlook.IDLE_MS - 60_000 * 2 > outlook.SOON_MS
    async with opened(database) as store, owned(store) as [lane]:
        await store.park(lane, [parcel(store.now_ms() + outlook.IDLE_MS - 60_000)], [])
        await lane.look_back()
        assert not lane.idle
    async with opened(database) as store, owned(store) as [lane]:
        await lane.look_back()
        assert not lane.idle
        async with sql(database) as admin:
            await admin.execute("UPDATE message SET due_at = due_at + interval '10 minutes'")
        await lane.look_back()
        assert lane.idle
        lane._clock.observe(lane._clock.monotonic(), store.now_ms() + 540_000.0, lane._clock.monotonic())
        assert not lane.idle, "the store's clock was set forward: what was asked before says nothing"
    async with opened(database) as store:
        assert await store.adopt(MANY) == []


FILL = """
INSERT INTO message (due_at, checksum, lane, format, route, exchange, routing_key, to_exchange, to_key,
                     properties, body)
SELECT {due}, 0, 1 + n % 6, 1,
       'r', 'e', 'k', 'e', 'k', 'p', decode(repeat(md5(n::text), 16), 'hex')
FROM generate_series(1, {rows}) AS n
"""
_ROWS = {
    "now() + 38 * interval '1 day' * random()": 60_000,
    # The other partitions that are read: a table of one page would be read whole.
    "now() - 30 * interval '1 hour' * random()": 10_000,
    "now() + interval '500 days'": 10_000,
}


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


async def fill(admin: asyncpg.Connection, now_ms: int) -> None:
    today = now_ms // DAY_MS
    for day in range(today - 1, today + 40):
        await partitions.make(admin, day, today)
    for due, rows in _ROWS.items():
        await admin.execute(FILL.format(due=due, rows=rows))
    await admin.execute(
        "INSERT INTO held SELECT id, due_at, now(), now(), now(), 0, 1, lane, 1,"
        " '', '', '', '', '', '', '', NULL, '' FROM message LIMIT 5000"
    )


@pytest.mark.parametrize("analyzed", [True, False])
@pytest.mark.parametrize("from_the_beginning", [True, False])
async def test_looking_for_lanes_reads_an_entry_a_lane(database: str, analyzed: bool, from_the_beginning: bool) -> None:
    async with opened(database) as store, sql(database) as admin:
        async with owned(store, 6):
            await fill(admin, store.now_ms())
        if analyzed:
            await admin.execute("ANALYZE message")
            await admin.execute("ANALYZE held")
        horizon = store.now_ms() + outlook.SOON_MS
        start = session.BEGINNING_MS if from_the_beginning else horizon
        explain = f"EXPLAIN (ANALYZE, FORMAT JSON) {statements.LANES_DUE}"
        plan = json.loads(await admin.fetchval(explain, horizon, start))[0]["Plan"]
        seen = [node for node in nodes(plan) if node.get("Relation Name", "").startswith(("message", "held"))]
        assert {node["Node Type"] for node in seen} <= {"Index Scan", "Index Only Scan"}, seen
        assert len({node["Relation Name"] for node in seen}) <= 5
        assert all(node["Actual Rows"] <= 1 for node in seen), seen
