"""What a daemon remembers of messages does not grow with their content."""

from __future__ import annotations

import gc
import tracemalloc

from delayer.amqp.properties import encode_headers, entry, long_string, sized
from delayer.amqp.values import Delivery, Outgoing
from delayer.broker.circuit_breaker import CircuitBreaker, destination_of
from delayer.core.counters import Counters
from delayer.core.hold import unanswered
from delayer.core.marks import LAST_DUE, LoopWatch
from delayer.core.plan import Mode, Policy, Route
from delayer.intake.handle import classify
from tests.support.fakes import NOW

MESSAGES = 300
POLICY = Policy(Mode.STORE, {b"in": Route(b"in", b"")}, 10**12)
MAX = 131_052


def test_long_values_of_many_messages_do_not_stay_in_memory() -> None:
    breaker, loops, counters = CircuitBreaker(lambda: 0.0), LoopWatch(), Counters()

    def take(number: int) -> None:
        long = b"%d" % number * 20_000
        name = b"x-dela%d" % number
        copies = entry(b"CC", sized(b"A", long_string(long))) + entry(name[:250], long_string(long))
        raw = encode_headers(copies + entry(LAST_DUE, long_string(b"1")))
        one = Delivery(number, False, b"in", b"k%d" % number, raw, long)
        classify(one, POLICY, NOW, MAX)
        loops.returned(b"in", long, NOW, NOW)
        counters.add("parked", [b"in"])
        target = Outgoing(b"", b"k%d" % number, raw, b"", b"1")
        breaker.open(destination_of(target), unanswered(8, b"", target.routing_key))
        assert len(breaker.table) == number + 1

    tracemalloc.start()
    try:
        for number in range(MESSAGES):
            take(number)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < MESSAGES * 8_000
