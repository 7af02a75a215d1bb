"""The law of the cascade: on the declared topology, the times waited in the levels add up to each delay. Every level
has exactly one route, and the path ends only at the address.

The interpreter implements fanout exchanges, alternate exchanges, TTL and dead lettering as described in the AMQP
specification and RabbitMQ's documentation. It is not aware of cascades. It matches topics like the audit.
"""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.broker.route_check import key_matches
from delayer.core.cascade import (
    CASCADE_KINDS,
    LEVELS,
    MAX_SECONDS,
    Cascade,
    delivery_binding,
    due_topology,
    routing_key,
)
from delayer.core.topology import Binding, Queue, Topology

ADDRESS = "sales.orders"
OTHERS = ("other.sales.orders", "orders", "sales", "sales.orders.x", "", "1.sales.orders", "0.sales.orders")


def matches(pattern: str, key: str) -> bool:
    """Whether ``pattern`` of a topic exchange matches ``key``.

    tests/conformance/test_topology_matching.py asks a broker the same questions.
    """
    return key_matches(pattern.encode(), key.encode())


class Interpreter:
    """Follows one message through the topology."""

    def __init__(self, topology: Topology) -> None:
        self.exchanges = {exchange.name: exchange for exchange in topology.exchanges}
        self.queues = {queue.name: queue for queue in topology.queues}
        self.bindings: dict[str, list[Binding]] = {name: [] for name in self.exchanges}
        for binding in topology.bindings:
            self.bindings[binding.source].append(binding)

    def run(self, exchange: str, key: str) -> tuple[list[tuple[str, int]], dict[str, int]]:
        """Return the last queue and the milliseconds waited for every copy, and the routes taken from each exchange."""
        ends: list[tuple[str, int]] = []
        crossings: dict[str, int] = {}
        arrivals = [(exchange, 0)]
        while arrivals:
            name, waited = arrivals.pop()
            taken = self._routes(name, key)
            crossings[name] = crossings.get(name, 0) + len(taken)
            if not taken and (alternate := dict(self.exchanges[name].arguments).get("alternate-exchange")):
                arrivals.append((str(alternate), waited))
            for binding in taken:
                if binding.destination_kind == "exchange":
                    arrivals.append((binding.destination, waited))
                    continue
                queue = self.queues[binding.destination]
                ttl = queue.argument("x-message-ttl")
                if ttl is None:
                    ends.append((queue.name, waited))
                else:
                    assert queue.argument("x-dead-letter-routing-key") is None
                    arrivals.append((str(queue.argument("x-dead-letter-exchange")), waited + int(ttl)))
        return ends, crossings

    def _routes(self, exchange: str, key: str) -> list[Binding]:
        everything = self.exchanges[exchange].type == "fanout"
        return [b for b in self.bindings[exchange] if everything or matches(b.key, key)]


@cache
def interpreter(kind: str) -> tuple[Cascade, Interpreter]:
    """The cascade, with the address and its neighbours bound at the end; the neighbours must not get messages."""
    cascade = Cascade(kind)  # type: ignore[arg-type]
    names = (ADDRESS, *OTHERS)
    bound = Topology(
        queues=tuple(Queue(f"q:{name}") for name in names),
        bindings=tuple(Binding(cascade.delivery, f"q:{n}", "queue", delivery_binding(n)) for n in names),
    )
    return cascade, Interpreter(cascade.topology() + bound)


def obey(kind: str, seconds: int) -> None:
    cascade, broker = interpreter(kind)
    ends, crossings = broker.run(cascade.entry(seconds), routing_key(seconds, ADDRESS.encode()).decode())
    assert ends == [(f"q:{ADDRESS}", seconds * 1000)]
    assert set(crossings.values()) == {1}
    # It enters at the highest set bit, passes every level below, and leaves.
    assert len(crossings) == max(seconds.bit_length(), 1) + 1


CORNERS = sorted(
    {0, MAX_SECONDS} | {(1 << bit) + step for bit in range(LEVELS) for step in (-1, 0, 1)} | {MAX_SECONDS - 1}
)


@pytest.mark.parametrize("kind", CASCADE_KINDS)
def test_the_law_at_every_power_of_two_and_next_to_it(kind: str) -> None:
    for seconds in CORNERS:
        obey(kind, seconds)


@pytest.mark.parametrize("kind", CASCADE_KINDS)
@given(seconds=st.integers(0, MAX_SECONDS))
def test_the_law_for_any_delay(kind: str, seconds: int) -> None:
    obey(kind, seconds)


@pytest.mark.parametrize("kind", CASCADE_KINDS)
@pytest.mark.parametrize("seconds", [0, 1, 5, MAX_SECONDS])
def test_entering_at_the_top_is_the_same_as_entering_at_the_highest_bit(kind: str, seconds: int) -> None:
    """Celery's own programs always publish to level 27."""
    cascade, broker = interpreter(kind)
    ends, _ = broker.run(cascade.level(27), routing_key(seconds, ADDRESS.encode()).decode())
    assert ends == [(f"q:{ADDRESS}", seconds * 1000)]


@pytest.mark.parametrize("address", [*OTHERS, "öl.lager", "a..b", ".", "*x.#y", "x" * 199])
def test_every_kind_of_address_gets_its_own_messages(address: str) -> None:
    cascade = Cascade()
    bound = Topology(
        queues=(Queue("end"), Queue("beside")),
        bindings=(
            Binding(cascade.delivery, "end", "queue", delivery_binding(address)),
            Binding(cascade.delivery, "beside", "queue", delivery_binding(ADDRESS)),
        ),
    )
    broker = Interpreter(cascade.topology() + bound)
    ends, _ = broker.run(cascade.entry(6), routing_key(6, address.encode()).decode())
    assert ends == [("end", 6000)]


def test_an_unbound_address_ends_in_the_strays_queue() -> None:
    cascade, broker = interpreter("delayer")
    ends, _ = broker.run(cascade.entry(3), routing_key(3, b"nobody").decode())
    assert ends == [("delayer.delay-strays", 3000)]


@pytest.mark.parametrize("kind", CASCADE_KINDS)
def test_the_daemons_own_queue_is_at_the_end(kind: str) -> None:
    cascade = Cascade(kind)  # type: ignore[arg-type]
    broker = Interpreter(cascade.topology() + due_topology(cascade))
    ends, _ = broker.run(cascade.entry(7), routing_key(7, b"delays.due").decode())
    assert ends == [("delays.due", 7000)]
