"""What a fleet needs, on paper: cores and disk from the slopes of one run. Pure.

CPU a message falls with the rate, because more messages share a transaction and a confirm. So each rate is reckoned
with the nearest rate that was measured and kept up with; far beyond the highest one, with what parking and releasing in
bulk cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from bench.figures import Figure, Result

PARTS = ("daemon", "broker", "database")
RATES = (1_000, 10_000, 100_000)
BUSY = 0.6
"""Share of a core that is reckoned with: waiting grows steeply above it, and a burst has to fit as well."""
REACH = 3
"""Times the highest rate measured: as far as its cost is taken to hold."""
BEHIND_MS = 1000.0
BILLION = 1_000_000_000


class Slopes(NamedTuple):
    """Microseconds of CPU a message, in and out together, by part; and where they come from."""

    cpu_us: dict[str, float]
    source: str


def slopes(result: Result, rate: int) -> Slopes:
    """Raises ValueError where the run lacks steady, park or release."""
    measured = sorted(one.at["rate"] for one in result.all("steady", "lateness p50") if _kept_up(one))
    if not measured:
        raise ValueError("the run has no steady rates")
    if rate > REACH * measured[-1]:
        bulk = {part: _cpu(result, "park", part) + _cpu(result, "release", part) for part in PARTS}
        return Slopes(bulk, "in bulk")
    nearest = min(measured, key=lambda one: abs(math.log(one / rate)))
    return Slopes({part: _cpu(result, "steady", part, rate=nearest) for part in PARTS}, f"at {nearest:,}/s")


def _kept_up(lateness: Figure) -> bool:
    """A daemon that fell behind used less CPU a message than it owed."""
    return lateness.value < BEHIND_MS and not lateness.at["backlog"]


def _cpu(result: Result, section: str, part: str, **at: int) -> float:
    body = {} if section == "steady" else {"body": 512}
    figure = result.find(section, f"CPU of {part}", backlog=0, **body, **at)
    if figure is None:
        raise ValueError(f"the run does not say what the {part} used in {section}")
    return figure.value


def fleets(result: Result) -> Iterator[str]:
    """Lines of Markdown: cores by rate."""
    yield "| messages a second, in and out | daemon | broker | database | from the cost |"
    yield "|---|---|---|---|---|"
    for rate in RATES:
        cpu_us, source = slopes(result, rate)
        cores = {part: rate * spent / 1e6 / BUSY for part, spent in cpu_us.items()}
        workers = math.ceil(cores["daemon"])
        noun = "process" if workers == 1 else "processes"
        told = [f"{workers} {noun} ({cores['daemon']:.1f} cores)", *(f"{cores[part]:.1f} cores" for part in PARTS[1:])]
        yield f"| {rate:,} | " + " | ".join(told) + f" | {source} |"


def billion(result: Result) -> Iterator[str]:
    """Lines of Markdown: what a billion rows of 512 bytes take."""
    size = max(result.all("start", "size of the store"), key=lambda one: one.at["backlog"], default=None)
    if size is None:
        raise ValueError("the run does not say how large the store was")
    row_bytes = size.value * 1e6 / size.at["backlog"]
    copied = result.find("ceilings", "store copy", body=512)
    yield "| a billion messages of 512 bytes | |"
    yield "|---|---|"
    yield f"| disk, indexes included ({row_bytes:,.0f} bytes a row) | {row_bytes * BILLION / 1e12:.2f} TB |"
    if copied is not None:
        hours = BILLION / copied.value / 3600
        yield f"| to `COPY` them in at the rate of this machine, {copied.value / 1000:,.0f} k rows/s | {hours:.1f} h |"
    drain = result.find("release", "release", body=512, backlog=0)
    if drain is not None:
        yield f"| to release them all at the rate of this machine | {BILLION / drain.value / 3600:.1f} h |"
