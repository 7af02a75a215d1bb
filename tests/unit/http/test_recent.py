"""Rates and lateness of the last minutes, from the counters."""

from __future__ import annotations

from bisect import bisect_left
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.core.counters import LATENESS, Counters, Tally
from delayer.http.recent import STEP_MS, Recent, quantile, sent_rates, series, summary

NOW = 1_800_000_000_000
ALL = len(LATENESS)


def test_each_step_has_the_counts_since_the_last_step() -> None:
    counters = Counters()
    recent = Recent(counters, 0)
    for step, parked in ((1, 10), (1, 99), (2, 20)):
        counters.add("parked", [b"r"] * parked)
        recent.note(step * STEP_MS)
    assert [(one.at_ms, one.counts["parked"]) for one in recent.steps] == [(STEP_MS, 10), (2 * STEP_MS, 119)]


def test_a_clock_that_is_set_back_discards_earlier_steps() -> None:
    counters = Counters()
    recent = Recent(counters, 100 * STEP_MS)
    for step, parked in ((101, 10), (41, 20), (42, 30)):
        counters.add("parked", [b"r"] * parked)
        recent.note(step * STEP_MS)
    assert [(one.at_ms, one.counts["parked"]) for one in recent.steps] == [(41 * STEP_MS, 20), (42 * STEP_MS, 30)]


def test_rates_of_destinations() -> None:
    counters = Counters()
    counters.sent([(b"x", b"before")] * 7)
    recent = Recent(counters, 0)
    for step, count in ((1, 10), (2, 40)):
        counters.sent([(b"x", b"k")] * count)
        recent.note(step * STEP_MS)
    assert sent_rates(list(recent.steps), 60) == {(b"x", b"k"): 5.0}
    assert sent_rates(list(recent.steps), 5) == {(b"x", b"k"): 8.0}
    assert sent_rates([], 60) == {}


def test_no_steps_yet() -> None:
    nothing = summary([], 60)
    assert (nothing.rates["parked"], nothing.p50, nothing.worst) == (0, None, None)


@given(st.lists(st.floats(0.002, 80_000), min_size=1, max_size=60), st.sampled_from([0.5, 0.99, 1.0]))
def test_a_quantile_is_in_the_bucket_of_the_true_one(seconds: list[float], share: float) -> None:
    """The quantile of a single message is its lateness."""
    tally = Tally(LATENESS)
    for one in seconds:
        tally.add(one)
    true = sorted(seconds)[ceil(share * len(seconds)) - 1]
    found = quantile(share, tally.below, tally.count, tally.total)
    assert found is not None
    at = bisect_left(LATENESS, true)
    assert (LATENESS[at - 1] if at else 0.0) <= found <= LATENESS[at]
    if len(seconds) == 1:
        assert found == pytest.approx(true, abs=LATENESS[0]) or found <= true


def test_from_counters_to_a_chart() -> None:
    counters = Counters()
    recent = Recent(counters, NOW)
    counters.add("parked", [b"r"] * 50)
    counters.add("released", [b"r"] * 10)
    counters.delivered([(40, b"a")] * 10)
    recent.note(NOW + STEP_MS)
    course = list(recent.steps)
    last = summary(course, 60)
    assert (last.rates["parked"], last.rates["released"], last.seconds) == (10, 2, STEP_MS / 1000)
    assert last.p50 is not None
    assert 0.025 < last.p50 <= 0.05
    assert series(course)["parked"] == [10]
    assert series(course)["p50_ms"] == [37.5]
