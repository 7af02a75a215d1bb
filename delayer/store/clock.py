"""An estimate of the store's clock: relative delays count from it, and sleepers sleep towards it.

A *sample* is one query of ``clock_timestamp()``. The server read its clock between our sending and our receiving, so at
any later moment its clock is between two lines. :meth:`StoreClock.now_upper_ms` uses the upper line: a delay counted
from it is never short. Sleeping uses the lower line: a sleeper that wakes by it never wakes early.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple


def uptime() -> float:
    """Seconds, including those while the machine is suspended if the system counts them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


DRIFT = 500e-6
"""Seconds that two clocks may drift apart per second: ntpd slews a clock by at most that much. The daemon takes a
sample about every second, so the drift widens the estimate by half a millisecond. chrony may slew faster, by up to
83,333 ppm (``maxslewrate``), while it corrects a large offset. A sample that contradicts the last one by that much
counts as a step (:func:`better`). So for a second the estimate may be wrong by up to 83 ms (docs/guarantees.md)."""


class Sample(NamedTuple):
    """One reading: local monotonic seconds before and after, and the server's epoch milliseconds with fractions."""

    before: float
    server_ms: float
    after: float


class Bounds(NamedTuple):
    """The server's epoch milliseconds are between these two."""

    lower: float
    upper: float


def bounds(sample: Sample, at: float) -> Bounds:
    """The server's clock at the local monotonic instant ``at``, by ``sample``."""
    shortest, longest = at - sample.after, at - sample.before  # Seconds since the server read its clock.
    return Bounds(
        lower=sample.server_ms + (shortest - DRIFT * abs(shortest)) * 1000,
        upper=sample.server_ms + (longest + DRIFT * abs(longest)) * 1000,
    )


def better(kept: Sample, new: Sample) -> tuple[Sample, bool]:
    """The better sample, and whether the server's clock was stepped: then the new sample wins, even if it is wider."""
    old, fresh = bounds(kept, new.after), bounds(new, new.after)
    if fresh.lower > old.upper + 0.001 or fresh.upper < old.lower - 0.001:  # Floats round these to 0.00025 ms.
        return new, True
    narrower = fresh.upper - fresh.lower <= old.upper - old.lower
    return (new if narrower else kept), False


class StoreClock:
    """Keeps the best sample. Tests pass ``monotonic`` in."""

    def __init__(self, monotonic: Callable[[], float] = uptime) -> None:
        self.monotonic = monotonic
        self.steps = 0
        """Steps of the server's clock so far. Drop values derived from the clock before a step."""
        self._sample: Sample | None = None

    def observe(self, before: float, server_ms: float, after: float) -> None:
        sample = Sample(before, server_ms, after)
        if self._sample is None:
            self._sample = sample
            return
        self._sample, stepped = better(self._sample, sample)
        self.steps += stepped

    def now_upper_ms(self) -> int:
        """An upper bound of the server's clock, rounded up."""
        return math.ceil(self._bounds().upper)

    def now_lower_ms(self) -> int:
        """A lower bound of the server's clock, rounded down."""
        return math.floor(self._bounds().lower)

    def seconds_until(self, due_ms: int) -> float:
        """Seconds until the server's clock surely shows ``due_ms``; at most 0.0 if it does."""
        return (due_ms - self._bounds().lower) / 1000

    def _bounds(self) -> Bounds:
        if self._sample is None:
            raise RuntimeError("the store's clock was never asked")
        return bounds(self._sample, self.monotonic())
