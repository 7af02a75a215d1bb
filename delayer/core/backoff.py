"""How long to wait before trying again, and how often to speak of it. Pure; the caller passes time and chance."""

from __future__ import annotations

from typing import Final


def pause(attempt: int, random: float) -> float:
    """Seconds before attempt ``attempt`` + 1 (counted from 0), doubling from 0.2 s to 15 s.

    ``random`` in [0, 1) spreads it over the upper half, so that a fleet does not come back in step.
    """
    ceiling = min(15.0, 0.2 * 2.0 ** min(attempt, 16))
    return ceiling * (0.5 + 0.5 * random)


class Sparing:
    """Which of many failures in a row are worth a line: the first, whatever differs from the one before, and then one
    after 10 s, 20 s, and so on up to 5 minutes. A server that is down for a night fills no log."""

    def __init__(self) -> None:
        self._said: str | None = None
        self._interval = 10.0
        self._next = 0.0

    def worth(self, reason: str, now: float) -> bool:
        """``now``: monotonic seconds."""
        if reason != self._said:
            self._said, self._interval = reason, 10.0
        elif now >= self._next:
            self._interval = min(300.0, 2 * self._interval)
        else:
            return False
        self._next = now + self._interval
        return True

    def over(self) -> None:
        """It went well: the next failure is a first one."""
        self._said = None


FIRST_MS: Final = 10_000
LONGEST_MS: Final = 3_600_000


def pause_ms(attempts: int, message_id: int) -> int:
    """The pause after ``attempts`` failed attempts (at least 1): 10 s, doubling up to an hour, less up to a fifth.

    The fifth depends on the id only, so that a thousand messages held by one outage do not come back in one instant.

    >>> [pause_ms(n, 0) for n in (1, 2, 9, 10, 1000)]
    [10000, 20000, 2560000, 3600000, 3600000]
    """
    whole = min(FIRST_MS << min(attempts - 1, 16), LONGEST_MS)
    # Times 2^64 / golden ratio, so that neighbouring ids land far apart; of that the highest 16 bits.
    spread = (message_id * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) >> 48
    return whole - (whole // 5 * spread >> 16)
