"""Histograms as plain numbers: how many values were at most each bound. Pure, and cheap enough for the hot path: a
batch is entered with a few binary searches, not message by message.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""What a statement, a commit or a round of confirms takes."""
LATENESS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 7200.0, 14400.0,
    43200.0, 86400.0,
)  # fmt: skip
SIZES: Final = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0)


class Tally:
    """``below[i]`` values were at most ``bounds[i]``; ``count`` all of them, ``total`` their sum."""

    __slots__ = ("below", "bounds", "count", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.below = [0] * len(self.bounds)
        self.count = 0
        self.total = 0.0

    def add(self, value: float) -> None:
        """Enter one value."""
        self.count += 1
        self.total += value
        for at in range(bisect_left(self.bounds, value), len(self.below)):
            self.below[at] += 1

    def add_lateness(self, dues_ms: Sequence[int], now_ms: int) -> None:
        """Enter, in seconds, how long ago each of ``dues_ms`` was; these are in ascending order.

        What is not due yet (clocks disagree by a millisecond) counts as in time.

        >>> tally = Tally((0.005, 0.1, 1.0))
        >>> tally.add_lateness([0, 900, 998, 1001], 1000)
        >>> tally.below, tally.count, round(tally.total, 3)
        ([2, 3, 4], 4, 1.102)
        """
        count = len(dues_ms)
        self.count += count
        ahead = bisect_left(dues_ms, now_ms)
        self.total += (now_ms * ahead - sum(dues_ms[:ahead])) / 1000
        for at, bound in enumerate(self.bounds):
            self.below[at] += count - bisect_left(dues_ms, now_ms - bound * 1000)
