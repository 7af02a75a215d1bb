"""The estimate of the store's clock: its bounds always contain the true time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayer.store.clock import Sample, StoreClock, better, bounds

OFFSET_MS = 1_790_000_000_000.0
seconds = st.floats(0.0, 10.0, allow_nan=False)
rates = st.floats(-499e-6, 499e-6)  # ntpd slews by 500 ppm


class Local:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def truth(at: float, rate: float) -> float:
    """A server's clock that runs a little fast or slow."""
    return OFFSET_MS + at * (1 + rate) * 1000


@settings(deadline=None)
@given(rates, st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=20), seconds)
def test_the_truth_is_within_the_bounds(rate: float, rounds: list[tuple[float, float, float]], later: float) -> None:
    local = Local()
    clock = StoreClock(local)
    for idle, out, back in rounds:
        local.now += idle
        before = local.now
        read = truth(before + out, rate)
        local.now = before + out + back
        clock.observe(before, read, local.now)
        assert clock.now_lower_ms() <= truth(local.now, rate) <= clock.now_upper_ms()
    local.now += later
    assert clock.now_lower_ms() <= truth(local.now, rate) <= clock.now_upper_ms()
    assert clock.steps == 0


@settings(deadline=None)
@given(rates, seconds, seconds, st.integers(0, 5000))
def test_a_sleep_by_the_clock_ends_at_the_due_instant(rate: float, out: float, back: float, ahead: int) -> None:
    local = Local()
    clock = StoreClock(local)
    clock.observe(1000.0, truth(1000.0 + out, rate), 1000.0 + out + back)
    local.now = 1000.0 + out + back
    due_ms = clock.now_upper_ms() + ahead
    for _ in range(100):
        left = clock.seconds_until(due_ms)
        if left <= 0:
            break
        local.now += math.ceil(left * 1000) / 1000
    assert truth(local.now, rate) >= due_ms
    assert clock.seconds_until(due_ms) <= 0


def test_a_narrow_sample_is_kept_until_it_has_widened() -> None:
    narrow, wide = Sample(0.0, 1000.0, 0.001), Sample(1.0, 2005.0, 1.010)
    assert better(narrow, wide) == (narrow, False)
    assert better(wide, narrow) == (narrow, False)
    long_after = Sample(100.0, 101_005.0, 100.010)
    assert better(narrow, long_after) == (long_after, False)


@pytest.mark.parametrize("step_ms", [-3_600_000.0, -50.0, 50.0, 3_600_000.0])
def test_a_step_is_followed_at_once(step_ms: float) -> None:
    local = Local()
    clock = StoreClock(local)
    clock.observe(999.999, OFFSET_MS, 1000.0)
    clock.observe(999.989, OFFSET_MS + step_ms, 1000.0)
    assert clock.steps == 1
    assert abs(clock.now_upper_ms() - OFFSET_MS - step_ms) <= 12


@pytest.mark.parametrize("rate", [-0.083_333, 0.083_333])
def test_a_clock_slewed_by_chrony_is_followed_a_second_late(rate: float) -> None:
    """docs/guarantees.md states the largest error of the estimate until then."""
    local = Local()
    clock = StoreClock(local)
    for _ in range(20):
        clock.observe(local.now, truth(local.now, rate), local.now)
        assert abs(clock.now_upper_ms() - truth(local.now, rate)) <= 1.0
        local.now += 1.0
        assert abs(clock.now_upper_ms() - truth(local.now, rate)) <= 85.0


def test_bounds_are_rounded_outwards() -> None:
    local = Local()
    clock = StoreClock(local)
    clock.observe(1000.0, 5000.25, 1000.0)
    assert (clock.now_lower_ms(), clock.now_upper_ms()) == (5000, 5001)
    assert bounds(Sample(1000.0, 5000.25, 1000.0), 1000.0) == (5000.25, 5000.25)


def test_a_clock_without_a_sample_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="never asked"):
        StoreClock().now_upper_ms()
