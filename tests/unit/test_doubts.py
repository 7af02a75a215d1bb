"""Which destinations are tried aside, for how long, and which answers are remembered."""

from __future__ import annotations

import pytest

from delayer.broker import doubts as module
from delayer.broker.doubts import FINE, MANY, STUCK, SUSPECTED, Destination, Doubt, Doubts, Known, destination
from delayer.core.message import CONFIRMED, Outgoing
from delayer.wire.properties import encode_headers, entry, long_string

ONE, OTHER = Destination(b"x", b"k"), Destination(b"x", b"l")


def message(token: bytes = b"1", *, body: bytes = b"body", copies: bytes | None = None) -> Outgoing:
    headers = [] if copies is None else [entry(b"CC", long_string(copies))]
    return Outgoing(b"x", b"k", encode_headers(*headers) if headers else b"\0\0", body, token)


def test_nothing_is_doubted() -> None:
    it = Doubts()
    assert not it.any(0.0)
    assert it.of(ONE) is None


def test_suspected_for_a_while_or_until_it_answers() -> None:
    it = Doubts()
    it.suspect(ONE, 0.0)
    it.suspect(OTHER, 1.0)
    assert it.any(2.0)
    assert (it.of(ONE), it.of(OTHER)) == (Doubt.SUSPECTED, Doubt.SUSPECTED)
    it.answered(OTHER, 2.0)
    assert it.of(OTHER) is None
    assert not it.any(SUSPECTED)
    assert it.of(ONE) is None


def test_where_a_connection_ended_only_a_suspicion_does() -> None:
    it = Doubts()
    it.suspect(ONE, 0.0)
    it.stuck(OTHER, 0.0)
    for one in (ONE, OTHER):
        it.unsuspect(one, 1.0)
    assert it.any(2.0)
    assert (it.of(ONE), it.of(OTHER)) == (None, Doubt.STUCK)


def test_stuck_for_longer_and_again_with_every_finding() -> None:
    it = Doubts()
    it.suspect(ONE, 0.0)
    it.stuck(ONE, 1.0)
    it.suspect(ONE, 2.0)
    assert it.any(SUSPECTED + 1)
    assert it.of(ONE) is Doubt.STUCK
    it.stuck(ONE, 100.0)
    assert it.any(STUCK + 50)
    assert it.of(ONE) is Doubt.STUCK
    assert not it.any(STUCK + 100)
    assert it.of(ONE) is None


def test_where_keys_name_orders_the_others_of_the_exchange_are_doubtful_too() -> None:
    it = Doubts()
    for number in range(MANY):
        assert it.of(OTHER) is None
        it.stuck(Destination(b"x", b"%d" % number), 0.0)
        it.stuck(Destination(b"x", b"%d" % number), 0.0)  # counts once
    assert it.of(OTHER) is Doubt.BESIDE
    assert it.of(Destination(b"y", b"l")) is None
    it.answered(OTHER, 0.0)
    assert it.of(OTHER) is None
    it.any(FINE)
    assert it.of(OTHER) is Doubt.BESIDE
    it.answered(Destination(b"x", b"0"), FINE)
    assert it.of(Destination(b"x", b"m")) is None
    it.any(STUCK)
    assert it.of(OTHER) is None


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 5)
    it, known = Doubts(), Known(60.0)
    for number in range(20):
        it.suspect(Destination(b"s", b"%d" % number), 0.0)
        it.stuck(Destination(b"x", b"%d" % number), 0.0)
        it.answered(Destination(b"x", b"fine %d" % number), 0.0)
        known.note(message(b"%d" % number), CONFIRMED, 0.0)
    sizes = [len(it._suspected), len(it._stuck), len(it._fine), len(known._outcomes), it._of_exchange[b"x"]]
    assert max(sizes) <= 5, sizes
    assert it.of(Destination(b"x", b"19")) is Doubt.STUCK


def test_what_is_not_meant_is_not_looked_into() -> None:
    it = Doubts()
    assert not it.meant()(message())
    it.suspect(OTHER, 0.0)
    assert not it.meant()(message())
    it.suspect(Destination(b"x", b"k", b"copies"), 0.0)
    assert it.meant()(message())
    it.answered(Destination(b"x", b"k", b"copies"), 0.0)
    assert not it.meant()(message())
    for number in range(MANY):
        it.stuck(Destination(b"x", b"%d" % number), 0.0)
    assert it.meant()(message())
    assert not it.meant()(message()._replace(exchange=b"y"))


def test_copies_lead_elsewhere() -> None:
    assert destination(message()) == Destination(b"x", b"k")
    assert destination(message(copies=b"a")) != destination(message())
    assert destination(message(copies=b"a")) != destination(message(copies=b"b"))
    broken = message()._replace(properties=b"\x20\0\0\0\0\x09abc")
    assert destination(broken) == Destination(b"x", b"k")


def test_an_outcome_is_that_of_this_very_message() -> None:
    known = Known(60.0)
    known.note(message(), CONFIRMED, 0.0)
    assert known.any(59.0)
    assert known.of(message()) is CONFIRMED
    others = (
        message(b"2"),
        message(body=b"another"),
        message(copies=b"a"),
        message()._replace(exchange=b"xk", routing_key=b""),
        message()._replace(routing_key=b"l"),
    )
    assert [known.of(other) for other in others] == [None] * len(others)
    assert not known.any(60.0)
    assert known.of(message()) is None
