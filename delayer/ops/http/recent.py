"""Rates and lateness of the last minutes: each process notes its counts every few seconds, and who looks subtracts.

Pure but for the part that notes. A process that was started in between begins with what it did since.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from delayer.core.tally import LATENESS
from delayer.services.counting import Counters, host_ms

STEP_MS: Final = 5_000
KEPT: Final = 181
"""Notes that are kept: a quarter of an hour, and the one before."""
KINDS: Final = ("parked", "released", "cascaded", "refused", "held")


class Note(NamedTuple):
    """What a process had done by the end of a step. ``below``, ``late``, ``late_ms`` of all routes together: how many
    messages were at most as late as each bound of LATENESS, how many there were, and the sum."""

    step: int
    counts: tuple[int, ...]
    below: tuple[int, ...]
    late: int


def note(counters: Counters, now_ms: int) -> Note:
    """What ``counters`` say now."""
    counts = counters.as_dict()
    tallies = list(counters.lateness.values())
    below = tuple(sum(tally.below[at] for tally in tallies) for at in range(len(LATENESS)))
    return Note(now_ms // STEP_MS, tuple(counts[kind] for kind in KINDS), below, sum(tally.count for tally in tallies))


class Recent:
    """The notes of this process."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.notes: deque[Note] = deque([note(counters, host_ms())], KEPT)

    async def run(self, stopping: asyncio.Event) -> None:
        """Note until stopping is set."""
        while not stopping.is_set():
            try:
                await asyncio.wait_for(stopping.wait(), (STEP_MS - host_ms() % STEP_MS) / 1000)
            except TimeoutError:
                now = note(self._counters, host_ms())
                if now.step > self.notes[-1].step:
                    self.notes.append(now)


class Step(NamedTuple):
    """What all workers did in one step. Lateness in seconds; None where nothing was delivered."""

    at_ms: int
    counts: Mapping[str, int]
    below: Sequence[int]
    late: int


def steps(workers: Iterable[Sequence[Sequence[Any]]]) -> list[Step]:
    """The steps of several workers' notes, one after another without a gap, the last one that is over at the end."""
    summed: dict[int, tuple[list[int], list[int], int]] = {}
    for notes in workers:
        for before, after in pairwise(notes):
            counts, below, late = summed.setdefault(after[0], ([0] * len(KINDS), [0] * len(LATENESS), 0))
            counts[:] = [have + new - old for have, new, old in zip(counts, after[1], before[1], strict=True)]
            below[:] = [have + new - old for have, new, old in zip(below, after[2], before[2], strict=True)]
            summed[after[0]] = (counts, below, late + after[3] - before[3])
    if not summed:
        return []
    empty: tuple[list[int], list[int], int] = ([0] * len(KINDS), [0] * len(LATENESS), 0)
    found = []
    for step in range(min(summed), max(summed) + 1):
        counts, below, late = summed.get(step, empty)
        found.append(Step(step * STEP_MS, dict(zip(KINDS, counts, strict=True)), below, late))
    return found


def quantile(share: float, below: Sequence[int], count: int) -> float | None:
    """The lateness that ``share`` of the messages did not exceed, in seconds, by the bounds of LATENESS; straight
    between two of them. None of no messages; the last bound for what is behind it.

    >>> quantile(0.5, [0, 0, 10, *[10] * 13], 10)
    0.0175
    """
    if not count:
        return None
    rank = share * count
    low, have = 0.0, 0
    for bound, under in zip(LATENESS, below, strict=True):
        if under >= rank:
            return low + (bound - low) * ((rank - have) / (under - have) if under > have else 1.0)
        low, have = bound, under
    return LATENESS[-1]


class Summary(NamedTuple):
    """Rates a second, and lateness in seconds, over the last ``seconds``."""

    seconds: float
    rates: Mapping[str, float]
    p50: float | None
    p99: float | None
    worst: float | None
    """A bound that none of them exceeded."""


def summary(of: Sequence[Step], seconds: float) -> Summary:
    """Of the last ``seconds`` of these steps; of fewer, where there are not so many yet."""
    last = of[-max(1, round(seconds * 1000 / STEP_MS)) :]
    long = max(len(last), 1) * STEP_MS / 1000
    rates = {kind: sum(one.counts[kind] for one in last) / long for kind in KINDS}
    below = [sum(one.below[at] for one in last) for at in range(len(LATENESS))]
    count = sum(one.late for one in last)
    worst = quantile(1.0, below, count)
    return Summary(long, rates, quantile(0.5, below, count), quantile(0.99, below, count), worst)


def series(of: Sequence[Step]) -> dict[str, list[float | None]]:
    """For a chart: instants in seconds, rates, and lateness in milliseconds, a column each."""
    scale = 1000 / STEP_MS
    columns: dict[str, list[float | None]] = {"t": [one.at_ms / 1000 for one in of]}
    columns |= {kind: [one.counts[kind] * scale for one in of] for kind in KINDS}
    for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99)):
        found = [quantile(share, one.below, one.late) for one in of]
        columns[name] = [None if value is None else round(value * 1000, 1) for value in found]
    return columns
