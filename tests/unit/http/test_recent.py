"""Rates and lateness of the last minutes, from the counters."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.core.counters import LATENESS, Counters
from delayer.http.recent import LAG_SECONDS, STEP_MS, Recent, measure_lag, quantile, sent_rates, series, summary

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
    counters = Counters()
    recent = Recent(counters, 0)
    counters.delivered([(one * 1000, b"r") for one in seconds])
    recent.note(STEP_MS)
    true = sorted(seconds)[ceil(share * len(seconds)) - 1]
    found = quantile(share, recent.steps[0].lateness, LATENESS)
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


def test_the_slowest_of_the_last_minutes() -> None:
    counters = Counters()
    recent = Recent(counters, NOW)
    counters.took("publish", 0.4)
    counters.took("loop_lag", 0.002)
    recent.note(NOW + STEP_MS)
    for _ in range(3):
        counters.took("publish", 0.02)
    recent.note(NOW + 2 * STEP_MS)
    course = list(recent.steps)
    assert summary(course, 60).slowest["publish"] == pytest.approx(0.4, rel=0.3)
    last = summary(course, 5).slowest
    assert last["publish"] == pytest.approx(0.02, rel=0.3)
    assert (last["loop_lag"], last["park"]) == (None, None)


async def test_the_lag_of_the_event_loop_is_measured() -> None:
    counters, stopping = Counters(), asyncio.Event()
    measuring = asyncio.create_task(measure_lag(counters, stopping))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(3 * LAG_SECONDS, stopping.set)
    time.sleep(2 * LAG_SECONDS)  # noqa: ASYNC251  The stall to be measured.
    await measuring
    assert counters.seconds["loop_lag"].total >= 0.9 * LAG_SECONDS
