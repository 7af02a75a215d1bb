"""broker/circuit_breaker.py: closed, open, half-open, bounded."""

from __future__ import annotations

from delayer.amqp.properties import encode_headers, entry, long_string
from delayer.amqp.values import Outgoing
from delayer.broker.circuit_breaker import MANY, CircuitBreaker, Destination
from delayer.core.hold import Outcome, closed_channel, unanswered

X = b"x"


class Scene:
    def __init__(self, most: int = 100) -> None:
        self.now = 0.0
        self.breaker = CircuitBreaker(lambda: self.now, most=most)

    def opened(self, key: bytes, exchange: bytes = X) -> Outcome:
        said = unanswered(8, exchange, key)
        self.breaker.open(Destination(exchange, key), said)
        return said

    def sort(self, *messages: Outgoing) -> tuple[dict[int, Outcome], list[int]]:
        return self.breaker.partition(messages, range(len(messages)))


def to(key: bytes, exchange: bytes = X, properties: bytes = b"\0\0") -> Outgoing:
    return Outgoing(exchange, key, properties, b"", key)


def test_an_open_breaker_holds_only_its_messages() -> None:
    it = Scene()
    said = it.opened(b"bad")
    copy = encode_headers(entry(b"CC", long_string(b"elsewhere")))
    assert it.sort(to(b"good"), to(b"bad"), to(b"bad", b"y"), to(b"bad", properties=copy)) == ({1: said}, [])


def test_a_half_open_breaker_probes_with_one_batch_and_backs_off() -> None:
    it = Scene()
    said = it.opened(b"bad")
    pauses = []
    for _ in range(5):
        began = it.now
        while it.sort(to(b"bad"), to(b"bad")) == ({0: said, 1: said}, []):
            it.now += 1
        assert it.sort(to(b"bad")) == ({0: said}, [])  # a second batch, before the first is done
        pauses.append(it.now - began)
        it.opened(b"bad")
    assert pauses == [5, 10, 20, 30, 30]
    it.breaker.close(Destination(X, b"bad"))
    assert not it.breaker.table
    assert it.sort(to(b"bad")) == ({}, [])


def test_few_batches_wait_for_silent_queues() -> None:
    """One batch probes all half-open breakers that it meets; the next batch probes none."""
    it = Scene()
    for key in (b"a", b"b", b"c", b"d"):
        it.opened(key)
    it.now = 6
    assert it.sort(to(b"a"), to(b"b"))[1] == [0, 1]
    it.now = 6.1
    assert it.sort(to(b"c"), to(b"d"))[1] == []
    it.now = 12
    assert it.sort(to(b"c"), to(b"d"))[1] == [0, 1]


def test_keys_of_an_exchange_with_many_silent_ones_are_doubtful_until_they_answer() -> None:
    it = Scene()
    for number in range(MANY):
        assert it.sort(to(b"new")) == ({}, [])
        it.opened(b"%d" % number)
    assert it.sort(to(b"new"), to(b"new", b"y")) == ({}, [0])
    it.breaker.close(Destination(X, b"new"))
    assert it.sort(to(b"new"), to(b"newer")) == ({}, [1])
    it.now = 1000
    assert it.sort(to(b"newer")) == ({}, [])
    assert not it.breaker.table


def test_a_missing_exchange_holds_all_its_keys_for_a_second() -> None:
    it = Scene()
    said = closed_channel(404, "NOT_FOUND")
    it.breaker.open(Destination(X, None), said)
    assert it.sort(to(b"a"), to(b"b"), to(b"a", b"y")) == ({0: said, 1: said}, [])
    it.now = 1.5
    assert it.sort(to(b"a"), to(b"b")) == ({}, [0, 1])


def test_the_table_is_bounded() -> None:
    it = Scene(most=10)
    for number in range(1000):
        it.opened(b"%d" % number)
        it.breaker.close(Destination(X, b"other %d" % number))
    assert len(it.breaker.table) == 10
