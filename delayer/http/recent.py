"""Rates and lateness of the last minutes, from this process's counters every five seconds."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from math import ceil, inf
from typing import Final, NamedTuple

from delayer.core.counters import LATENESS, Counters
from delayer.retry import first_set

STEP_MS: Final = 5_000
MOST_SENT: Final = 50
KEPT: Final = 180
"""How many steps are kept."""
RATE_KINDS: Final = ("parked", "released", "cascaded", "refused", "held")


class Step(NamedTuple):
    """The counts of one step over all routes: each of RATE_KINDS, messages within each bound of LATENESS, all delivered
    messages as "late", and the sum of their lateness in seconds as "total". ``at_ms``: its end. ``sent``: the MOST_SENT
    largest destinations, with their counts."""

    at_ms: int
    counts: Counter[str | float]
    sent: Mapping[tuple[bytes, bytes], int]


def host_ms() -> int:
    """Read this host's clock, epoch milliseconds."""
    return time.time_ns() // 1_000_000


class Recent:
    """This process's last KEPT steps: a quarter of an hour."""

    def __init__(self, counters: Counters, now_ms: int) -> None:
        self._counters = counters
        self._at_ms = now_ms
        self._totals = self._now()
        self._sent = Counter(counters.released_to)
        self.steps: deque[Step] = deque(maxlen=KEPT)

    async def run(self, stopping: asyncio.Event) -> None:
        """End a step every five seconds until ``stopping`` is set."""
        while not await first_set(stopping, seconds=(STEP_MS - host_ms() % STEP_MS) / 1000):
            self.note(host_ms())

    def note(self, now_ms: int) -> None:
        """End a step, unless a step ended within the last five seconds. If the clock was set back, forget all earlier
        steps."""
        at_ms = now_ms // STEP_MS * STEP_MS
        if at_ms <= self._at_ms < at_ms + STEP_MS:
            return
        if at_ms < self._at_ms:
            self.steps.clear()
        totals, sent = self._now(), Counter(self._counters.released_to)
        most = dict((sent - self._sent).most_common(MOST_SENT))
        self.steps.append(Step(at_ms, totals - self._totals, most))
        self._at_ms, self._totals, self._sent = at_ms, totals, sent

    def _now(self) -> Counter[str | float]:
        """Count since the start of the process, in the form of a step."""
        counts = self._counters.as_dict()
        totals: Counter[str | float] = Counter({kind: counts[kind] for kind in RATE_KINDS})
        for tally in self._counters.lateness.values():
            totals.update(dict(zip(LATENESS, tally.below, strict=True)))
            totals.update({"late": tally.count, "total": tally.total})
        return totals


def quantile(share: float, below: Sequence[int], count: int, total: float = inf) -> float | None:
    """Return the lateness in seconds that ``share`` of the messages did not exceed, None without messages.

    Interpolates between two bounds of LATENESS, and limits the result so that the messages above it cannot exceed
    ``total``, the sum of all. Beyond the last bound, returns that bound.

    >>> quantile(0.5, [0, 0, 10, *[10] * (len(LATENESS) - 3)], 10)
    0.0175
    >>> quantile(0.99, [0] * (len(LATENESS) - 1) + [1], 1, total=50_000.0)
    50000.0
    """
    if not count:
        return None
    rank = share * count
    most = total / (count - ceil(rank) + 1)
    low, have = 0.0, 0
    for bound, under in zip(LATENESS, below, strict=True):
        if under >= rank:
            found = low + (bound - low) * ((rank - have) / (under - have) if under > have else 1.0)
            return max(low, min(found, most))
        low, have = bound, under
    return LATENESS[-1]


class Summary(NamedTuple):
    """Rates per second and lateness in seconds, over the last ``seconds``."""

    seconds: float
    rates: Mapping[str, float]
    p50: float | None
    p99: float | None
    worst: float | None
    """No message exceeded it, if it is below the last bound of LATENESS."""


def summary(of: Sequence[Step], seconds: float) -> Summary:
    """Sum up the last ``seconds`` of these steps, or all if there are fewer."""
    last = _last(of, seconds)
    long = max(len(last), 1) * STEP_MS / 1000
    counts: Counter[str | float] = Counter()
    for one in last:
        counts.update(one.counts)
    rates = {kind: counts[kind] / long for kind in RATE_KINDS}
    return Summary(long, rates, *(_lateness(counts, share) for share in (0.5, 0.99, 1.0)))


def sent_rates(of: Sequence[Step], seconds: float) -> dict[tuple[bytes, bytes], float]:
    """Compute the messages per second that this process released to each destination in the last ``seconds``. Outside a
    step's MOST_SENT, a destination counts as zero in that step."""
    last = _last(of, seconds)
    totals: Counter[tuple[bytes, bytes]] = Counter()
    for one in last:
        totals.update(one.sent)
    return {target: count / (len(last) * STEP_MS / 1000) for target, count in totals.items()}


def series(of: Sequence[Step]) -> dict[str, list[float | None]]:
    """Build a chart's columns: instants in seconds, rates, lateness in milliseconds."""
    columns: dict[str, list[float | None]] = {"t": [one.at_ms / 1000 for one in of]}
    columns |= {kind: [one.counts[kind] * 1000 / STEP_MS for one in of] for kind in RATE_KINDS}
    for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99)):
        found = [_lateness(one.counts, share) for one in of]
        columns[name] = [None if value is None else round(value * 1000, 1) for value in found]
    return columns


def _last(of: Sequence[Step], seconds: float) -> Sequence[Step]:
    return of[-max(1, round(seconds * 1000 / STEP_MS)) :]


def _lateness(counts: Counter[str | float], share: float) -> float | None:
    return quantile(share, [int(counts[bound]) for bound in LATENESS], int(counts["late"]), counts["total"])
