"""Detect a message that loops: its route passes it on at once, and it comes back at once. Pure. Such a loop is a
configuration error: a queue dead-letters into a route that does not delay its messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WATCHED_MS: Final = 10_000
"""How long a message loops before it is reported."""
MOST_TRIPS_PER_SECOND: Final = 10
LOST_MS: Final = 1_000
"""A message that has not come back within this time is not in a loop."""


@dataclass(slots=True)
class _Followed:
    body: int
    """The hash of its body."""
    due_ms: int
    """The due time of its last trip, which it carries in ``x-delayer-due``."""
    since_ms: int
    trips: int = 0


class LoopWatch:
    """Follows one message per route by the due time of its last trip, so one-time returns are no loop."""

    def __init__(self) -> None:
        self._followed: dict[bytes, _Followed] = {}
        self._reported: set[bytes] = set()

    def returned(self, route: bytes, last_due_ms: int, due_ms: int, body: bytes, now_ms: int) -> bool:
        """Note that a message came back to ``route``. Returns True if it loops, once for each route. ``last_due_ms``:
        its ``x-delayer-due``. ``due_ms``: when it is due now. All times are epoch milliseconds."""
        if route in self._reported or due_ms - now_ms > LOST_MS:  # A message that waits is in no loop.
            return False
        one = self._followed.get(route)
        if one is not None and (one.due_ms, one.body) == (last_due_ms, hash(body)):
            one.trips, one.due_ms = one.trips + 1, due_ms
            seconds = (now_ms - one.since_ms) / 1000
            if now_ms - one.since_ms < WATCHED_MS:
                return False
            if one.trips > MOST_TRIPS_PER_SECOND * seconds:
                self._reported.add(route)
                return True
        elif one is not None and now_ms - one.due_ms < LOST_MS:
            return False
        self._followed[route] = _Followed(hash(body), due_ms, now_ms)
        return False
