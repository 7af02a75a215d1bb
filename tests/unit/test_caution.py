"""Which messages go alone, how many at a time, and how long the publisher remembers why."""

from __future__ import annotations

import pytest

from delayer.broker import caution as module
from delayer.broker.caution import BATCH, DELICATE, FEW, WARY, Caution


def known(*exchanges: bytes, now: list[float] | None = None) -> Caution:
    clock = now or [0.0]
    it = Caution(lambda: clock[0])
    for exchange in exchanges:
        it.took(exchange)
    return it


def test_the_first_message_for_an_exchange_goes_alone() -> None:
    it = known(b"a")
    assert not it.alone(b"a")
    assert it.alone(b"b")
    assert it.batch_limit == BATCH


def test_a_delicate_exchange_stays_delicate_for_a_while() -> None:
    now = [1000.0]
    it = known(b"a", b"b", now=now)
    it.objected(b"a")
    it.took(b"a")  # its other messages are fine
    now[0] += DELICATE / 2
    it.objected(b"b")
    assert (it.alone(b"a"), it.alone(b"b"), it.batch_limit) == (True, True, FEW)
    now[0] += DELICATE / 2
    assert (it.alone(b"a"), it.alone(b"b"), it.batch_limit) == (False, True, FEW)
    now[0] += DELICATE / 2
    assert (it.alone(b"a"), it.alone(b"b"), it.batch_limit) == (False, False, BATCH)


def test_an_objection_begins_the_while_again() -> None:
    now = [0.0]
    it = known(b"a", now=now)
    for _ in range(3):
        it.objected(b"a")
        now[0] += DELICATE - 1
        assert it.delicate(b"a")


def test_careful_until_as_many_are_settled_as_were_in_doubt() -> None:
    it = known(b"a")
    it.in_doubt(150)
    it.took(b"a")
    for _ in range(2):
        assert (it.alone(b"a"), it.batch_limit) == (True, FEW)
        it.settled(FEW, quickly=True)
    assert (it.alone(b"a"), it.batch_limit) == (False, BATCH)


def test_after_a_channel_is_lost_every_exchange_is_tried_again() -> None:
    it = known(b"a")
    it.in_doubt(1)
    it.settled(1, quickly=True)
    assert it.alone(b"a")


def test_a_batch_that_is_late_is_halved_and_grows_again() -> None:
    it = known()
    it.late(learnt=30, messages=1000)
    assert it.batch_limit == 15
    it.settled(15, quickly=False)
    assert it.batch_limit == 15
    it.late(learnt=1, messages=15)
    assert it.batch_limit == 1
    limits = []
    while it.batch_limit < BATCH:
        limits.append(it.batch_limit)
        it.settled(it.batch_limit, quickly=True)
    assert limits[:8] == [1, 2, 4, 8, 16, 32, 64, FEW]
    assert sum(limits) >= 1000 - 15


def test_a_broker_that_does_not_answer_teaches_nothing() -> None:
    it = known()
    it.late(learnt=0, messages=1000)
    assert it.batch_limit == BATCH


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 2)
    it = known(b"a", b"b", b"c")
    assert [it.alone(one) for one in (b"a", b"b", b"c")] == [True, True, False]
    for one in (b"a", b"b", b"c"):
        it.objected(one)
    assert [it.delicate(one) for one in (b"a", b"b", b"c")] == [False, True, True]


def test_a_batch_that_is_overdue_is_quartered_and_grows_again() -> None:
    """A full batch, and one that was not full; down to single messages, which go on for ever."""
    it = known(b"a")
    it.overdue(1_000)
    assert (it.alone(b"a"), it.batch_limit) == (False, 250)
    it.settled(250, quickly=False)
    assert it.batch_limit == 250
    for limit in (62, 15, 3, 1, 1):
        it.overdue(it.batch_limit)
        assert it.batch_limit == limit
    for _ in range(20):
        it.settled(it.batch_limit, quickly=True)
    assert it.batch_limit == BATCH


def test_the_smaller_of_both_limits_counts() -> None:
    it = known()
    it.in_doubt(1_000)
    it.overdue(40)
    assert it.batch_limit == 10
    it.settled(10, quickly=True)
    assert it.batch_limit == 20


def test_apart_until_as_many_are_settled_as_were_on_the_connection() -> None:
    it = known(b"a")
    it.lost(objects=False, messages=150)
    assert (it.apart, it.batch_limit) == (False, BATCH)
    it.lost(objects=True, messages=150)
    for _ in range(2):
        it.took(b"a")
        assert (it.apart, it.alone(b"a"), it.batch_limit) == (True, True, FEW)
        it.settled(FEW, quickly=True)
    assert (it.apart, it.alone(b"a"), it.batch_limit) == (False, False, BATCH)


def test_where_one_that_ends_connections_was_found_the_next_go_apart_too() -> None:
    it = known(b"a")
    it.lost(objects=True, messages=1)
    it.found_out()
    for _ in range(WARY // FEW):
        assert it.apart
        it.settled(FEW, quickly=True)
    assert not it.apart
