"""The surroundings of the publisher and consumer tests: a broker, an operator's tools for it, and a proxy in front of
it.

An in-memory broker replaces all three."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from unittest.mock import ANY
from urllib.parse import quote

import aio_pika

from delayer.amqp.address import Address
from delayer.amqp.errors import BrokerLost
from delayer.amqp.properties import encode_headers, entry, long_string
from delayer.amqp.values import Delivery, Outgoing
from delayer.broker.connection import ReconnectingConnection
from delayer.broker.consumer import AmqpConsumer
from delayer.broker.publisher import AmqpPublisher
from delayer.core.hold import Hold, HoldKind, Outcome, returned
from delayer.core.marks import ID
from delayer.core.publisher import Publisher
from delayer.intake.ports import Consumer, Subscription
from tests.support import reworded
from tests.support.memory_broker import MemoryBroker, MemoryConsumer, MemoryLink, MemoryPublisher
from tests.support.proxy import Proxy
from tests.support.servers import RabbitMQ

USER = "reconnecting-test"
GATHER = 0.02
BOUND = 1.0
"""Seconds that the publishers of these tests wait for confirms."""


class AdminHand:
    """An operator, with aio-pika and the management API: independent of the tested code."""

    def __init__(self, broker: RabbitMQ, vhost: str, channel: aio_pika.abc.AbstractChannel) -> None:
        self._broker = broker
        self._vhost = vhost
        self._channel = channel

    async def queue(self, name: str, arguments: Mapping[str, int | str] | None = None) -> None:
        await self._channel.declare_queue(name, durable=True, arguments=dict(arguments or {}))

    async def exchange(self, name: str, *, kind: str = "direct", internal: bool = False, to_q: str = "") -> None:
        """Declare an exchange, and bind the queue ``q`` to it by the key ``to_q``, if given."""
        await self._channel.declare_exchange(name, kind, durable=True, internal=internal)
        if to_q:
            await self.bind("q", name, to_q)

    async def bind(self, queue: str, exchange: str, key: str) -> None:
        bound = await self._channel.get_queue(queue, ensure=False)
        await bound.bind(exchange, key)

    async def delete_exchange(self, name: str) -> None:
        await self._channel.exchange_delete(name)

    async def delete_queue(self, name: str) -> None:
        await self._channel.queue_delete(name)

    async def drain(self, queue: str) -> list[bytes]:
        """Take every ready message. Returns their bodies."""
        found = await self._channel.get_queue(queue, ensure=False)
        taken = []
        while (one := await found.get(no_ack=True, fail=False)) is not None:
            taken.append(one.body)
        return taken

    async def watch(self, queue: str) -> list[tuple[bytes, float]]:
        """The bodies that arrive in a queue from now on, each with its time (epoch ms)."""
        arrived: list[tuple[bytes, float]] = []

        async def arrive(one: aio_pika.abc.AbstractIncomingMessage) -> None:
            arrived.append((one.body, time.time() * 1000))

        await (await self._channel.get_queue(queue, ensure=False)).consume(arrive, no_ack=True)
        return arrived

    async def forbid(self, *, write: str = ".*", topic: tuple[str, str] | None = None) -> None:
        """Let the publishers write only to matching exchanges, and only with matching keys to a topic exchange."""
        at = f"{quote(self._vhost, safe='')}/{USER}"
        permissions = {"configure": ".*", "write": write, "read": ".*"}
        await asyncio.to_thread(self._broker.api, "PUT", f"/api/permissions/{at}", permissions)
        if topic is not None:
            rule = {"exchange": topic[0], "write": topic[1], "read": ".*"}
            await asyncio.to_thread(self._broker.api, "PUT", f"/api/topic-permissions/{at}", rule)

    async def limit_connections(self, most: int) -> None:
        """Limit the vhost to this many connections."""
        at = f"/api/vhost-limits/{quote(self._vhost, safe='')}/max-connections"
        await asyncio.to_thread(self._broker.api, "PUT", at, {"value": most})

    async def alarm(self, on: bool) -> None:
        """Set or clear a resource alarm, which blocks every publisher."""
        await asyncio.to_thread(self._broker.ctl, "set_vm_memory_high_watermark", "0.0000001" if on else "0.4")


@asynccontextmanager
async def relay_to(address: Address) -> AsyncIterator[ReconnectingConnection]:
    reconnecting = ReconnectingConnection(lambda: [address], "reconnecting test", heartbeat=20, timeout=BOUND)
    reconnecting.start()
    try:
        yield reconnecting
    finally:
        await reconnecting.close()


@dataclass(frozen=True)
class World:
    """The parts of a test; ``publisher`` gives up after :data:`BOUND` seconds."""

    publisher: Publisher
    consumer: Consumer
    of_one: tuple[Consumer, Consumer]
    """Consumers of single-active-consumer queues, each on its own connection."""
    hand: AdminHand | MemoryHand
    network: Proxy | MemoryNetwork


class Place:
    """A vhost, and a user there whose permissions a test may revoke."""

    def __init__(self, broker: RabbitMQ, url: str) -> None:
        self.broker = broker
        self.url = url
        self.address = Address.parse(url)
        broker.add_user(USER, "secret", vhost=self.address.vhost, configure=".*", write=".*", read=".*")

    def behind(self, proxy: Proxy) -> Address:
        return Address.parse(self.broker.url(self.address.vhost, port=proxy.port, user=f"{USER}:secret"))

    @asynccontextmanager
    async def world(self, *queues: str) -> AsyncIterator[World]:
        async with (
            Proxy(self.broker.port) as proxy,
            await aio_pika.connect(self.url) as connection,
            await connection.channel() as channel,
            relay_to(self.behind(proxy)) as publishing,
            relay_to(self.behind(proxy)) as consuming,
        ):
            await asyncio.gather(publishing.connection(30), consuming.connection(30))
            hand = AdminHand(self.broker, self.address.vhost, channel)
            for name in queues:
                await hand.queue(name)
            publisher = AmqpPublisher(publishing, confirm_timeout=BOUND)
            of_one = AmqpConsumer(consuming, one_active=True), AmqpConsumer(publishing, one_active=True)
            yield World(publisher, AmqpConsumer(consuming), of_one, hand, proxy)


class MemoryHand:
    """An operator of a broker in memory."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    async def queue(self, name: str, arguments: Mapping[str, int | str] | None = None) -> None:
        self._broker.declare(name, arguments)

    async def exchange(self, name: str, *, kind: str = "direct", to_q: str = "") -> None:
        self._broker.bindings[name] = [("q", to_q)] if to_q else []

    async def delete_exchange(self, name: str) -> None:
        del self._broker.bindings[name]

    async def delete_queue(self, name: str) -> None:
        self._broker.delete(name)

    async def drain(self, queue: str) -> list[bytes]:
        ready = self._broker.queues[queue].ready
        return [ready.popleft().body for _ in range(len(ready))]

    async def watch(self, queue: str) -> list[tuple[bytes, float]]:
        arrived: list[tuple[bytes, float]] = []
        self._broker.queues[queue].watcher = lambda one: arrived.append((one.body, time.time() * 1000))
        return arrived

    async def alarm(self, on: bool) -> None:
        (self._broker.unblocked.clear if on else self._broker.unblocked.set)()


class MemoryNetwork:
    """The way to a broker in memory."""

    def __init__(self, link: MemoryLink) -> None:
        self.cut = link.cut
        self._link = link

    async def refuse(self) -> None:
        self._link.refuse()

    async def accept(self) -> None:
        self._link.accept()


class MemoryPlace:
    """A broker in memory."""

    @asynccontextmanager
    async def world(self, *queues: str) -> AsyncIterator[World]:
        link = MemoryLink(broker := MemoryBroker())
        for name in queues:
            broker.declare(name)
        first, *of_one = (MemoryConsumer(link) for _ in range(3))
        yield World(MemoryPublisher(link, BOUND), first, tuple(of_one), MemoryHand(broker), MemoryNetwork(link))


Either = Place | MemoryPlace


def message(token: object, key: str, exchange: str = "", body: bytes | None = None) -> Outgoing:
    """A message; its body is its token by default."""
    name = str(token).encode()
    properties = encode_headers(entry(ID, long_string(name)))
    return Outgoing(exchange.encode(), key.encode(), properties, name if body is None else body, name)


def no_route(outcome: Outcome) -> bool:
    return outcome == returned(312, "NO_ROUTE")


def codes(outcomes: Sequence[Outcome]) -> list[object]:
    """Each outcome as the broker's error code; other outcomes unchanged. A reworded message may have any code."""
    return [_code(one) if isinstance(one, Hold) else one for one in outcomes]


def _code(hold: Hold) -> object:
    if hold.text == reworded.TEXT and hold.kind in (HoldKind.CLOSED_CHANNEL, HoldKind.CLOSED_CONNECTION):
        return ANY
    code = re.search(r": (\d{3}) ", hold.text)
    return hold if code is None else int(code[1])


async def until_published(publisher: Publisher, batch: Sequence[Outgoing]) -> list[Outcome]:
    """Keep publishing until the broker is back, as the services do."""
    while True:
        try:
            return await publisher.publish(batch)
        except BrokerLost:
            continue


async def publish_all(publisher: Publisher, batch: Sequence[Outgoing]) -> list[Outcome]:
    """Publish in batches of the publisher's limit. Raises BrokerLost at the first batch without confirms."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(batch):
        outcomes += await publisher.publish(batch[len(outcomes) :][: publisher.batch_limit])
    return outcomes


async def take(subscription: Subscription, count: int, *, ack: bool = False) -> list[Delivery]:
    """Exactly that many deliveries. ``ack``: acknowledge each, for queues with a prefetch below ``count``."""
    found: list[Delivery] = []
    while len(found) < count:
        batch = await subscription.next_batch(count - len(found), GATHER)
        if batch and ack:
            subscription.ack(batch[-1].tag, multiple=True)
        found += batch
    return found


def bodies(deliveries: Sequence[Delivery]) -> list[bytes]:
    return [delivery.body for delivery in deliveries]


def numbered(numbers: Sequence[int]) -> list[bytes]:
    return [b"%d" % number for number in numbers]


async def until_subscribed(consumer: Consumer, queue: str) -> Subscription:
    while True:
        try:
            return await consumer.subscribe(queue, 100)
        except BrokerLost:
            continue
