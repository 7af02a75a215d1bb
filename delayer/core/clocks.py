"""How far apart clocks are, as far as the answers of servers show. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Final, NamedTuple

from delayer.core.readable import duration

MOST_SECONDS: Final = 1.0
"""The most seconds by which clocks may differ."""
FOLLOW_TIME: Final = "let all of these machines follow the same time servers (chronyc tracking, timedatectl)"


class ClockOffset(NamedTuple):
    """The bounds, in seconds, of a clock's lead over this machine's."""

    low: float = 0.0
    high: float = 0.0

    @classmethod
    def of_answer(cls, asked: float, stated: float, answered: float, *, precision: float = 0.0) -> ClockOffset:
        """The offset of a server that was asked and answered at these instants of this machine's clock. ``stated``: the
        time in its answer, which may be up to ``precision`` seconds old."""
        return cls(stated - answered, stated + precision - asked)


def differences(clocks: Mapping[str, ClockOffset]) -> list[str]:
    """The pairs of clocks that surely differ by more than MOST_SECONDS.

    >>> differences({"this machine": ClockOffset(), "the broker": ClockOffset(-3600.2, -3598.1)})
    ["the clock of this machine is 60 min ahead of the broker's"]
    >>> differences({"this machine": ClockOffset(), "the broker": ClockOffset(-2.5, -0.5)})
    []
    """
    found = []
    for one, other in combinations(clocks.items(), 2):
        for (ahead, first), (behind, second) in ((one, other), (other, one)):
            if (seconds := first.low - second.high) > MOST_SECONDS:
                found.append(f"the clock of {ahead} is {duration(seconds)} ahead of {behind}'s")
    return found
