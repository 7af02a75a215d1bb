"""Rates and lateness of the last minutes, from this process's counters every five seconds."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from math import ceil, inf
from typing import Final, NamedTuple

from delayer.core.counters import LATENESS, Counters

STEP_MS: Final = 5_000
MOST_SENT: Final = 50
RATE_KINDS: Final = ("parked", "released", "cascaded", "refused", "held")


class Step(NamedTuple):
    """The counts of one step, of all routes together. ``at_ms``: its end. ``below``: messages within each bound of
    LATENESS. ``late``: all delivered messages. ``total``: the sum of their lateness in seconds. ``sent``: the MOST_SENT
    destinations with the most messages, and the number of each."""

    at_ms: int
    counts: Mapping[str, int]
    below: Sequence[int]
    late: int
    total: float
    sent: Sequence[tuple[tuple[bytes, bytes], int]] = ()


def host_ms() -> int:
    """The clock of this host, epoch milliseconds."""
    return time.time_ns() // 1_000_000


class Recent:
    """The last ``kept`` steps of this process: 180 are a quarter of an hour."""

    def __init__(self, counters: Counters, now_ms: int, kept: int = 180) -> None:
        self._counters = counters
        self._at_ms = now_ms
        self._totals = self._now()
        self._sent = Counter(counters.released_to)
        self.steps: deque[Step] = deque(maxlen=kept)

    async def run(self, stopping: asyncio.Event) -> None:
        """End a step every five seconds until ``stopping`` is set."""
        while not stopping.is_set():
            try:
                await asyncio.wait_for(stopping.wait(), (STEP_MS - host_ms() % STEP_MS) / 1000)
            except TimeoutError:
                self.note(host_ms())

    def note(self, now_ms: int) -> None:
        """End a step, unless one has ended within these five seconds. If the clock was set back, forget all before."""
        at_ms = now_ms // STEP_MS * STEP_MS
        if at_ms <= self._at_ms < at_ms + STEP_MS:
            return
        if at_ms < self._at_ms:
            self.steps.clear()
        totals = self._now()
        *new, late, total = (now - before for now, before in zip(totals, self._totals, strict=True))
        counts = dict(zip(RATE_KINDS, map(int, new), strict=False))
        sent = Counter(self._counters.released_to)
        most = (sent - self._sent).most_common(MOST_SENT)
        self.steps.append(Step(at_ms, counts, list(map(int, new[len(RATE_KINDS) :])), int(late), total, most))
        self._sent = sent
        self._at_ms, self._totals = at_ms, totals

    def _now(self) -> list[float]:
        """The totals: of each kind, within each bound, all that were delivered, and the sum of their lateness."""
        counts, tallies = self._counters.as_dict(), list(self._counters.lateness.values())
        below = (sum(tally.below[at] for tally in tallies) for at in range(len(LATENESS)))
        late, total = sum(tally.count for tally in tallies), sum(tally.total for tally in tallies)
        return [*(counts[kind] for kind in RATE_KINDS), *below, late, total]


def quantile(share: float, below: Sequence[int], count: int, total: float = inf) -> float | None:
    """The lateness in seconds that ``share`` of the messages did not exceed, None without messages.

    The value is interpolated between two bounds of LATENESS. It is at most so high that the messages above it do not
    exceed ``total``, the sum of all. Beyond the last bound it is that bound.

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
    """Rates a second, and lateness in seconds, over the last ``seconds``."""

    seconds: float
    rates: Mapping[str, float]
    p50: float | None
    p99: float | None
    worst: float | None
    """No message exceeded it, if it is below the last bound of LATENESS."""


def summary(of: Sequence[Step], seconds: float) -> Summary:
    """The summary of the last ``seconds`` of these steps, or of all if there are fewer."""
    last = of[-max(1, round(seconds * 1000 / STEP_MS)) :]
    long = max(len(last), 1) * STEP_MS / 1000
    rates = {kind: sum(one.counts[kind] for one in last) / long for kind in RATE_KINDS}
    below = [sum(one.below[at] for one in last) for at in range(len(LATENESS))]
    count = sum(one.late for one in last)
    total = sum(one.total for one in last)
    p50, p99, worst = (quantile(share, below, count, total) for share in (0.5, 0.99, 1.0))
    return Summary(long, rates, p50, p99, worst)


def sent_rates(of: Sequence[Step], seconds: float) -> dict[tuple[bytes, bytes], float]:
    """The messages a second that this process released to each destination, over the last ``seconds``. A destination
    that is not among the MOST_SENT of a step has none in that step."""
    last = of[-max(1, round(seconds * 1000 / STEP_MS)) :]
    totals: Counter[tuple[bytes, bytes]] = Counter()
    for one in last:
        totals.update(dict(one.sent))
    return {target: count / (len(last) * STEP_MS / 1000) for target, count in totals.items()}


def series(of: Sequence[Step]) -> dict[str, list[float | None]]:
    """The columns of a chart: instants in seconds, rates, lateness in milliseconds."""
    scale = 1000 / STEP_MS
    columns: dict[str, list[float | None]] = {"t": [one.at_ms / 1000 for one in of]}
    columns |= {kind: [one.counts[kind] * scale for one in of] for kind in RATE_KINDS}
    for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99)):
        found = [quantile(share, one.below, one.late, one.total) for one in of]
        columns[name] = [None if value is None else round(value * 1000, 1) for value in found]
    return columns
