"""What the suites of publishers and consumers stand on. Nothing here knows of frames.

``Hand`` is the hand of an operator at the broker, by another road than the one tested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from delayer.amqp.edits import ID
from delayer.amqp.properties import encode_headers, entry, long_string
from delayer.broker.ports import Consumer, Publisher, Subscription
from delayer.core.errors import BrokerLost
from delayer.core.message import ClosedChannel, ClosedConnection, Delivery, Outcome, Outgoing, Returned

GATHER = 0.02
Objection = Returned | ClosedChannel | ClosedConnection
"""What an outcome with a code of the broker's is."""
BOUND = 1.0
"""Seconds that the publishers of this suite wait for confirms."""


class Hand(Protocol):
    """At the broker."""

    async def queue(self, name: str, arguments: Mapping[str, int | str] | None = None) -> None: ...

    async def exchange(self, name: str, *, kind: str = "direct", internal: bool = False) -> None: ...

    async def bind(self, queue: str, exchange: str, key: str) -> None: ...

    async def delete_exchange(self, name: str) -> None: ...

    async def delete_queue(self, name: str) -> None: ...

    async def drain(self, queue: str) -> list[bytes]:
        """Take every message that is ready; their bodies."""

    async def forbid(self, *, write: str = ".*", topic: tuple[str, str] | None = None) -> None:
        """From now on, the publishers may write only to exchanges that match, and to such keys of a topic exchange."""

    async def alarm(self, on: bool) -> None:
        """A resource alarm, which blocks whoever publishes."""


class Network(Protocol):
    """Between the broker and who is tested."""

    def cut(self) -> None: ...

    async def refuse(self) -> None: ...

    async def accept(self) -> None: ...

    def stall(self, *, to_server: bool = True, to_client: bool = True) -> None: ...

    def resume(self) -> None: ...


@dataclass(frozen=True)
class World:
    """Everything that a test has; ``publisher`` gives up after :data:`BOUND` seconds."""

    publisher: Publisher
    consumer: Consumer
    hand: Hand
    network: Network


def message(token: object, key: str, exchange: str = "", body: bytes | None = None) -> Outgoing:
    """A message whose body is its token, if nothing else is said."""
    name = str(token).encode()
    properties = encode_headers(entry(ID, long_string(name)))
    return Outgoing(exchange.encode(), key.encode(), properties, name if body is None else body, name)


def no_route(outcome: Outcome) -> bool:
    return isinstance(outcome, Returned) and outcome.code == 312


async def until_published(publisher: Publisher, batch: Sequence[Outgoing]) -> list[Outcome]:
    """Publish as the services do: again, until the broker is back."""
    while True:
        try:
            return await publisher.publish(batch)
        except BrokerLost:
            continue


async def publish_all(publisher: Publisher, batch: Sequence[Outgoing]) -> list[Outcome]:
    """Publish as many at a time as the publisher wants. Raises BrokerLost as soon as some are in doubt."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(batch):
        outcomes += await publisher.publish(batch[len(outcomes) :][: publisher.batch_limit])
    return outcomes


async def take(subscription: Subscription, count: int) -> list[Delivery]:
    """Exactly that many deliveries."""
    found: list[Delivery] = []
    while len(found) < count:
        found += await subscription.next_batch(count - len(found), GATHER)
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
