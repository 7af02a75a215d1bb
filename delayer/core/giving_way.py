"""How a job beside the traffic gives way to it: after each piece of its work it rests, the longer the later the
messages are. Pure: what the traffic does is looked at by others (store/traffic.py), and told with its time.

Where no daemon is at work, or those that are have nothing to do, a job takes what there is.
"""

from __future__ import annotations

from typing import Final, NamedTuple

FEW_A_SECOND: Final = 50.0
"""Fewer messages than this are no traffic that anybody must make way for, as long as none of them is late."""
APART: Final = 0.2
"""Seconds between two looks that say how many pass in a second."""
EASY_MS: Final = 25.0
"""Who is no later than this is not disturbed: it is what a release takes."""
LATE_MS: Final = 50.0
"""From here on the job rests longer: some of those that nobody looked at are later still, and 100 ms is too late."""
FIRST: Final = 0.5
"""How long the first rest is, in the time of the work before it."""
LEAST: Final = 0.25
MOST: Final = 8.0
EASIER: Final = 0.85
HARDER: Final = 1.6
LONGEST: Final = 10.0
"""Seconds of a rest, after whatever piece of work."""


class Seen(NamedTuple):
    """A look at the traffic, ``at`` monotonic seconds."""

    at: float
    owners: int
    """Lanes that somebody releases from."""
    passed: int
    """Messages that were parked or released so far."""
    late_ms: float
    """How late the latest message is that waits for its release now."""


class Pace:
    """The rests of one process. It begins as if there were traffic, until it has seen that there is none."""

    def __init__(self, *, giving_way: bool = True) -> None:
        self.giving_way = giving_way
        self.share = FIRST
        """The rest after a piece of work, in the time that it took."""
        self._before: Seen | None = None

    def look(self, seen: Seen) -> None:
        """Learn what the traffic does."""
        if not seen.owners:
            self.giving_way, self.share, self._before = False, FIRST, None
            return
        rate, late = self._rate(seen), seen.late_ms > LATE_MS
        if rate is not None:
            self.giving_way = late or rate >= FEW_A_SECOND
        elif late or self._before is None:  # somebody came, and what they do is not known yet
            self.giving_way = True
        if rate is not None or self._before is None:
            self._before = seen
        if not self.giving_way:
            self.share = FIRST
        elif late:
            self.share = min(MOST, self.share * HARDER)
        elif seen.late_ms <= EASY_MS:
            self.share = max(LEAST, self.share * EASIER)

    def _rate(self, seen: Seen) -> float | None:
        """Messages a second since the look before; None where that is not known."""
        if self._before is None or (seconds := seen.at - self._before.at) < APART:
            return None
        return max(0, seen.passed - self._before.passed) / seconds

    def rest(self, took: float) -> float:
        """Seconds to rest after a piece of work that ``took`` so many."""
        return min(LONGEST, took * self.share) if self.giving_way else 0.0
