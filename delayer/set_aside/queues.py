"""Queues of messages that wait for an operator: the refused queue, and the strays queue of native mode.

A pass consumes the queue, and acknowledges the messages that it published again or dropped. Afterwards the broker
returns the rest to their places.

Messages that stay are not acknowledged until the pass ends. When they fill the prefetch of the consumer, another
consumer receives the messages behind them. So a pass reaches every message, and adds only one to each delivery count of
a quorum queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from delayer.amqp.errors import BrokerLost, ChannelClosed, MalformedProperties, MalformedTable, ReplyCode
from delayer.amqp.properties import Properties
from delayer.amqp.values import Confirmed, Delivery, Outgoing
from delayer.broker.addresses import addresses_of
from delayer.broker.connection import ReconnectingConnection
from delayer.broker.consumer import AmqpConsumer, AmqpSubscription, FlowControl
from delayer.broker.errors import BrokerRefused, QueueMissing
from delayer.broker.management_api import Management, delayed_in
from delayer.broker.pipelined_admin import PipelinedAdmin, pipelined_admin
from delayer.broker.publisher import AmqpPublisher
from delayer.core.cascade import Cascade, leads_to, routing_key
from delayer.core.filters import OWN
from delayer.core.message import as_text
from delayer.format.envelope import Envelope, HoldNote, InvalidEnvelope, envelope_properties, read_envelope
from delayer.format.refusal import EntryPoints, RetryEdits, build_retry, read_refusal
from delayer.set_aside.messages import ANY, Result, Selection, SetAsideMessage

REFUSE_SECONDS: Final = 2.0
"""How long a retry waits for the daemon to refuse messages again that it still cannot delay. The daemon takes
milliseconds."""
PORTION: Final = 500
"""Messages that are published together. Each is acknowledged when it is confirmed."""
RETURN_SECONDS: Final = 2.0
"""How long a pass waits until its messages are back in the queue. Some may never be, because another consumer may take
them."""
MAX_LISTED: Final = 10_000
"""Maximum number of messages of a list, and the prefetch of one consumer."""
MAX_NAMED: Final = 20
"""Maximum number of remaining messages that are named. The rest are only counted."""
Add = Callable[[int], Awaitable[None]]
"""Adds a number of changed messages to the audit log."""
Publish = Callable[[Delivery, int], Outgoing | str]
"""Builds the publish that retries a message, or returns why there is none. The number is the maximum size of properties
in a frame."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """One of the two queues. All methods raise BrokerLost, BrokerRefused, QueueMissing."""

    url: str
    management_url: str | None
    queue: str
    _read: Callable[[Delivery, int], SetAsideMessage]
    _build_retry: Publish

    async def find(self, wanted: Selection = ANY, limit: int | None = None) -> Result:
        """List the messages that match among the first ``limit``, or among all. They stay in the queue."""
        async with self._pass(wanted, limit) as (reader, publisher, result):
            async for portion in reader:
                for _, one in await self._read_all(portion, publisher.max_properties):
                    if result.count_match(wanted, one) and len(result.found) < MAX_LISTED:
                        result.found.append(one)
        return result

    async def change(self, verb: str, wanted: Selection, add: Add, limit: int | None = None) -> Result:
        """Retry or drop (``verb``) the messages that match among the first ``limit``, or among all now in the queue.
        The audit log counts each message before it leaves the queue."""
        async with self._pass(wanted, limit) as (reader, publisher, result):
            async for portion in reader:
                read = await self._read_all(portion, publisher.max_properties)
                matching = [(delivery, one) for delivery, one in read if result.count_match(wanted, one)]
                whys = [""] * len(matching)
                if verb == "retry":
                    whys = await self._publish(publisher, [delivery for delivery, _ in matching])
                await add(whys.count(""))
                for (delivery, one), why in zip(matching, whys, strict=True):
                    if not why:
                        reader.ack(delivery)
                        result.changed += 1
                    elif len(result.remaining) < MAX_NAMED:
                        result.remaining.append((one, why))
        return result

    async def count_returned(self, retried: Result) -> int:
        """Wait for REFUSE_SECONDS, and return how many messages have come into the queue since the retry: those refused
        again, and new messages."""
        if not retried.changed:
            return 0
        await asyncio.sleep(REFUSE_SECONDS)
        return max((await self.find(limit=0)).depth + retried.changed - retried.depth, 0)

    async def _read_all(self, portion: Sequence[Delivery], most: int) -> list[tuple[Delivery, SetAsideMessage]]:
        read = list[tuple[Delivery, SetAsideMessage]]()
        for delivery in portion:
            read.append((delivery, self._read(delivery, most)))
            await asyncio.sleep(0)  # Other tasks take turns, because 128 kB of headers take some 0.1 s.
        return read

    async def _publish(self, publisher: AmqpPublisher, portion: Sequence[Delivery]) -> list[str]:
        """Publish messages again. Returns for each why it stays, or "" if its publish is confirmed."""
        prepared = list[Outgoing | str]()
        for delivery in portion:
            prepared.append(self._build_retry(delivery, publisher.max_properties))
            await asyncio.sleep(0)  # as in _read_all
        outcomes = iter(await publisher.publish([one for one in prepared if isinstance(one, Outgoing)]))
        # For each message the reason why it was not published, or else the outcome of its publish.
        whys = [one if isinstance(one, str) else next(outcomes) for one in prepared]
        return [why if isinstance(why, str) else "" if isinstance(why, Confirmed) else why.text for why in whys]

    @asynccontextmanager
    async def _pass(
        self, wanted: Selection, limit: int | None
    ) -> AsyncIterator[tuple[QueueReader, AmqpPublisher, Result]]:
        """Begin a pass through the first ``limit`` messages, or all."""
        async with pipelined_admin(self.url, f"delayer {self.queue}") as admin:
            depth, may_delay = (await admin.depths([self.queue]))[self.queue], admin.may_delay
        if isinstance(depth, ChannelClosed):
            if depth.code != ReplyCode.NOT_FOUND:
                raise BrokerRefused(f"queue {self.queue}: {depth}")
            raise QueueMissing(f'queue "{self.queue}" does not exist. Next: `delayer topology apply`.')
        management = Management.beside(self.url, self.management_url)
        delayed = (await delayed_in([self.queue], management))[self.queue] if may_delay else 0
        # Two connections: a paused consumer must not delay the confirms.
        connections = [
            ReconnectingConnection(partial(addresses_of, self.url), f"delayer {self.queue} {n}", heartbeat=20.0)
            for n in (1, 2)
        ]
        for connection in connections:
            connection.start()
        publisher = AmqpPublisher(connections[1])
        result = Result(depth, delayed, missing=set(wanted.ids), may_delay=may_delay)
        reader = QueueReader(connections[0], self.queue, depth if limit is None else min(limit, depth), result)
        try:
            try:
                yield reader, publisher, result
            finally:
                await reader.close()
            await _wait_until_returned(connections[0], self.queue, depth - result.changed)
        finally:
            await publisher.close()
            for connection in connections:
                await connection.close()


async def _wait_until_returned(reconnecting: ReconnectingConnection, queue: str, count: int) -> None:
    """Wait at most RETURN_SECONDS until the queue has ``count`` messages ready. A quorum queue may return messages a
    moment after the broker closed their channel, and the next pass would miss them."""
    with suppress(TimeoutError, BrokerLost):
        async with asyncio.timeout(RETURN_SECONDS):
            admin = PipelinedAdmin(await reconnecting.connection(RETURN_SECONDS), RETURN_SECONDS)
            while True:
                ready = (await admin.depths([queue]))[queue]
                if not isinstance(ready, int) or ready >= count:
                    return
                await asyncio.sleep(0.01)


class QueueReader:
    """Reads the first ``count`` messages of a queue, in portions. It does not read later messages, because a retried
    message may be refused and arrive again. If all wanted ids are delayer's own, which are unique, it stops once it has
    found them."""

    def __init__(self, connection: ReconnectingConnection, queue: str, count: int, result: Result) -> None:
        self._queue = queue
        self._count = count
        self._result = result
        self._are_ids_unique = bool(result.missing) and all(name.startswith(OWN) for name in result.missing)
        self._unsettled = 0
        self._consumer = AmqpConsumer(connection, flow_control=FlowControl())
        self._subscriptions: list[AmqpSubscription] = []

    async def __aiter__(self) -> AsyncIterator[list[Delivery]]:
        empty = 0
        while (left := self._count - self._result.looked) > 0:
            if self._are_ids_unique and not self._result.missing:
                return
            if not self._subscriptions or self._unsettled == MAX_LISTED:
                self._subscriptions.append(await self._consumer.subscribe(self._queue, min(left, MAX_LISTED)))
                self._unsettled = 0
            portion = await self._subscriptions[-1].next_batch(min(left, PORTION), 0.02)
            empty = 0 if portion else empty + 1
            if empty == 3:  # Each empty batch is a second without a delivery, so another consumer has the rest.
                self._result.unread = left
                return
            self._result.looked += len(portion)
            self._unsettled += len(portion)
            if portion:
                yield portion

    def ack(self, delivery: Delivery) -> None:
        """Acknowledge a message of the last portion."""
        self._subscriptions[-1].ack(delivery.tag, multiple=False)
        self._unsettled -= 1

    async def close(self) -> None:
        """Return the rest to the queue, after cancelling all consumers, so that none receives it again."""
        for subscription in self._subscriptions:
            await subscription.cancel()
        for subscription in self._subscriptions:
            await subscription.close()


def refused_queue(
    url: str, management_url: str | None, queue: str, entries: EntryPoints, edits: RetryEdits
) -> SetAside:
    """Return the refused queue. A retried message returns with ``edits`` to its exchange, one of ``entries``."""

    def read(delivery: Delivery, _max_properties: int) -> SetAsideMessage:
        return SetAsideMessage.refused(delivery, read_refusal(delivery, entries))

    return SetAside(url, management_url, queue, read, lambda one, limit: build_retry(one, entries, limit, edits))


def read_stray(delivery: Delivery, delivery_exchange: bytes, due_queue: bytes, max_properties: int) -> Envelope | str:
    """Read the envelope of a message in the strays queue. Returns the reason if it is not an envelope of ours.

    If a message left the cascade with a routing key that does not lead to the due queue, another publisher has put it
    there. Its headers are not delayer's, so ignore them.
    """
    if delivery.exchange == delivery_exchange and not leads_to(delivery.routing_key, due_queue):
        found = as_text(delivery.routing_key)
        return f"not an envelope of ours: expected a key that ends with {due_queue.decode()!r}, found {found!r}"
    try:
        return read_envelope(Properties.parse(delivery.properties), delivery.body, max_properties)
    except (InvalidEnvelope, MalformedProperties, MalformedTable) as broken:
        return f"not an envelope of ours: {broken}"


def strays_queue(url: str, management_url: str | None, cascade: Cascade, due_queue: bytes) -> SetAside:
    """Return the strays queue of ``cascade``. A retried message goes to the due queue, and the daemon publishes it
    immediately."""
    exchange = cascade.delivery.encode()

    def read(delivery: Delivery, max_properties: int) -> SetAsideMessage:
        return SetAsideMessage.stray(delivery, read_stray(delivery, exchange, due_queue, max_properties))

    def publish(delivery: Delivery, max_properties: int) -> Outgoing | str:
        one = read_stray(delivery, exchange, due_queue, max_properties)
        if isinstance(one, str):
            return one
        held = one.held and HoldNote(one.held.hold, 0, time.time_ns() // 1_000_000)
        properties = envelope_properties(one.parcel, one.id, held)
        return Outgoing(exchange, routing_key(0, due_queue), properties, one.parcel.body, one.id)

    return SetAside(url, management_url, cascade.strays, read, publish)
