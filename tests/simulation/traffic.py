"""How much is sent, and how long it waits."""

from __future__ import annotations

from typing import Final, NamedTuple

import detangle

PART: Final = 0.1
"""In a long run a message may wait for that part of the run."""


class Traffic(NamedTuple):
    """``rate``: messages a second on average. ``longest_ms``: the longest delay."""

    rate: float
    longest_ms: int

    @classmethod
    def over(cls, seconds: float, rate: float, *, longest_ms: int) -> Traffic:
        """``longest_ms``: the longest delay in a short run."""
        return cls(rate, max(longest_ms, round(seconds * PART * 1000)))

    def count(self) -> int:
        """The number of messages to send now."""
        return int(self.rate) + detangle.flip(self.rate % 1)
