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
from delayer.store import statements
from delayer.store.inbox import InboxSubscription
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

    def subscribe(self, prefetch: int = 5_000) -> InboxSubscription:
        made = InboxSubscription(self, prefetch)  # type: ignore[arg-type]
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
        await send(app, 5, "x" * (5 << 20))
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
