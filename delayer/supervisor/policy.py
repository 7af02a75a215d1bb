"""What becomes of a worker that ended. Pure: times, in seconds, and chance are passed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from delayer.core import backoff

REFUSED: Final = 64
"""What a worker that will not start adds to its exit code. A bug ends an interpreter with 1 as well, and a bug in one
worker must not stop the others."""

MISUSED: Final = 2
"""Usage or configuration; and what an interpreter ends with that cannot find its program, during an upgrade, say."""

STEADY: Final = 60.0
"""Seconds that a worker has to live for its end not to count as one more failure in a row."""


@dataclass(frozen=True, slots=True)
class Again:
    """Start it again after ``pause`` seconds. ``failures``: how many in a row, with this one."""

    pause: float
    failures: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Waiting mends nothing: stop the whole service with this exit code."""

    code: int


def after_end(code: int, lived: float, failures: int, chance: float, *, proven: bool) -> Again | GiveUp:
    """What to do when a worker has ended that nobody had told to.

    ``code`` is its exit code, or minus the signal that killed it; ``failures`` how often in a row it had ended so
    before; ``chance`` in [0, 1) spreads the pauses. ``proven``: a worker was ready once, so program and configuration
    were right; whoever is changing them now will be done with it, and the others work on meanwhile.
    """
    if code == REFUSED + 1 or (code in (MISUSED, REFUSED + MISUSED) and not proven):
        return GiveUp(code % REFUSED)
    return again(0 if lived >= STEADY else failures, chance)


def again(failures: int, chance: float) -> Again:
    """The next attempt after ``failures`` earlier ones in a row and a further one now."""
    return Again(backoff.pause(failures, chance), failures + 1)
