"""A ledger of every message sent through delayer and every arrival: it finds lost, early, changed and repeated ones.

Publishes numbered messages (letters.py) over delayer's own wire, for speed, consumes the destination, and keeps the
account (account.py). It outlives its broker: it publishes unconfirmed messages again, under the same number.

    async with Ledger.open(url, random.Random(7)) as ledger:
        await ledger.publish(20_000)
        await ledger.all_back()
        ledger.verdict().assert_kept()
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

import aio_pika

from delayer.amqp.channel import Channel
from delayer.amqp.connection import Connection
from delayer.amqp.errors import BrokerLost
from delayer.amqp.values import CONFIRMED, Delivery, Outgoing
from delayer.core.marks import ID
from tests.support.account import Account, Arrival, Owed, Verdict
from tests.support.letters import NUMBER, Letter, Letters, doomed
from tests.support.proxy import Listener
from tests.support.readings import Readings

__all__ = ["Arrival", "Ledger", "Verdict"]

LONGEST_MS = 5_000
BATCH = 1_000
PREFETCH = 2_000
SORTS_FROM = 4
"""The first RabbitMQ that hands header tables over sorted by name."""
PAUSE = 0.2
"""Seconds between two tries to reach a broker that is away, or that has no queue for us."""


class Ledger:
    """Made by :meth:`open`. One publishing and one consuming connection to the broker, no proxy between."""

    def __init__(self, url: str, chance: random.Random, *, into: bytes, exchange: str, queue: str) -> None:
        self._url = url
        self._chance = chance
        self._letters = Letters(chance.getrandbits(64))
        self._into = into
        self._exchange = exchange
        self.queue = queue
        self.account = Account()
        self.doomed = 0
        """The number of published messages that the daemon must refuse."""
        self._news = asyncio.Event()
        self._publisher: Connection | None = None
        self._publishing: Channel | None = None
        self._turn = asyncio.Lock()
        self._sorts = False
        self._consumer: Connection | None = None
        self._channel: Channel | None = None
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        url: str,
        chance: random.Random,
        *,
        into: bytes = b"delayer.in",
        exchange: str = "delayer.out",
        queue: str = "ledger",
        consume: bool = True,
    ) -> AsyncIterator[Self]:
        """Declare the destination, and begin to consume it unless told to do so later."""
        ledger = cls(url, chance, into=into, exchange=exchange, queue=queue)
        await ledger.declare()
        try:
            if consume:
                await ledger.consume()
            yield ledger
        finally:
            if ledger._keeper is not None:
                ledger._keeper.cancel()
                await asyncio.wait([ledger._keeper])
            for connection in (ledger._publisher, ledger._consumer):
                if connection is not None:
                    await connection.close()

    async def declare(self) -> None:
        """Declare the destination exchange and a durable queue for all its messages. The queue is a classic one, which
        does not change a message when it delivers it again."""
        async with await aio_pika.connect(self._url) as connection:
            self._sorts = sorts_headers(connection)
            channel = await connection.channel()
            exchange = await channel.declare_exchange(self._exchange, aio_pika.ExchangeType.TOPIC, durable=True)
            queue = await channel.declare_queue(self.queue, durable=True, arguments=self.arguments())
            await queue.bind(exchange, "#")

    def arguments(self) -> dict[str, Any] | None:
        """The arguments of the destination queue."""
        return None

    async def publish(
        self,
        count: int,
        *,
        shortest_ms: int = 0,
        longest_ms: int = LONGEST_MS,
        delay_ms: int | None = None,
        absolute: bool | None = None,
        step_ms: int = 0,
        doomed_ones: int = 0,
    ) -> None:
        """Publish ``count`` more messages, and wait without limit until all are confirmed. Delays are random unless
        ``delay_ms`` is given; then each is ``step_ms`` longer than the one before. ``doomed_ones`` messages that the
        daemon must refuse follow each batch."""
        for start in range(0, count, BATCH):
            async with self._turn:
                # Take the time before building the batch, so that no message is due later than the account says.
                now_ms = int(time.time() * 1000)
                batch = []
                for number in range(start, min(start + BATCH, count)):
                    first = self._chance.randint(shortest_ms, longest_ms) if delay_ms is None else delay_ms
                    delay = first + number * step_ms
                    batch.append(self._compose(now_ms, delay, absolute))
                batch += [self._compose_doomed() for _ in range(doomed_ones)]
                await self._confirmed(batch)

    @asynccontextmanager
    async def silent(self) -> AsyncIterator[None]:
        """Hold back every publish in this context, including those already waiting for their turn."""
        async with self._turn:
            yield

    def _compose(self, now_ms: int, delay_ms: int, absolute: bool | None) -> Outgoing:
        """The next message; its arrival is now owed."""
        number = self.account.sent
        form = self._letters.form(number, absolute)
        self.account.owe(form, now_ms + delay_ms, delay_ms)
        letter = self.letter(number, self.account.owed(number))
        return Outgoing(self._into, letter.routing_key, letter.properties, letter.body, b"%d" % number)

    def letter(self, number: int, owed: Owed) -> Letter:
        """The message with this number. A subclass may add to it."""
        return self._letters.letter(number, *owed)

    def _compose_doomed(self) -> Outgoing:
        """The next message that the daemon must refuse."""
        number, self.doomed = self.doomed, self.doomed + 1
        one = doomed(number)
        return Outgoing(self._into, one.routing_key, one.properties, one.body, b"%d" % (-1 - number))

    async def _confirmed(self, batch: Sequence[Outgoing]) -> None:
        while batch:
            try:
                channel = await self._publish_channel()
            except BrokerLost:
                await asyncio.sleep(PAUSE)
                continue
            self.note_attempt(batch)
            try:
                outcomes = await channel.publish(batch, timeout=300.0)
            except BrokerLost:
                self.account.published_twice.update(int(message.token) for message in batch)
                await asyncio.sleep(PAUSE)
                continue
            batch = [message for message, outcome in zip(batch, outcomes, strict=True) if outcome != CONFIRMED]

    def note_attempt(self, batch: Sequence[Outgoing]) -> None:
        """Called before each attempt to publish these messages. A subclass may note the time."""

    async def _publish_channel(self) -> Channel:
        if self._publisher is None or self._publisher.closed.done():
            self._publisher = await Connection.open(self._url, name="ledger publish")
            self._publishing = None
        if self._publishing is None or self._publishing.closed.done():
            self._publishing = await self._publisher.channel(token_header=ID)
        return self._publishing

    def listener(self) -> Listener:
        """A listener for one connection that reads the intake queue. Give one to each such connection, or the account
        reports faults. See Readings."""
        if self.account.readings is None:
            self.account.readings = Readings(self._into)
        return self.account.readings.listener()

    async def consume(self) -> None:
        """Start consuming the destination, and restart whenever the broker comes back."""
        await self._consume()
        self._keeper = asyncio.create_task(self._keep_consuming())

    async def _keep_consuming(self) -> None:
        while True:
            assert self._channel is not None
            await asyncio.shield(self._channel.closed)
            while self._channel.closed.done():
                try:
                    await self._consume()
                except BrokerLost:
                    await asyncio.sleep(PAUSE)

    async def _consume(self) -> None:
        if self._consumer is None or self._consumer.closed.done():
            self._consumer = await Connection.open(self._url, name="ledger consume")
        self._channel = channel = await self._consumer.channel()
        await channel.qos(PREFETCH)
        loop = asyncio.get_running_loop()
        last = 0

        def flush() -> None:
            nonlocal last
            if not channel.closed.done():
                channel.ack(last, multiple=True)
            last = 0

        def on_delivery(delivery: Delivery) -> None:
            nonlocal last
            if not self._arrived(delivery, time.time() * 1000):
                channel.nack(delivery.tag, requeue=False)
                return
            if not last:
                loop.call_soon(flush)
            last = delivery.tag

        def on_cancelled() -> None:
            raise AssertionError("the ledger's queue was deleted")

        await channel.consume(self.queue, on_delivery, on_cancelled)

    def _arrived(self, delivery: Delivery, at_ms: float) -> bool:
        """Whether to acknowledge the delivery. Otherwise the ledger rejects it, and its queue dead-letters it."""
        self._news.set()
        number = NUMBER.unpack_from(delivery.body)[0] if len(delivery.body) >= NUMBER.size else -1
        if not 0 <= number < self.account.sent:
            self.account.changed.add(f"not a message of ours: {delivery}")
            return True
        return self.judge(number, delivery, at_ms)

    def judge(self, number: int, delivery: Delivery, at_ms: float) -> bool:
        """Note the arrival of that message. Whether to acknowledge it."""
        letter = self.letter(number, self.account.owed(number))
        gained = letter.gained(delivery.routing_key, delivery.properties, delivery.body, sorts=self._sorts)
        if gained is None:
            self.account.take_changed(number, at_ms, f"message {number}: sent {letter}, received {delivery}")
        else:
            arrival = Arrival(at_ms, gained.id, gained.due_ms, delivery.redelivered, gained.resorted)
            self.account.take(number, arrival)
        return True

    async def until(self, done: Callable[[], bool], *, timeout: float | None = 45.0) -> None:
        """Wait until ``done()``, which is called after every arrival. Raises AssertionError after ``timeout``."""
        if not await self.is_soon(done, timeout):
            verdict = self.verdict()
            assert not verdict.changed, f"{len(verdict.changed)} changed, the first: {verdict.changed[0]}; {verdict}"
            raise AssertionError(f"not within {timeout:g} s: {verdict}")

    async def is_soon(self, done: Callable[[], bool], seconds: float | None) -> bool:
        """Wait until ``done()``, at most so many seconds: whether it was. Without a verdict, which takes a second for
        each 100,000 messages."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not done():
                    self._news.clear()
                    await self._news.wait()
                return True
        return False

    async def all_back(self, *, timeout: float = 60.0) -> None:
        """Wait until every message sent so far has arrived at least once."""
        await self.until(lambda: self.account.back >= self.account.sent, timeout=timeout)

    async def drained(self) -> None:
        """Wait until every message of the destination queue has arrived here."""
        assert self._channel is not None, "consume first"
        while (await self.depths(self.queue))[self.queue]:
            self._news.clear()
            await self._news.wait()
        await self._channel.qos(PREFETCH)  # its answer arrives after the last delivery

    async def depths(self, *queues: str) -> dict[str, int]:
        """Messages ready in these queues, by the broker's own count."""
        async with await aio_pika.connect(self._url) as connection:
            channel = await connection.channel()
            found = {}
            for name in queues:
                queue = await channel.declare_queue(name, passive=True)
                found[name] = queue.declaration_result.message_count or 0
            return found

    @property
    def arrivals(self) -> Mapping[int, Sequence[Arrival]]:
        """All arrivals so far, by number."""
        account = self.account
        return {number: found for number in range(account.sent) if (found := account.arrivals_of(number))}

    def total(self) -> int:
        """Arrivals, copies included."""
        return self.account.arrived

    def verdict(self, standing: Mapping[str, int] | None = None) -> Verdict:
        """The account now; ``standing`` counts the messages left in refused, strays, held and so on."""
        return self.account.verdict(standing or {})


def sorts_headers(connection: aio_pika.abc.AbstractConnection) -> bool:
    """See RabbitMQ.sorts_headers; judged by the version in the broker's server properties."""
    assert connection.transport is not None
    version = connection.transport.connection.server_properties["version"]
    return int(version.partition(".")[0]) >= SORTS_FROM
