"""A virtual host: its exchanges, queues and bindings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tests.simulation.broker.dead_letters import DeadLetters
from tests.simulation.broker.message import Message
from tests.simulation.broker.queue import Queue
from tests.simulation.broker.routing import PREDECLARED, Binding, Exchange, route
from tests.simulation.broker.wire import Code, Refusal

if TYPE_CHECKING:
    from tests.simulation.broker.broker import SimulatedBroker


class VirtualHost:
    def __init__(self, broker: SimulatedBroker, name: str) -> None:
        self.broker = broker
        self.name = name
        own = [Exchange("", "direct"), *(Exchange(key, kind) for key, kind in PREDECLARED.items())]
        self.exchanges = {one.name: one for one in own}
        self.queues: dict[str, Queue] = {}
        self.most_connections: float = float("inf")
        self.policies: dict[str, dict[str, Any]] = {}
        self._dead_letters: dict[Queue, DeadLetters] = {}

    def described(self, kind: str, name: str) -> str:
        return f"{kind} '{name}' in vhost '{self.name}'"

    def exchange(self, name: str) -> Exchange:
        """Raises Refusal."""
        if name not in self.exchanges:
            raise Refusal(Code.NOT_FOUND, f"no {self.described('exchange', name)}")
        return self.exchanges[name]

    def queue(self, name: str, owner: object = None) -> Queue:
        """The queue, for this connection. Raises Refusal."""
        queue = self.queues.get(name)
        if queue is None:
            raise Refusal(Code.NOT_FOUND, f"no {self.described('queue', name)}")
        if queue.exclusive not in (None, owner):
            text = (
                f"cannot obtain exclusive access to locked {self.described('queue', name)}. It could be originally "
                "declared on another connection or the exclusive property value does not match that of the original "
                "declaration."
            )
            raise Refusal(Code.RESOURCE_LOCKED, text)
        return queue

    def route(self, exchange: Exchange, message: Message) -> list[Queue]:
        """The queues that a message reaches."""
        if not exchange.name and len(message.keys) == 1:
            queue = self.queues.get(message.key.decode("utf-8", "surrogateescape"))
            return [] if queue is None else [queue]
        names = route(self.exchanges, exchange, message)
        return [self.queues[name] for name in names if name in self.queues]

    def targets(self, letter: Message) -> list[Queue]:
        """The queues that a dead letter reaches; none if its exchange is missing."""
        exchange = self.exchanges.get(letter.exchange.decode())
        return [] if exchange is None else self.route(exchange, letter)

    def dead_letters(self, queue: Queue) -> DeadLetters:
        if queue not in self._dead_letters:
            self._dead_letters[queue] = DeadLetters(queue)
        return self._dead_letters[queue]

    def bind(self, source: Exchange, binding: Binding) -> None:
        source.bindings[binding] = None

    def unbind(self, source: Exchange, binding: Binding) -> None:
        if source.bindings.pop(binding, binding) is None and source.auto_delete and not source.bindings:
            self.delete_exchange(source)

    def _unbind_destination(self, kind: str, name: str) -> None:
        for exchange in list(self.exchanges.values()):
            for binding in list(exchange.bindings):
                if (binding.kind, binding.destination) == (kind, name):
                    self.unbind(exchange, binding)

    def delete_exchange(self, exchange: Exchange) -> None:
        self.exchanges.pop(exchange.name, None)
        self._unbind_destination("exchange", exchange.name)

    def delete_queue(self, queue: Queue) -> int:
        """Returns how many messages were ready in it."""
        self.queues.pop(queue.name, None)
        self._unbind_destination("queue", queue.name)
        self._dead_letters.pop(queue, None)
        count, _ = queue.counts()
        queue.drop()
        return count

    def depths(self) -> Mapping[str, int]:
        """Messages ready in each queue, or on their way as dead letters: for a test, not for a client."""
        return {
            name: queue.counts()[0]
            + sum(len(one.unacked) for one in queue.consumers)
            + (self._dead_letters[queue].count if queue in self._dead_letters else 0)
            for name, queue in self.queues.items()
        }

    def die(self) -> None:
        """The node dies. Exclusive and transient queues are gone."""
        for queue in list(self.queues.values()):
            if queue.exclusive is not None or not queue.durable:
                self.delete_queue(queue)
            else:
                queue.die(lambda count: self.broker.chance(count + 1))
        for letters in self._dead_letters.values():
            letters.die()
        for exchange in list(self.exchanges.values()):
            if not exchange.durable:
                self.delete_exchange(exchange)

    def start(self) -> None:
        for queue in list(self.queues.values()):
            queue.start()
        for letters in list(self._dead_letters.values()):
            letters.start()
