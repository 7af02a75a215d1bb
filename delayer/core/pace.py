"""How fast a route's messages may go out (``max_rate``): a bucket of tokens for each, and what a claim may take. Time
is passed in.

A restored service is then not run over by everything that became due while it was away. What is over the rate stays
where it is, in the store: it is late, and visible, and everybody else's messages pass it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

BURST: Final = 0.2
"""Seconds of the rate that may go out at once: often enough to be even, rarely enough to share a commit."""


class Scope(NamedTuple):
    """Which rows a claim means: those of ``routes``, or all others."""

    routes: frozenset[bytes]
    only: bool


class Bucket:
    """One route's tokens: as many as the rate gives in BURST seconds, one at least; each lets one message out."""

    def __init__(self, rate: float, now: float) -> None:
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
        """What was taken and not used."""
        self._tokens = min(self._most, self._tokens + tokens)

    def wait(self, now: float) -> float:
        """Seconds until it is worth to come again: half a burst, or one token."""
        self._fill(now)
        return max(0.0, (max(1.0, self._most / 2) - self._tokens) / self.rate)

    def _fill(self, now: float) -> None:
        # A clock that went back gives nothing, and takes nothing.
        self._tokens = min(self._most, self._tokens + max(0.0, now - self._at) * self.rate)
        self._at = now


class Pacer:
    """The buckets of a process: all of its lanes take from the same ones."""

    def __init__(self) -> None:
        self._buckets: dict[bytes, Bucket] = {}
        self.scopes: tuple[Scope, ...] = ()
        """What is claimed apart: everything without a limit, and each route that has one. Empty: nothing is limited."""

    def set(self, rates: Mapping[bytes, float], now: float) -> None:
        """These are the limits from now on, in messages a second. A bucket whose rate stays keeps its tokens."""
        kept = {route: old for route, old in self._buckets.items() if rates.get(route) == old.rate}
        self._buckets = {route: kept.get(route) or Bucket(rate, now) for route, rate in rates.items()}
        limited = frozenset(rates)
        others = (Scope(limited, only=False),) if limited else ()
        self.scopes = (*others, *(Scope(frozenset({route}), only=True) for route in sorted(limited)))

    def bucket(self, scope: Scope) -> Bucket | None:
        """The bucket of a scope; None where there is no limit, or none any more."""
        return self._buckets.get(next(iter(scope.routes))) if scope.only else None
