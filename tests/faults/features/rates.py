"""Limited rates: a route never sends more than its rate in any stretch of time. A pure rule, and a second ledger."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from delayer.core.rate_limit import BURST
from tests.faults.fleet import Fleet
from tests.support.ledger import Ledger

RATE: Final = 100
"""Messages a second, of all daemons together."""
PACED: Final = "paced"
ENVIRON: Final = {
    "ROUTE": json.dumps(
        [{"from": "delayer.in", "to": "delayer.out"}, {"from": PACED, "to": f"{PACED}.out", "max_rate": RATE}]
    )
}
JITTER: Final = 2.0
"""The largest difference in seconds between the transport times of two messages."""


class Excess(NamedTuple):
    """A stretch of time with too many arrivals."""

    messages: int
    seconds: float
    most: float


def excess(at_ms: Sequence[float], daemons: int, rate: float = RATE) -> Excess | None:
    """The first such stretch, from one arrival to another. Pure."""
    ordered = sorted(at_ms)
    # With a(i) = i - rate * t(i), too many arrived from i to j if a(j) - a(i) + 1 exceeds the allowed bursts: each
    # daemon that takes the route's lane starts with a burst.
    allowed = rate * (daemons * BURST + JITTER)
    lowest, since = float("inf"), 0
    for position, at in enumerate(ordered):
        level = position - rate * at / 1000
        if level < lowest:
            lowest, since = level, position
        if level - lowest + 1 > allowed:
            seconds = (at - ordered[since]) / 1000
            return Excess(position - since + 1, seconds, rate * seconds + allowed)
    return None


@asynccontextmanager
async def paced(fleet: Fleet, seed: int) -> AsyncIterator[Ledger]:
    """A ledger of the limited route, whose account includes the fleet's faults."""
    ledgers = Ledger.open(
        fleet.place.broker, random.Random(seed), into=PACED.encode(), exchange=f"{PACED}.out", queue=PACED
    )
    async with ledgers as ledger:
        ledger.account.windows = fleet.ledger.account.windows
        yield ledger
