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
    message: int
    """The hash of what identifies it."""
    since_ms: int
    last_ms: int
    """When it was here last."""
    trips: int = 0


class LoopWatch:
    """Follows one message per route. Its marks say nothing about it, because other routes and daemons set them too."""

    def __init__(self) -> None:
        self._followed: dict[bytes, _Followed] = {}
        self._reported: set[bytes] = set()

    def returned(self, route: bytes, message: bytes, due_ms: int, now_ms: int) -> bool:
        """Note that a message came back to ``route``. Returns True if it loops, once for each route. ``message``: its
        id, or its body. ``due_ms``: when it is due now. Times are epoch milliseconds."""
        if route in self._reported or due_ms - now_ms > LOST_MS:  # A message that waits is in no loop.
            return False
        one, found = self._followed.get(route), hash(message)
        if one is None or now_ms - one.last_ms > LOST_MS:
            self._followed[route] = _Followed(found, now_ms, now_ms)
        elif one.message == found:
            one.trips, one.last_ms = one.trips + 1, now_ms
            watched_ms = now_ms - one.since_ms
            if watched_ms >= WATCHED_MS:
                if one.trips * 1000 > MOST_TRIPS_PER_SECOND * watched_ms:
                    self._reported.add(route)
                    return True
                del self._followed[route]
        return False
