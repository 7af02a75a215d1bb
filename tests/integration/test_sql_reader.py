"""The reader of the SQL inbox against a real store: who reads, what a read costs, and what a stale reader cannot do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import pytest

from delayer.amqp.values import Delivery
from delayer.core.errors import StoreLost
from delayer.core.operations import Applied, Operation, fold
from delayer.store import inbox, statements
from delayer.store.admin import stats
from delayer.store.inbox import BATCH_BYTES, InboxSubscription, Postponed
from delayer.store.lanes.lane import PostgresLane
from delayer.store.lanes.session import LaneSession
from delayer.store.pool import INDEX_ONLY
from tests.support.place import eventually
from tests.support.store import Store, cut, opened, owned, parcel, sql


@dataclass
class Process:
    """A process with a store, as far as the reader needs it. The test says whether it owns the first lane."""

    store: Store
    lane: PostgresLane
    owns_first_lane: bool = True
    subscriptions: list[InboxSubscription] = field(default_factory=list)

    async def take_inbox(self, wake: Callable[[], None]) -> LaneSession | None:
        return await self.store.locks.take_inbox(wake)

    async def move(self, operations: Sequence[Operation], rows: Sequence[int]) -> Applied:
        return await self.store.apply(self.lane, fold(operations), self.lane.number, None, rows)

    def subscribe(self, prefetch: int = 5_000, postponed: Postponed | None = None) -> InboxSubscription:
        made = InboxSubscription(self, prefetch, postponed)  # type: ignore[arg-type]
        self.subscriptions.append(made)
        return made


@asynccontextmanager
async def process(url: str) -> AsyncIterator[Process]:
    async with opened(url) as store, owned(store, 1) as [lane]:
        made = Process(store, lane)
        try:
            yield made
        finally:
            for subscription in made.subscriptions:
                await subscription.close()


async def send(connection: asyncpg.Connection, count: int, body: str = "x") -> None:
    await connection.execute("SELECT delayer_send('k', $2) FROM generate_series(1, $1)", count, body)


async def read(subscription: InboxSubscription, limit: int = 2_000) -> list[Delivery]:
    return await subscription.next_batch(limit, 0.0)


async def unread(connection: asyncpg.Connection) -> int:
    return int(await connection.fetchval("SELECT count(*) FROM delayer_inbox"))


async def test_the_next_owner_waits_until_every_row_is_settled(database: str) -> None:
    async with process(database) as first, process(database) as second, sql(database) as app:
        one, other = first.subscribe(), second.subscribe()
        await send(app, 3)
        batch = await read(one)
        assert len(batch) == 3
        assert one.reading
        assert not await read(other)
        assert not other.reading
        first.owns_first_lane = False
        one.ack(batch[0].tag, multiple=False)
        await send(app, 2)
        assert not await read(one), "it reads no more"
        assert await unread(app) == 4
        assert not await read(other), "two rows are not settled"
        one.ack(batch[2].tag, multiple=True)
        assert not await read(one)
        assert not one.reading
        assert [len(delivery.body) for delivery in await read(other)] == [1, 1]


async def test_a_reader_whose_session_ended_cannot_move_what_another_one_moved(database: str) -> None:
    async with process(database) as first, process(database) as second, sql(database) as app:
        one, other = first.subscribe(), second.subscribe()
        await send(app, 2)
        stale = await read(one)
        await cut(database, "delayer inbox")
        batch = await eventually(lambda: read(other))
        now = first.store.now_upper_ms() + 60_000
        tags = [delivery.tag for delivery in batch]
        await other.move([parcel(now), parcel(now)], tags)
        with pytest.raises(StoreLost, match="another process has moved rows"):
            await one.move([parcel(now), parcel(now)], [delivery.tag for delivery in stale])
        assert await app.fetchval("SELECT count(*) FROM message") == 2
        assert not await unread(app)
        other.ack(tags[-1], multiple=True)
        with pytest.raises(StoreLost, match="is gone"):
            await read(one)


async def test_rows_in_flight_are_bounded_by_number_and_by_bytes(database: str) -> None:
    async with process(database) as first, sql(database) as app:
        subscription = first.subscribe(prefetch=10)
        await send(app, 30)
        batch = [*await read(subscription, 4), *await read(subscription), *await read(subscription)]
        assert len(batch) == 10
        assert not await read(subscription)
        subscription.ack(batch[-1].tag, multiple=True)
        assert len(await read(subscription)) == 10
        assert subscription.behind
    async with process(database) as first, sql(database) as app:
        await app.execute("DELETE FROM delayer_inbox")
        await send(app, 5, "x" * (BATCH_BYTES * 5 // 8))
        subscription = first.subscribe()
        assert [len(await read(subscription)) for _ in range(3)] == [2, 2, 1]


async def test_a_lost_session_is_a_lost_store_and_the_rows_come_again(database: str) -> None:
    async with process(database) as first, sql(database) as app:
        subscription = first.subscribe()
        await send(app, 3)
        assert len(await read(subscription)) == 3
        await cut(database, "delayer inbox")
        with pytest.raises(StoreLost):
            await read(subscription)
        await subscription.close()
        again = first.subscribe()
        assert [delivery.tag for delivery in await eventually(lambda: read(again))] == [1, 2, 3]


async def settle_all(subscription: InboxSubscription) -> int:
    count = 0
    while batch := await read(subscription):
        subscription.ack(batch[-1].tag, multiple=True)
        count += len(batch)
    return count


async def pages_of_a_read(connection: asyncpg.Connection, subscription: InboxSubscription) -> int:
    """The pages that the next read would touch."""
    plan = await connection.fetchval(
        f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statements.READ_INBOX}", *subscription._ranges.bounds, 2_000, 1 << 20
    )
    top: dict[str, Any] = json.loads(plan)[0]["Plan"]
    assert "Seq Scan" not in str(plan)
    return int(top["Shared Hit Blocks"]) + int(top["Shared Read Blocks"])


@pytest.mark.parametrize("held", ["a snapshot", "a writer"])
async def test_a_read_does_not_pass_the_dead_rows_of_the_past(database: str, held: str) -> None:
    """A transaction of another program keeps the vacuum from removing them. A writer also keeps ranges of ids open."""
    async with process(database) as first, sql(database) as app, sql(database) as other, sql(database) as admin:
        for name, value in INDEX_ONLY.items():
            await admin.execute(f"SET {name} = {value}")
        subscription = first.subscribe()
        await send(app, 1)
        assert await settle_all(subscription) == 1
        await other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM message")
        if held == "a writer":
            await send(other, 1)
        for _ in range(10):
            await send(app, 2_000)
            assert await settle_all(subscription) == 2_000
            rolled_back = app.transaction()
            await rolled_back.start()
            await send(app, 1)
            await rolled_back.rollback()
        assert await admin.fetchval("SELECT pg_relation_size('delayer_inbox') / 8192") > 200, "nothing was removed"
        await send(app, 1)
        assert await pages_of_a_read(admin, subscription) < 100
        assert await settle_all(subscription) == 1
        await other.execute("COMMIT")
        assert await settle_all(subscription) == (1 if held == "a writer" else 0)

        async def gaps() -> bool:
            await asyncio.sleep(0)
            await send(app, 1)
            assert await settle_all(subscription) == 1
            return subscription._ranges.has_gaps

        await eventually(gaps, lambda there: not there)


async def test_many_open_ranges_are_merged(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each transaction that is rolled back leaves one, while any program has an old transaction."""
    monkeypatch.setattr(inbox, "MOST_RANGES", 20)
    async with process(database) as first, sql(database) as app, sql(database) as slow, sql(database) as hung:
        subscription = first.subscribe()
        await hung.execute("BEGIN; SELECT pg_current_xact_id()")
        await app.execute("SELECT nextval('delayer_inbox_id_seq')")
        await send(app, 1)
        [stuck] = await read(subscription)
        for number in range(100):
            if number == 30:
                await slow.execute("BEGIN")
                await send(slow, 1, "slow")
            await app.execute("SELECT nextval('delayer_inbox_id_seq')")
            await send(app, 1)
            [delivery] = await read(subscription)
            subscription.ack(delivery.tag, multiple=False)
            assert len(subscription._ranges) <= 22
        await slow.execute("COMMIT")
        [late] = await read(subscription)
        assert late.body == b"slow"
        subscription.ack(stuck.tag, multiple=False)
        subscription.ack(late.tag, multiple=False)
        assert not await read(subscription)
        assert not await unread(app)


async def test_rows_with_ids_that_were_passed_are_found(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inserted by hand, or restored from a dump."""
    monkeypatch.setattr(inbox, "LOOK_SECONDS", 0.2)
    async with process(database) as first, sql(database) as app:
        subscription = first.subscribe()
        await send(app, 20)
        assert await settle_all(subscription) == 20

        async def closed() -> bool:
            await send(app, 1)
            assert await settle_all(subscription) == 1
            return not subscription._ranges.has_gaps

        await eventually(closed)
        await app.execute("""INSERT INTO delayer_inbox OVERRIDING SYSTEM VALUE
            SELECT id, now(), 'in', 'k', '{}', '{}', convert_to(id::text, 'UTF8') FROM unnest(ARRAY[3, 7]) AS id""")
        found = await eventually(lambda: read(subscription))
        assert [one.body for one in found] == [b"3", b"7"]
        assert not await read(subscription), "while rows are there, no id is read twice"
        subscription.ack(found[-1].tag, multiple=True)
        await send(app, 2)
        assert await settle_all(subscription) == 2
        assert not await unread(app)


async def test_an_inbox_is_unread_only_without_a_living_reader(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction may be older than any limit when it commits."""
    monkeypatch.setattr(stats, "_INBOX", stats._INBOX.replace("interval '30.0 s'", "interval '2 s'"))

    async def unread_ms() -> int:
        found = (await stats.overview(database)).inbox
        assert found is not None and found.messages == 1
        return found.unread_ms

    async with process(database) as first, sql(database) as app:
        await send(app, 1)
        await app.execute("UPDATE delayer_inbox SET sent_at = sent_at - interval '5 minutes'")
        assert await app.fetchval("SELECT pg_try_advisory_lock('delayer_inbox'::regclass::oid::int, 0)")
        assert await unread_ms() >= 300_000, "the lock is not a daemon's"
        await app.execute("SELECT pg_advisory_unlock_all()")
        subscription = first.subscribe()
        assert len(await read(subscription)) == 1
        assert await unread_ms() == 0
        assert subscription._session is not None
        async with subscription._session.turn:  # As if its process was frozen.
            assert await eventually(unread_ms) >= 300_000
        assert await eventually(unread_ms, lambda unread: unread == 0) == 0


async def test_postponed_rows_let_others_pass_and_come_again(database: str) -> None:
    """Any number of them, in any places, also those that a late transaction puts between them."""
    async with process(database) as one, sql(database) as app:
        postponed = Postponed()
        await send(app, 7, "bad")
        for _ in range(3):
            subscription = one.subscribe(3, postponed)
            batch = await read(subscription)
            if batch:
                assert subscription.postpone([row.tag for row in batch])
                assert not subscription.overrun
            await subscription.close()
        assert len(postponed.ids) == 7
        await app.execute("DELETE FROM delayer_inbox WHERE id = 4")
        await app.execute(
            "INSERT INTO delayer_inbox (id, exchange, routing_key, headers, properties, body) OVERRIDING SYSTEM VALUE"
            " VALUES (4, 'e', 'k', '{}', '{}', 'late'), (8, 'e', 'k', '{}', '{}', 'good')"
        )
        postponed.ids.discard(4)
        passing = one.subscribe(3, postponed)
        batch = await read(passing)
        assert [row.body for row in batch] == [b"late", b"good"]
        passing.ack(batch[-1].tag, multiple=True)
        await read(passing)
        assert await unread(app) == 6
        postponed.until = 0.0
        assert passing.overrun
        await passing.close()
        assert [row.body for row in await read(one.subscribe())] == [b"bad"] * 6


async def test_too_many_postponed_rows_are_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "MOST_POSTPONED", 3)
    postponed = Postponed()
    assert postponed.add([1, 2], 0.0, more=False)
    assert not postponed.add([3, 4], 5.0, more=True)
    assert (postponed.ids, postponed.is_over(inbox.POSTPONE_SECONDS)) == ({1, 2}, True)


async def test_new_postponed_rows_do_not_keep_the_first_ones_waiting() -> None:
    """Only rows that are still to be read do, because a pass over many takes longer than POSTPONE_SECONDS."""
    postponed = Postponed()
    for id_, now in ((1, 0.0), (2, 6.0), (3, 9.0)):
        assert postponed.add([id_], now, more=False)
    assert not postponed.is_over(inbox.POSTPONE_SECONDS - 1)
    assert postponed.is_over(inbox.POSTPONE_SECONDS)
    assert postponed.add([4], 9.0, more=True)
    assert not postponed.is_over(inbox.POSTPONE_SECONDS)


async def test_rows_with_many_headers_are_read_a_few_at_a_time(database: str) -> None:
    """Decoding them takes so long that the store would end the sessions of a daemon that read them all."""
    many = "(SELECT jsonb_build_object('h', jsonb_agg('{}'::jsonb)) FROM generate_series(1, 16200))"
    async with process(database) as one, sql(database) as app:
        await app.execute(f"SELECT delayer_send('k', ''::bytea, headers => {many}) FROM generate_series(1, 30)")
        subscription, counts = one.subscribe(), []
        while batch := await read(subscription):
            counts.append(len(batch))
            assert subscription.behind or sum(counts) == 30
        assert max(counts) < 10
        assert sum(counts) == 30
        # A read looks at many more rows than it returns, so it must not find out the length of their JSON.
        plan = await app.fetch(f"EXPLAIN (VERBOSE) {statements.READ_INBOX}", [0], [1 << 60], 2000, BATCH_BYTES)
        assert not [line for (line,) in plan if "octet_length" in line or "headers)" in line]


async def test_a_read_ends_at_its_limit_before_the_last_range(database: str) -> None:
    async with opened(database) as store, sql(database) as other:
        await send(other, 5_000)
        ends = list(range(0, 5_001, 5))
        given = ends[:-1], ends[1:], 40, BATCH_BYTES
        assert [row["id"] for row in await other.fetch(statements.READ_INBOX, *given)] == [
            id_ for id_ in range(1, 51) if id_ % 5
        ]
        session = await store.locks.take_inbox(lambda: None)
        assert session is not None
        plan = await session.connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {statements.READ_INBOX}", *given)
        assert scanned(json.loads(plan)[0]["Plan"]) < 50
        await session.close()


def scanned(plan: dict[str, Any]) -> int:
    """How many ranges of the inbox a plan has read."""
    loops = plan["Actual Loops"] if plan.get("Relation Name") == "delayer_inbox" else 0
    return loops + sum(map(scanned, plan.get("Plans", [])))
