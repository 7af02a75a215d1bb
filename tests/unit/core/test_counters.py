"""Histograms and counts by route: tables, and the law that batches and single messages count the same."""

from __future__ import annotations

import random

import pytest

from delayer.core.counters import LATENESS, MOST_ROUTES, OTHERS, Counters, Tally


def test_a_batch_of_latenesses_counts_like_its_messages_one_by_one() -> None:
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


def test_invented_route_names_do_not_fill_the_memory() -> None:
    counters = Counters()
    counters.add("refused", [b"%d" % number for number in range(MOST_ROUTES + 50)])
    counters.delivered([(10, b"one more")])
    assert len(counters.routes["refused"]) == MOST_ROUTES + 1
    assert counters.routes["refused"][OTHERS] == 50
    assert list(counters.lateness) == [OTHERS]


def test_a_route_keeps_its_name() -> None:
    counters = Counters(2)
    counters.add("refused", [b"a", b"b", b"c"])
    assert [counters.name_of(route) for route in (b"c", b"a", b"b")] == [OTHERS, b"a", b"b"]
    nothing = Counters(0)
    nothing.add("parked", [b"a"])
    assert nothing.routes["parked"] == {OTHERS: 1}
