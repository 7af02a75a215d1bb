"""How long to wait before trying again. Pure; the caller passes the random number."""

from __future__ import annotations

from typing import Final

FIRST: Final = 0.2
LONGEST: Final = 15.0


def pause(attempt: int, random: float) -> float:
    """Seconds before attempt ``attempt`` + 1 (counted from 0), doubling from 0.2 s to 15 s.

    ``random`` in [0, 1) spreads it over the upper half, so that a fleet does not come back in step.
    """
    ceiling = min(LONGEST, FIRST * 2.0 ** min(attempt, 16))
    return ceiling * (0.5 + 0.5 * random)
