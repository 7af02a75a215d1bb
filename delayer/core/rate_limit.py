"""The rate limit of a route (``max_rate``): a token bucket. Time is passed in.

A service that comes back is then not overrun by everything that became due while it was away. Messages over the rate
stay in the lane of their route: late, and visible.
"""

from __future__ import annotations

from typing import Final

BURST: Final = 0.2
"""Seconds of the rate that may go out at once: often enough to be even, rarely enough to share a commit."""


class TokenBucket:
    """As many tokens as the rate gives in BURST seconds, one at least; each lets one message out."""

    def __init__(self, rate: float, now: float) -> None:
        """``rate``: messages a second. ``now``: monotonic seconds."""
        self.rate = rate
        self._most = max(1.0, rate * BURST)
        self._tokens = self._most
        self._at = now

    def take(self, wanted: int, now: float) -> int:
        """As many whole tokens as there are, ``wanted`` at most."""
        self._fill(now)
        taken = min(wanted, int(self._tokens))
        self._tokens -= taken
        return taken

    def give_back(self, tokens: int) -> None:
        """Return tokens that were taken and not used."""
        self._tokens = min(self._most, self._tokens + tokens)

    def wait(self, now: float) -> float:
        """Seconds until it is worth to come again: half a burst, or one token."""
        self._fill(now)
        return max(0.0, (max(1.0, self._most / 2) - self._tokens) / self.rate)

    def _fill(self, now: float) -> None:
        # A clock that went back gives nothing, and takes nothing.
        self._tokens = min(self._most, self._tokens + max(0.0, now - self._at) * self.rate)
        self._at = now
