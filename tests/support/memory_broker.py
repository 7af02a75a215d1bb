"""A broker in memory, which behaves as RabbitMQ does for delayer (tests/conformance): for tests, and for simulations.

A :class:`MemoryBroker` has queues and exchanges; a daemon reaches it by a :class:`MemoryLink`, with consumers and
publishers. There are no threads and no randomness, and waiting uses the event loop's clock. An exchange knows bindings
by one routing key, or by ``#``; the default exchange exists.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from delayer.amqp.channel import seconds_until_due
from delayer.amqp.errors import BrokerLost
from delayer.amqp.framing import DEFAULT_FRAME_MAX, header_limit
from delayer.amqp.values import CONFIRMED, Delivery, Outgoing, Pace
from delayer.core.hold import NACKED, Outcome, closed_channel, returned

IDLE_SECONDS = 1.0


@dataclass(eq=False)
class Queued:
    """A message in a queue. ``number``: its place."""

    number: int
    exchange: bytes
    routing_key: bytes
    properties: bytes
    body: bytes
    redelivered: bool = False


@dataclass(eq=False)
class MemoryQueue:
    """A queue. With a single active consumer the first of its consumers gets the messages."""

    single_active: bool = False
    most: float = float("inf")
    """Maximum number of messages; it refuses more."""
    ready: deque[Queued] = field(default_factory=deque)
    consumers: list[MemorySubscription] = field(default_factory=list)
    watcher: Callable[[Queued], object] | None = None
    """Receives each message immediately, without acknowledgements."""

    @property
    def active(self) -> list[MemorySubscription]:
        return self.consumers[:1] if self.single_active else self.consumers

    def take(self, messages: Sequence[Queued]) -> None:
        """Put messages at their places, and deliver what can be delivered."""
        self.ready = deque(sorted([*self.ready, *messages], key=lambda one: one.number))
        while self.ready and self.watcher is not None:
            self.watcher(self.ready.popleft())
        while self.ready and (free := [one for one in self.active if one.room > 0]):
            least = max(free, key=lambda one: one.room)
            least.deliver(self.ready.popleft())


class MemoryBroker:
    """Queues, and exchanges with bindings."""

    def __init__(self) -> None:
        self.queues: dict[str, MemoryQueue] = {}
        self.bindings: dict[str, list[tuple[str, str]]] = {}
        """The bindings of each exchange: a queue and a routing key, or ``#``."""
        self.unblocked = asyncio.Event()
        """Cleared while a resource alarm blocks publishers."""
        self.unblocked.set()
        self.travel: Callable[[], Awaitable[None]] = self._at_once
        """Awaited on the way to the broker, and on the way back. A simulation delays there."""
        self._places = count()

    async def _at_once(self) -> None:
        await asyncio.sleep(0)

    def declare(self, name: str, arguments: Mapping[str, object] | None = None) -> None:
        """Create a queue if it is missing. Two arguments take effect; a full queue rejects."""
        asked = arguments or {}
        most = float(str(asked.get("x-max-length", "inf")))
        self.queues.setdefault(name, MemoryQueue(bool(asked.get("x-single-active-consumer")), most))

    def delete(self, name: str) -> None:
        """Delete a queue; its consumers are cancelled."""
        for subscription in tuple(self.queues.pop(name).consumers):
            subscription.end(f"the broker cancelled the consumer of queue {name!r}")

    def publish(self, message: Outgoing) -> Outcome:
        """Route a message to every queue that is bound for it."""
        exchange, key = message.exchange.decode(), message.routing_key.decode()
        if exchange and exchange not in self.bindings:
            return closed_channel(404, f"NOT_FOUND - no exchange '{exchange}'")
        bindings = self.bindings[exchange] if exchange else [(key, key)]
        names = {queue for queue, bound in bindings if bound in ("#", key)}
        queues = [self.queues[name] for name in sorted(names & self.queues.keys())]
        if not queues:
            return returned(312, "NO_ROUTE")
        free = [queue for queue in queues if len(queue.ready) < queue.most]
        for queue in free:
            queue.take([Queued(next(self._places), *message[:4])])
        return CONFIRMED if len(free) == len(queues) else NACKED


class MemoryLink:
    """The connections of one daemon to the broker. Also satisfies the store's BrokerLink."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker
        self.connects = 1
        self.subscriptions: list[MemorySubscription] = []
        self._up = True

    @property
    def current(self) -> object | None:
        return self.broker if self._up else None

    def cut(self) -> None:
        """Close all connections; they are reopened immediately. Publishes in flight are in doubt."""
        self.connects += 1
        for subscription in tuple(self.subscriptions):
            subscription.end("connection lost")

    def refuse(self) -> None:
        """Close all connections, and reject new ones."""
        self._up = False
        self.cut()

    def accept(self) -> None:
        self._up = True

    async def travel(self, connects: int = 0) -> None:
        """One way between daemon and broker. Raises BrokerLost if there is no connection, or a newer one."""
        await self.broker.travel()
        if not self._up or connects not in (0, self.connects):
            raise BrokerLost("connection lost")


class MemoryConsumer:
    """Satisfies intake.ports.Consumer."""

    def __init__(self, link: MemoryLink) -> None:
        self._link = link
        self._last: MemorySubscription | None = None

    @property
    def active(self) -> bool:
        return self._last is not None and self._last.active

    async def subscribe(self, queue: str, prefetch: int) -> MemorySubscription:
        await self._link.travel()
        if queue not in self._link.broker.queues:
            raise BrokerLost(f"404 NOT_FOUND - no queue '{queue}'")
        self._last = MemorySubscription(self._link, self._link.broker.queues[queue], prefetch)
        return self._last


class MemorySubscription:
    """Satisfies intake.ports.Subscription."""

    overrun = False

    def __init__(self, link: MemoryLink, queue: MemoryQueue, prefetch: int) -> None:
        self.prefetch = prefetch
        self._link = link
        self._queue = queue
        self._unsettled: dict[int, Queued] = {}
        self._buffer: deque[Delivery] = deque()
        self._tags = count(1)
        self._arrived = asyncio.Event()
        self._stopped = False
        self._lost = ""
        self._took_at = asyncio.get_running_loop().time()
        link.subscriptions.append(self)
        queue.consumers.append(self)
        queue.take([])

    @property
    def active(self) -> bool:
        """Whether the queue delivers to it."""
        return self in self._queue.active

    @property
    def room(self) -> int:
        """How many more deliveries the prefetch allows."""
        return self.prefetch - len(self._unsettled)

    @property
    def behind(self) -> bool:
        return bool(self._buffer)

    def deliver(self, message: Queued) -> None:
        tag = next(self._tags)
        self._unsettled[tag] = message
        if not self._stopped:
            parts = message.exchange, message.routing_key, message.properties, message.body
            self._buffer.append(Delivery(tag, message.redelivered, *parts))
            self._arrived.set()

    async def next_batch(self, limit: int, gather: float) -> list[Delivery]:
        await self._arrival(IDLE_SECONDS, 1)
        now = asyncio.get_running_loop().time
        if self._buffer:
            await self._arrival(self._took_at + gather - now(), min(limit, self.prefetch))
            self._took_at = now()
        if self._lost:
            raise BrokerLost(self._lost)
        return [self._buffer.popleft() for _ in range(min(limit, len(self._buffer)))]

    async def _arrival(self, seconds: float, wanted: int) -> None:
        """Wait until this many deliveries have arrived."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while len(self._buffer) < wanted and not self._lost:
                    self._arrived.clear()
                    await self._arrived.wait()

    def ack(self, tag: int, *, multiple: bool) -> None:
        for one in [one for one in self._unsettled if one == tag or (multiple and one < tag)]:
            del self._unsettled[one]
        self._queue.take([])

    def postpone(self, tags: Sequence[int]) -> bool:
        return False

    def stop(self) -> None:
        self._stopped = True
        self._buffer.clear()

    async def close(self) -> None:
        self.end("closed")

    def end(self, why: str) -> None:
        """Return unsettled deliveries to their places."""
        self._lost = self._lost or why
        self._arrived.set()
        self._buffer.clear()
        if self in self._queue.consumers:
            self._link.subscriptions.remove(self)
            self._queue.consumers.remove(self)
            returned_, self._unsettled = list(self._unsettled.values()), {}
            for message in returned_:
                message.redelivered = True
            self._queue.take(returned_)


class MemoryPublisher:
    """Satisfies core.publisher.Publisher."""

    max_properties = header_limit(DEFAULT_FRAME_MAX)
    batch_limit = 10_000

    def __init__(self, link: MemoryLink, confirm_timeout: float = 8.0) -> None:
        self._link = link
        self._timeout = confirm_timeout

    @property
    def ready(self) -> bool:
        return self._link.current is not None and self._link.broker.unblocked.is_set()

    async def publish(self, batch: Sequence[Outgoing], pace: Pace | None = None) -> list[Outcome]:
        if not batch:
            return []
        link, broker = self._link, self._link.broker
        try:
            async with asyncio.timeout(self._timeout + seconds_until_due(pace, -1)):
                await link.travel()
                await broker.unblocked.wait()
                connects = link.connects
                outcomes = []
                for index, message in enumerate(batch):
                    while left := seconds_until_due(pace, index):  # noqa: ASYNC110 - a clock
                        await asyncio.sleep(left)
                    if connects != link.connects:
                        raise BrokerLost("connection lost")
                    if pace is not None:
                        pace.written_ms[index] = pace.now_ms()
                    outcomes.append(broker.publish(message))
                if pace is not None:
                    pace.on_written()
                await link.travel(connects)
        except TimeoutError:
            raise BrokerLost("the broker blocks publishers") from None
        return outcomes

    async def close(self) -> None:
        return
