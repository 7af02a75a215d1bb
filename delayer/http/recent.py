"""Rates, lateness, and what was slow in the last minutes, from this process's counters every five seconds."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Final, NamedTuple

from delayer.core.counters import DURATIONS, LATENESS, SECONDS, Counters, Tally
from delayer.retry import first_set

STEP_MS: Final = 5_000
MOST_SENT: Final = 50
KEPT: Final = 180
"""How many steps are kept."""
RATE_KINDS: Final = ("parked", "released", "cascaded", "refused", "held")


Histogram = Counter[str | float]
"""The values within each bound of a tally, their number as "count", and their sum as "total"."""
LAG_SECONDS: Final = 0.05
"""The pace at which the lag of the event loop is measured: a stall that is longer is never missed."""


class Step(NamedTuple):
    """The counts of one step over all routes. ``at_ms``: its end. ``counts``: of RATE_KINDS. ``durations``: of
    DURATIONS. ``sent``: the MOST_SENT largest destinations, with their counts."""

    at_ms: int
    counts: Counter[str]
    lateness: Histogram
    durations: Mapping[str, Histogram]
    sent: Mapping[tuple[bytes, bytes], int]


def host_ms() -> int:
    """Read this host's clock, epoch milliseconds."""
    return time.time_ns() // 1_000_000


class Recent:
    """This process's last KEPT steps: a quarter of an hour."""

    def __init__(self, counters: Counters, now_ms: int) -> None:
        self._counters = counters
        self._before = self._now(now_ms)
        self.steps: deque[Step] = deque(maxlen=KEPT)

    async def run(self, stopping: asyncio.Event) -> None:
        """End a step every five seconds until ``stopping`` is set."""
        while not await first_set(stopping, seconds=(STEP_MS - host_ms() % STEP_MS) / 1000):
            self.note(host_ms())

    def note(self, now_ms: int) -> None:
        """End a step, unless a step ended within the last five seconds. If the clock was set back, forget all earlier
        steps."""
        at_ms = now_ms // STEP_MS * STEP_MS
        before = self._before
        if at_ms <= before.at_ms < at_ms + STEP_MS:
            return
        if at_ms < before.at_ms:
            self.steps.clear()
        now = self._now(at_ms)
        durations = {name: one - before.durations[name] for name, one in now.durations.items()}
        most = dict((Counter(now.sent) - Counter(before.sent)).most_common(MOST_SENT))
        self.steps.append(Step(at_ms, now.counts - before.counts, now.lateness - before.lateness, durations, most))
        self._before = now

    def _now(self, at_ms: int) -> Step:
        """Count since the start of the process, in the form of a step, with all destinations."""
        counters, lateness = self._counters, Histogram()
        counts = counters.as_dict()
        for tally in counters.lateness.values():
            lateness.update(_histogram(tally))
        return Step(
            at_ms,
            Counter({kind: counts[kind] for kind in RATE_KINDS}),
            lateness,
            {name: _histogram(tally) for name, tally in counters.seconds.items()},
            Counter(counters.released_to),
        )


async def measure_lag(counters: Counters, stopping: asyncio.Event) -> None:
    """Count how much later than asked the event loop ran a timer, every LAG_SECONDS until ``stopping`` is set."""
    clock = asyncio.get_running_loop().time
    due = clock() + LAG_SECONDS
    while not await first_set(stopping, seconds=due - clock()):
        now = clock()
        counters.took("loop_lag", max(now - due, 0.0))
        due = now + LAG_SECONDS


def _histogram(tally: Tally) -> Histogram:
    return Histogram(dict(zip(tally.bounds, tally.below, strict=True)) | {"count": tally.count, "total": tally.total})


def quantile(share: float, histogram: Histogram, bounds: Sequence[float]) -> float | None:
    """Return the value in seconds that ``share`` of all did not exceed, None without values.

    Interpolates between two bounds, and limits the result so that the values above it cannot exceed the sum of all.
    Beyond the last bound, returns that bound.

    >>> quantile(0.5, Histogram({0.01: 0, 0.025: 10, 0.05: 10, "count": 10, "total": 0.2}), (0.01, 0.025, 0.05))
    0.0175
    >>> quantile(0.99, Histogram({1.0: 0, 9.0: 1, "count": 1, "total": 5.0}), (1.0, 9.0))
    5.0
    """
    count = histogram["count"]
    if not count:
        return None
    rank = share * count
    most = histogram["total"] / (count - ceil(rank) + 1)
    low, have = 0.0, 0
    for bound in bounds:
        under = histogram[bound]
        if under >= rank:
            found = low + (bound - low) * ((rank - have) / (under - have) if under > have else 1.0)
            return max(low, min(found, most))
        low, have = bound, under
    return bounds[-1]


class Summary(NamedTuple):
    """Rates per second, and lateness and durations in seconds, over the last ``seconds``."""

    seconds: float
    rates: Mapping[str, float]
    p50: float | None
    p99: float | None
    worst: float | None
    """No message exceeded it, if it is below the last bound of LATENESS."""
    slowest: Mapping[str, float | None]
    """The longest of each of DURATIONS, up to the next bound of SECONDS, in seconds."""


def summary(of: Sequence[Step], seconds: float) -> Summary:
    """Sum up the last ``seconds`` of these steps, or all if there are fewer."""
    last = _last(of, seconds)
    long = max(len(last), 1) * STEP_MS / 1000
    counts: Counter[str] = Counter()
    lateness, durations = Histogram(), {name: Histogram() for name in DURATIONS}
    for one in last:
        counts.update(one.counts)
        lateness.update(one.lateness)
        for name, sum_of in durations.items():
            sum_of.update(one.durations[name])
    rates = {kind: counts[kind] / long for kind in RATE_KINDS}
    p50, p99, worst = (quantile(share, lateness, LATENESS) for share in (0.5, 0.99, 1.0))
    return Summary(long, rates, p50, p99, worst, {name: quantile(1.0, of, SECONDS) for name, of in durations.items()})


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
        found = [quantile(share, one.lateness, LATENESS) for one in of]
        columns[name] = [None if value is None else round(value * 1000, 1) for value in found]
    return columns


def _last(of: Sequence[Step], seconds: float) -> Sequence[Step]:
    return of[-max(1, round(seconds * 1000 / STEP_MS)) :]
