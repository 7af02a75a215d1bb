"""How many messages are read ahead: as many as are wanted, until their bytes do not fit."""

from __future__ import annotations

import random

import pytest

from delayer.broker.consumer import ENOUGH, Fitting

WANTED, ROOM = 5_000, 32 << 20


def test_the_full_prefetch_while_messages_fit() -> None:
    fitting = Fitting(ROOM)
    assert fitting.prefetch(WANTED) == WANTED
    assert not fitting.took(1_000_000, 1_000_000, WANTED)
    assert fitting.prefetch(WANTED) == WANTED


@pytest.mark.parametrize(("found", "next_time"), [(64, 64), (1, 1), (0, 1), (9_000, WANTED)])
def test_the_prefetch_shrinks_to_the_number_that_filled_the_room(found: int, next_time: int) -> None:
    fitting = Fitting(ROOM)
    fitting.full(found)
    assert fitting.prefetch(WANTED) == next_time


@pytest.mark.parametrize(
    ("size", "more", "next_time"),
    [
        (500_000, False, 64),  # as large as before
        (300_000, False, 64),  # not worth it
        (200_000, True, ROOM // 200_000),
        (512, True, WANTED),
        (0, True, WANTED),
    ],
)
def test_smaller_ones_are_told_by_many(size: int, more: bool, next_time: int) -> None:
    fitting = Fitting(ROOM)
    fitting.full(64)
    fitting.prefetch(WANTED)
    for _ in range(ENOUGH * 64 - 1):
        assert not fitting.took(1, size, WANTED)
    assert fitting.took(1, size, WANTED) is more
    assert fitting.prefetch(WANTED) == next_time


def test_the_prefetch_stays_between_one_and_the_limit() -> None:
    chance = random.Random(1)
    fitting = Fitting(ROOM)
    for _ in range(20_000):
        if chance.random() < 0.01:
            fitting.full(chance.randrange(10_000))
        fitting.took(chance.randrange(200), chance.randrange(1 << 27), WANTED)
        assert 1 <= fitting.prefetch(WANTED) <= WANTED
