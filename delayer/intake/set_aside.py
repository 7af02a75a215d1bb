"""Queues of messages that wait for an operator: the refused queue, and the strays queue of native mode.

A look consumes the queue and acknowledges the messages that it published again or dropped. When it ends, the broker
returns the other messages to their places.

Messages that stay are not acknowledged, and fill the prefetch of their consumer. Then another consumer continues behind
them. So a look reaches every message, and each is delivered once: a quorum queue counts the deliveries.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from delayer.amqp import reading
from delayer.amqp.edits import Envelope, HoldNote, InvalidEnvelope, enveloped, opened
from delayer.amqp.errors import ChannelClosed, MalformedProperties, MalformedTable, ReplyCode
from delayer.amqp.properties import Properties
from delayer.broker.addresses import addresses_of
from delayer.broker.connection import ReconnectingConnection
from delayer.broker.consumer import AmqpConsumer, AmqpSubscription, FlowControl
from delayer.broker.errors import BrokerRefused, QueueMissing
from delayer.broker.management_api import Management, delayed_in, delayed_reason
from delayer.broker.pipelined_admin import PipelinedAdmin, pipelined_admin
from delayer.broker.publisher import AmqpPublisher
from delayer.core.cascade import Cascade, leads_to, routing_key
from delayer.core.errors import BrokerLost
from delayer.core.filters import OWN, names_of, own_name
from delayer.core.hold import Confirmed, Hold, HoldKind
from delayer.core.message import Delivery, Outgoing, Target, as_text
from delayer.core.readable import COUNTS_AGE
from delayer.intake.refusals import EntryPoints, Mend, Refusal, again, refusal_of

SETTLED: Final = 2.0
"""Seconds that the daemon has to refuse retried messages again. It needs milliseconds."""
AT_ONCE: Final = 500
"""Messages that are published together; each is acknowledged when it is confirmed."""
BACK: Final = 2.0
"""Seconds that a look waits for its messages to be back in the queue. Another consumer may have taken them."""
SetAsideName = Literal["refused", "strays"]
"""One of the two queues."""
KEPT: Final = 10_000
"""The most messages of a list, and the prefetch of one consumer."""
NAMED: Final = 20
"""Messages that stay and are named; the rest are counted."""
UNKNOWN: Final = Hold(HoldKind.RETURNED, "the broker found no queue for it at the end of the cascade")


class SetAsideMessage(NamedTuple):
    """A refused message or a stray, with the beginning of its body."""

    id: str
    """As operators write it; "" if the message has none."""
    message_id: str
    exchange: bytes | None
    """The exchange that it came in by; None if unknown."""
    place: str
    """For operators: where a refused message came in, or where a stray goes."""
    reason: str
    properties: bytes
    head: bytes
    size: int
    more: Mapping[str, Any]
    """The facts that only one of the two queues has, for programs."""

    @classmethod
    def refused(cls, delivery: Delivery, refusal: Refusal) -> SetAsideMessage:
        exchange, key = refusal.exchange, refusal.routing_key
        more = {
            "exchange": None if exchange is None else as_text(exchange),
            "routing_key": None if key is None else as_text(key),
        }
        place = "?" if exchange is None else reading.address(exchange, key or b"")
        names = refusal.id, refusal.message_id
        return cls(*names, exchange, place, refusal.reason, delivery.properties, *_head(delivery), more)

    @classmethod
    def stray(cls, delivery: Delivery, read: Envelope | str) -> SetAsideMessage:
        """``read``: its envelope, or why it has none."""
        if isinstance(read, str):
            more = _stray_facts(None, Target(b"", b""), b"", HoldNote(Hold(HoldKind.UNFIT, read), 0, None))
            return cls("", "", b"", "?", read, delivery.properties, *_head(delivery), more)
        parcel, held = read.parcel, read.held or HoldNote(UNKNOWN, 0, None)
        id, message_id = own_name(as_text(read.id)), as_text(reading.message_id(parcel.properties) or b"")
        place = reading.address(parcel.target.exchange, parcel.target.routing_key)
        more = _stray_facts(parcel.due_ms, parcel.target, parcel.route, held)
        content = parcel.properties, *_head(delivery)
        return cls(id, message_id, parcel.exchange, place, held.hold.text, *content, more)

    @property
    def names(self) -> frozenset[str]:
        """The ids that an operator may name it by."""
        return names_of(self.id, self.message_id)

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        read = reading.read(self.properties)
        return {
            "id": self.id,
            "message_id": self.message_id or None,
            **self.more,
            "properties": read.properties,
            "headers": [header._asdict() for header in read.headers],
            "reason": self.reason,
            "body_bytes": self.size,
            "body": reading.preview(self.head),
        }


def _head(delivery: Delivery) -> tuple[bytes, int]:
    """The beginning of the body, and its size."""
    # One byte more than is shown, so that a cut is seen. A copy, since a slice would keep the whole body in memory.
    return bytes(delivery.body[: reading.PREVIEW + 1]), len(delivery.body)


def _stray_facts(due_ms: int | None, to: Target, route: bytes, held: HoldNote) -> dict[str, Any]:
    return {
        "due_ms": due_ms,
        "to_exchange": as_text(to.exchange),
        "to_key": as_text(to.routing_key),
        "route": as_text(route),
        "attempts": held.attempts,
        "kind": held.hold.kind,
        "may_be_delivered": held.hold.may_be_delivered,
        "isolated": held.hold.isolated,
    }


class Selection(NamedTuple):
    """A filter of messages. Empty: all."""

    ids: frozenset[str] = frozenset()
    reason: str = ""
    exchange: str | None = None
    kind: str | None = None
    """That of a stray's hold. Refused messages have none."""

    def matches(self, one: SetAsideMessage) -> bool:
        named = not self.ids or not self.ids.isdisjoint(one.names)
        from_there = self.exchange is None or one.exchange == self.exchange.encode("utf-8", "surrogateescape")
        of_kind = self.kind in (None, one.more.get("kind"))
        return named and from_there and of_kind and self.reason in one.reason

    def as_dict(self) -> dict[str, Any]:
        """For the audit log."""
        given = {name: it for name, it in self._asdict().items() if it != self._field_defaults[name]}
        return given | ({"ids": sorted(self.ids)} if self.ids else {})


ANY: Final = Selection()


@dataclass(slots=True)
class Result:
    """The outcome of a look or a change. ``matched`` messages match, and ``found`` has the first KEPT of a list. A
    change took ``changed`` of them out of the queue; ``left`` has the first NAMED of the others, with the reason.
    ``missing``: ids without a message. ``looked``: how many of ``depth`` messages were read; ``unread`` ones did not
    come. ``delayed``: how many the broker itself delays, so that no look finds them; None: unknown. ``may_delay``:
    whether it delays any."""

    depth: int
    delayed: int | None = 0
    looked: int = 0
    unread: int = 0
    matched: int = 0
    changed: int = 0
    missing: set[str] = field(default_factory=set)
    found: list[SetAsideMessage] = field(default_factory=list)
    left: list[tuple[SetAsideMessage, str]] = field(default_factory=list)
    may_delay: bool = False

    def meets(self, wanted: Selection, one: SetAsideMessage) -> bool:
        """Whether this message matches; then count it."""
        if not wanted.matches(one):
            return False
        self.matched += 1
        self.missing -= one.names
        return True

    @property
    def hidden(self) -> str:
        """For people: what no look finds; "" if nothing. Messages that came since the broker counted are not known, so
        a look that found nothing says how old the count is."""
        if self.may_delay and self.delayed == 0 and not self.matched:
            return f"The broker itself delayed none there up to {COUNTS_AGE:.0f} s ago; later ones are not counted yet."
        why = delayed_reason(self.delayed)
        return f"The queue {why}." if why else ""

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        messages = [one.as_dict() for one in self.found]
        return {"depth": self.depth, "delayed": self.delayed, "hidden": self.hidden, "messages": messages}


Add = Callable[[int], Awaitable[None]]
"""Adds a number of changed messages to the audit log."""
Publish = Callable[[Delivery, int], Outgoing | str]
"""How a message is published again, or why it cannot be; with the most bytes of properties that fit a frame."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """One queue of such messages. All methods raise BrokerLost, BrokerRefused, QueueMissing."""

    url: str
    management_url: str | None
    queue: str
    _read: Callable[[Delivery, int], SetAsideMessage]
    _again: Publish

    async def look(self, wanted: Selection = ANY, limit: int | None = None) -> Result:
        """The messages that match among the first ``limit``, or among all. They stay in the queue."""
        async with self._reading(wanted, limit) as (reader, publisher, result):
            async for some in reader:
                for delivery in some:
                    one = self._read(delivery, publisher.max_properties)
                    if result.meets(wanted, one) and len(result.found) < KEPT:
                        result.found.append(one)
        return result

    async def change(self, verb: str, wanted: Selection, add: Add, limit: int | None = None) -> Result:
        """Publish again ("retry") or "drop" the messages that match among the first ``limit``, or among all that are
        there now. Each is added to the audit log before it leaves the queue."""
        async with self._reading(wanted, limit) as (reader, publisher, result):
            async for some in reader:
                read = [(delivery, self._read(delivery, publisher.max_properties)) for delivery in some]
                matching = [(delivery, one) for delivery, one in read if result.meets(wanted, one)]
                whys = [""] * len(matching)
                if verb == "retry":
                    whys = await self._publish(publisher, [delivery for delivery, _ in matching])
                await add(whys.count(""))
                for (delivery, one), why in zip(matching, whys, strict=True):
                    if not why:
                        reader.ack(delivery)
                        result.changed += 1
                    elif len(result.left) < NAMED:
                        result.left.append((one, why))
        return result

    async def returned(self, retried: Result) -> int:
        """How many of the retried messages are here again after SETTLED seconds. Others that came meanwhile count
        too."""
        if not retried.changed:
            return 0
        await asyncio.sleep(SETTLED)
        return max((await self.look(limit=0)).depth + retried.changed - retried.depth, 0)

    async def _publish(self, publisher: AmqpPublisher, some: Sequence[Delivery]) -> list[str]:
        """For each "" when it is confirmed, else the reason why it stays."""
        prepared = [self._again(one, publisher.max_properties) for one in some]
        outcomes = iter(await publisher.publish([one for one in prepared if isinstance(one, Outgoing)]))
        confirmed = Confirmed
        return [
            one if isinstance(one, str) else "" if isinstance(out := next(outcomes), confirmed) else out.text
            for one in prepared
        ]

    @asynccontextmanager
    async def _reading(
        self, wanted: Selection, limit: int | None
    ) -> AsyncIterator[tuple[QueueReader, AmqpPublisher, Result]]:
        """Read the first ``limit`` messages, or all."""
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
            await _until_back(connections[0], self.queue, depth - result.changed)
        finally:
            await publisher.close()
            for connection in connections:
                await connection.close()


async def _until_back(reconnecting: ReconnectingConnection, queue: str, count: int) -> None:
    """Wait until the queue has ``count`` messages ready, for BACK seconds at most. A quorum queue may return messages
    a moment after the broker closed their channel, and the next look would miss them."""
    with suppress(TimeoutError, BrokerLost):
        async with asyncio.timeout(BACK):
            admin = PipelinedAdmin(await reconnecting.connection(BACK), BACK)
            while True:
                ready = (await admin.depths([queue]))[queue]
                if not isinstance(ready, int) or ready >= count:
                    return
                await asyncio.sleep(0.01)


class QueueReader:
    """Reads the next ``count`` messages of a queue in portions, but none that arrive later: a retried message may be
    refused again. It stops when it has met every message that is named by an id of ours."""

    def __init__(self, connection: ReconnectingConnection, queue: str, count: int, result: Result) -> None:
        self._queue = queue
        self._count = count
        self._result = result
        self._unique = bool(result.missing) and all(name.startswith(OWN) for name in result.missing)
        self._kept = 0
        self._consumer = AmqpConsumer(connection, flow_control=FlowControl())
        self._subscriptions: list[AmqpSubscription] = []

    async def __aiter__(self) -> AsyncIterator[list[Delivery]]:
        empty = 0
        while (left := self._count - self._result.looked) > 0 and not (self._unique and not self._result.missing):
            if not self._subscriptions or self._kept == KEPT:
                self._subscriptions.append(await self._consumer.subscribe(self._queue, min(left, KEPT)))
                self._kept = 0
            some = await self._subscriptions[-1].next_batch(min(left, AT_ONCE), 0.02)
            empty = 0 if some else empty + 1
            if empty == 3:  # Three seconds; after that, another consumer has the rest.
                self._result.unread = left
                return
            self._result.looked += len(some)
            self._kept += len(some)
            if some:
                yield some

    def ack(self, delivery: Delivery) -> None:
        """Acknowledge a message of the last portion."""
        self._subscriptions[-1].ack(delivery.tag, multiple=False)
        self._kept -= 1

    async def close(self) -> None:
        """Return the rest to the queue, when no consumer would take it again."""
        for subscription in self._subscriptions:
            await subscription.cancel()
        for subscription in self._subscriptions:
            await subscription.close()


def refused_queue(url: str, management_url: str | None, queue: str, entries: EntryPoints, mend: Mend) -> SetAside:
    """The refused queue. A retried message goes back, mended, to its exchange, one of ``entries``."""

    def read(delivery: Delivery, _most: int) -> SetAsideMessage:
        return SetAsideMessage.refused(delivery, refusal_of(delivery, entries))

    return SetAside(url, management_url, queue, read, lambda delivery, most: again(delivery, entries, most, mend))


def stray(delivery: Delivery, delivery_exchange: bytes, due_queue: bytes, max_properties: int) -> Envelope | str:
    """The envelope in a message of the strays queue, or the reason why that message is not an envelope of ours.

    A message is its publisher's own if the cascade delivered it to another address than the due queue. Its headers do
    not matter then.
    """
    if delivery.exchange == delivery_exchange and not leads_to(delivery.routing_key, due_queue):
        found = as_text(delivery.routing_key)
        return f"not an envelope of ours: expected a key that ends with {due_queue.decode()!r}, found {found!r}"
    try:
        return opened(Properties.parse(delivery.properties), delivery.body, max_properties)
    except (InvalidEnvelope, MalformedProperties, MalformedTable) as broken:
        return f"not an envelope of ours: {broken}"


def strays_queue(url: str, management_url: str | None, cascade: Cascade, due_queue: bytes) -> SetAside:
    """The strays queue of ``cascade``. A retried message goes to the due queue, where the daemon tries it at once."""
    exchange = cascade.delivery.encode()

    def read(delivery: Delivery, most: int) -> SetAsideMessage:
        return SetAsideMessage.stray(delivery, stray(delivery, exchange, due_queue, most))

    def publish(delivery: Delivery, most: int) -> Outgoing | str:
        one = stray(delivery, exchange, due_queue, most)
        if isinstance(one, str):
            return one
        held = one.held and HoldNote(one.held.hold, 0, time.time_ns() // 1_000_000)
        properties = enveloped(one.parcel, one.id, held)
        return Outgoing(exchange, routing_key(0, due_queue), properties, one.parcel.body, one.id)

    return SetAside(url, management_url, cascade.strays, read, publish)
