"""The rate limit of a route (``max_rate``): a token bucket. The caller passes the time. The limit protects a recovered
service from the backlog of its outage. Messages over the rate stay in their route's lane, visibly late."""

from __future__ import annotations

from typing import Final

BURST: Final = 0.2
"""The bucket's size, in seconds of the rate: small enough for an even flow, large enough to share a commit."""
LONGEST_WAIT: Final = BURST
"""Seconds that a claim may wait for a shared connection without losing tokens. So at most two bursts go together."""


class TokenBucket:
    """A bucket of ``rate * BURST`` tokens, at least one. Each token releases one message."""

    def __init__(self, rate: float, now: float) -> None:
        """``rate``: messages a second. ``now``: monotonic seconds."""
        self.rate = rate
        self._most = max(1.0, rate * BURST)
        self._tokens = self._most
        self._at = now

    def take(self, wanted: int, now: float) -> int:
        """Take up to ``wanted`` whole tokens. Returns their number."""
        self._fill(now)
        taken = min(wanted, int(self._tokens))
        self._tokens -= taken
        return taken

    def give_back(self, tokens: int) -> None:
        """Return unused tokens."""
        self._tokens = max(self._tokens, min(self._most, self._tokens + tokens))

    def waited(self, seconds: float, now: float) -> None:
        """Credit the time that a claim waited for its slot, at most LONGEST_WAIT, with tokens."""
        most = self._most + self.rate * min(seconds, LONGEST_WAIT)
        self._tokens = max(self._tokens, min(most, self._tokens + max(0.0, now - self._at) * self.rate))
        self._at = max(self._at, now)

    def wait(self, now: float) -> float:
        """Seconds until the bucket has half a burst, or one token."""
        self._fill(now)
        return max(0.0, (max(1.0, self._most / 2) - self._tokens) / self.rate)

    def _fill(self, now: float) -> None:
        # A clock that goes back neither adds nor removes tokens.
        self._tokens = max(self._tokens, min(self._most, self._tokens + max(0.0, now - self._at) * self.rate))
        self._at = now
