"""Messages through the declared cascade on a real broker: on time, once, to their address; strays stop nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from delayer.broker.admin import Admin
from delayer.core.cascade import (
    KINDS,
    MAX_SECONDS,
    Cascade,
    delivery_binding,
    intake_topology,
    routing_key,
)
from delayer.core.topology import Queue, Topology, arguments

QUORUM = arguments({"x-queue-type": "quorum"})
BEGAN = "began"


@dataclass
class Inbox:
    """What arrived in one queue: body and seconds since it was published."""

    arrived: list[tuple[str, float]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, message: AbstractIncomingMessage) -> None:
        self.arrived.append((message.body.decode(), time.time() - float(str(message.headers[BEGAN]))))
        self.changed.set()
        await message.ack()

    async def holds(self, count: int) -> list[tuple[str, float]]:
        while len(self.arrived) < count:
            self.changed.clear()
            await self.changed.wait()
        return self.arrived

    def bodies(self) -> list[str]:
        return sorted(body for body, _ in self.arrived)


class Bench:
    """A declared cascade, addresses bound at its end, and a consumer on each."""

    def __init__(self, admin: Admin, channel: AbstractChannel, cascade: Cascade, inboxes: Mapping[str, Inbox]) -> None:
        self.admin, self.cascade, self.inboxes = admin, cascade, inboxes
        self._channel = channel

    async def send(self, seconds: int, address: str, body: str) -> None:
        message = aio_pika.Message(
            body.encode(), delivery_mode=aio_pika.DeliveryMode.PERSISTENT, headers={BEGAN: repr(time.time())}
        )
        exchange = await self._channel.get_exchange(self.cascade.entry(seconds), ensure=False)
        await exchange.publish(message, routing_key(seconds, address.encode()).decode(), mandatory=True)

    async def waiting(self) -> dict[str, int]:
        """Levels that hold messages."""
        depths = await self.admin.depths(level.name for level in self.cascade.levels())
        return {name: depth for name, depth in depths.items() if depth}

    async def reaches(self, depths: Mapping[str, int]) -> None:
        """Return when the queues hold these numbers."""
        while await self.admin.depths(depths) != depths:
            pass


@asynccontextmanager
async def bench(vhost: str, kind: str, *addresses: str) -> AsyncIterator[Bench]:
    cascade = Cascade(kind)  # type: ignore[arg-type]
    async with await aio_pika.connect(vhost) as connection, await Admin.connect(vhost) as admin:
        await admin.declare(cascade.topology() + Topology(queues=tuple(Queue(name, QUORUM) for name in addresses)))
        channel = await connection.channel(on_return_raises=True)
        inboxes = {}
        for name in addresses:
            assert await admin.bind_queue(name, cascade.delivery, delivery_binding(name))
            inboxes[name] = Inbox()
            await (await channel.get_queue(name)).consume(inboxes[name].take)
        yield Bench(admin, channel, cascade, inboxes)


@pytest.mark.parametrize("kind", KINDS)
async def test_messages_arrive_once_on_time_and_only_at_their_address(vhost: str, kind: str) -> None:
    delays = [0, 1, 2, 3]
    async with bench(vhost, kind, "sales.orders", "orders", "eu.sales.orders") as here:
        for seconds in delays:
            for number in range(5):
                await here.send(seconds, "sales.orders", f"{seconds} {number}")
        await here.send(3, "orders", "3 last")
        arrived = await here.inboxes["sales.orders"].holds(5 * len(delays))
        await here.inboxes["orders"].holds(1)
        assert await here.waiting() == {}
    for body, took in arrived:
        asked = int(body.split()[0])
        # Two clocks' roundings: the broker counts whole milliseconds.
        assert asked - 0.002 <= took < asked + 2, (body, took)
    assert here.inboxes["sales.orders"].bodies() == sorted(f"{s} {n}" for s in delays for n in range(5))
    assert here.inboxes["orders"].bodies() == ["3 last"], "and nothing of sales.orders"
    assert here.inboxes["eu.sales.orders"].bodies() == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seconds", [1 << 27, (1 << 27) + 1, MAX_SECONDS])
async def test_the_longest_delays_wait_in_level_27_and_nowhere_else(vhost: str, kind: str, seconds: int) -> None:
    async with bench(vhost, kind, "a") as here:
        await here.send(seconds, "a", "later")
        await here.reaches({here.cascade.level(27): 1})
        assert await here.waiting() == {here.cascade.level(27): 1}
    assert here.inboxes["a"].arrived == []


async def test_strays_are_set_aside_and_stop_nobody(vhost: str) -> None:
    """40 are more than the 32 that a level's dead-letter worker has in flight: without an alternate exchange, the five
    behind them would never arrive."""
    async with bench(vhost, "delayer", "good") as here:
        strays = here.cascade.strays
        await here.send(0, "nobody", "bad at once")
        for number in range(40):
            await here.send(1, "nobody", f"bad {number}")
        for number in range(5):
            await here.send(1, "good", f"good {number}")
        await here.inboxes["good"].holds(5)
        await here.reaches({strays: 41})
        assert await here.waiting() == {}
    assert here.inboxes["good"].bodies() == [f"good {number}" for number in range(5)]


@pytest.mark.parametrize("exchange", ["delayer.in", ""])
async def test_messages_that_expire_in_the_intake_queue_are_refused(vhost: str, exchange: str) -> None:
    async with await aio_pika.connect(vhost) as connection, await Admin.connect(vhost) as admin:
        await admin.declare(intake_topology())
        channel = await connection.channel()
        # A CC header would route an expired message to its own keys again, were the refused exchange not a fanout.
        message = aio_pika.Message(b"x", delivery_mode=2, expiration=0.05, headers={"CC": ["delays"]})
        await (await channel.get_exchange(exchange, ensure=False)).publish(message, "delays")
        while await admin.depths(["delays.refused"]) != {"delays.refused": 1}:
            pass
        assert await admin.depths(["delays"]) == {"delays": 0}
