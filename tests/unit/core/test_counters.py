"""Histograms and counts by route: tables, and the law that the quick way and the slow way agree."""

from __future__ import annotations

import random

import pytest

from delayer.core.counters import LATENESS, MOST_ROUTES, OTHERS, Counters, Tally
from delayer.core.hold import CONFIRMED, NACKED, closed_channel, returned


@pytest.mark.parametrize(
    ("value", "below"),
    [(0.0, [1, 1, 1]), (1.0, [1, 1, 1]), (1.1, [0, 1, 1]), (2.0, [0, 1, 1]), (5.0, [0, 0, 1]), (6.0, [0, 0, 0])],
)
def test_a_value_counts_at_every_bound_that_it_does_not_exceed(value: float, below: list[int]) -> None:
    tally = Tally((1.0, 2.0, 5.0))
    tally.add(value)
    assert (tally.below, tally.count, tally.total) == (below, 1, value)


def test_a_batch_of_latenesses_is_what_its_messages_are_one_by_one() -> None:
    chance = random.Random(7)
    for _ in range(50):
        late_ms = [chance.expovariate(0.0005) for _ in range(chance.randrange(200))]
        together, alone = Tally(LATENESS), Tally(LATENESS)
        together.add_lateness(late_ms)
        for one in late_ms:
            alone.add(one / 1000)
        assert (together.below, together.count) == (alone.below, alone.count)
        assert together.total == pytest.approx(alone.total)


def test_messages_before_their_instant_count_as_on_time() -> None:
    tally = Tally(LATENESS)
    tally.add_lateness([-10, -11])
    assert (tally.below[0], tally.count, tally.total) == (2, 2, 0.0)


def test_names_that_somebody_invents_fill_no_memory() -> None:
    counters = Counters()
    counters.add("refused", [b"%d" % number for number in range(MOST_ROUTES + 50)])
    counters.delivered([(10, b"one more")])
    assert len(counters.routes["refused"]) == MOST_ROUTES + 1
    assert counters.routes["refused"][OTHERS] == 50
    assert list(counters.lateness) == [OTHERS]


def test_lateness_is_counted_for_each_route_whatever_the_order() -> None:
    counters = Counters()
    counters.delivered([(100, b"a"), (900, b"b"), (500, b"a")])
    assert counters.lateness[b"a"].count == 2
    assert counters.lateness[b"a"].total == pytest.approx(0.6)
    assert counters.lateness[b"b"].total == pytest.approx(0.9)


def test_objections_are_counted_by_what_they_are() -> None:
    counters = Counters()
    for outcome in (CONFIRMED, NACKED, returned(312, "NO_ROUTE"), closed_channel(404, "x")):
        counters.objected(outcome, b"a")
    assert counters.routes["nacked"][b"a"] == 1
    assert counters.routes["returned"][b"a"] == 2
