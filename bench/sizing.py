"""What a fleet needs, on paper: cores, memory, rows and bytes from the slopes of one run. Pure.

CPU a message falls with the rate, because more messages share a transaction and a confirm. So each rate is reckoned
with the nearest rate that was measured and kept up with; far beyond the highest one, with what parking and releasing in
bulk cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bench.figures import Figure, Result

PARTS = ("daemon", "broker", "database")
RATES = (1_000, 10_000, 100_000)
SMALL, LARGE = 512, 4096
BUSY = 0.6
"""Share of a core that is reckoned with: waiting grows steeply above it, and a burst has to fit as well."""
REACH = 3
"""Times the highest rate measured: as far as its cost is taken to hold."""
BEHIND_MS = 1000.0
WRITTEN = 2
"""Times that Postgres writes a row at the least: into its log, and into table and index."""
BILLION = 1_000_000_000
DELAYS_S = {"an hour": 3600, "a day": 86_400, "30 days": 30 * 86_400}


class Slopes(NamedTuple):
    """Microseconds of CPU a message, in and out together, by part; and where they come from."""

    cpu_us: dict[str, float]
    source: str


def slopes(result: Result, rate: int, body: int = SMALL) -> Slopes:
    """Raises ValueError where the run lacks steady, park or release.

    Steady traffic was measured with small bodies only: what larger ones cost more is taken from park and release.
    """
    measured = sorted(one.at["rate"] for one in result.all("steady", "lateness p50") if _kept_up(result, one))
    if not measured:
        raise ValueError("the run has no steady rates")
    bulk = _bulk(result, body)
    if rate > REACH * measured[-1]:
        return Slopes(bulk, "in bulk")
    nearest = min(measured, key=lambda one: abs(math.log(one / rate)))
    more = {part: cost - small for (part, cost), small in zip(bulk.items(), _bulk(result).values(), strict=True)}
    cpu_us = {part: _cpu(result, "steady", part, rate=nearest) + more[part] for part in PARTS}
    return Slopes(cpu_us, f"at {nearest:,}/s" + ("" if body == SMALL else ", and what such bodies cost more in bulk"))


def _bulk(result: Result, body: int = SMALL) -> dict[str, float]:
    return {part: sum(_cpu(result, what, part, body=body) for what in ("park", "release")) for part in PARTS}


def _kept_up(result: Result, lateness: Figure) -> bool:
    """A daemon that fell behind used less CPU a message than it owed; and with a publisher that did, it had fewer to do
    than the rate says."""
    publisher = result.find("steady", "publisher behind its plan, at most", **lateness.at)
    late_ms = max(lateness.value, publisher.value if publisher is not None else 0.0)
    return late_ms < BEHIND_MS and not lateness.at["backlog"]


def _cpu(result: Result, section: str, part: str, **at: int) -> float:
    figure = result.find(section, f"CPU of {part}", backlog=0, **at)
    if figure is None:
        raise ValueError(f"the run does not say what the {part} used in {section}")
    return figure.value


def cores(rate: float, cpu_us: float) -> float:
    return rate * cpu_us / 1e6 / BUSY


def limits(result: Result) -> Iterator[str]:
    """Lines of Markdown: what the cores of the machine could do at most, by the CPU that a message takes."""
    there = int(str(result.about["machine"]).split()[0])
    yield f"| | CPU of daemon, broker and database together | {there} cores end at | measured, of that |"
    yield "|---|---|---|---|"
    for section in ("park", "release"):
        for body in (SMALL, LARGE):
            spent = sum(_cpu(result, section, part, body=body) for part in PARTS)
            rate = result.find(section, section, body=body, backlog=0)
            if rate is None:
                raise ValueError(f"the run has no rate of {section} with {body} bytes")
            most = there * 1e6 / spent
            yield f"| {section}, {body:,} B | {spent:.1f} µs/msg | {most:,.0f} msg/s | {rate.value / most:.2f} |"


def fleets(result: Result) -> Iterator[str]:
    """Lines of Markdown: cores by rate and body, in store mode."""
    yield "| store mode: messages a second, in and out | daemon | broker | database | together | from the cost |"
    yield "|---|---|---|---|---|---|"
    for body in (SMALL, LARGE):
        for rate in RATES:
            cpu_us, source = slopes(result, rate, body)
            needed = {part: cores(rate, spent) for part, spent in cpu_us.items()}
            told = [_daemon(needed["daemon"]), *(f"{needed[part]:.1f} cores" for part in PARTS[1:])]
            told.append(f"{sum(needed.values()):.1f} cores")
            yield f"| {rate:,} of {body:,} B | " + " | ".join(told) + f" | {source} |"


def _daemon(needed: float) -> str:
    workers = math.ceil(needed)
    return f"{workers} process{'es' if workers > 1 else ''} ({needed:.1f} cores)"


def native(result: Result) -> Iterator[str]:
    """Lines of Markdown: between what entering the cascade costs in bulk, and whole trips at a low rate."""
    entry, trip = (_native(result, trips=trips) for trips in (False, True))
    yield "| native mode: messages a second of 512 B | daemon | broker |"
    yield "|---|---|---|"
    for rate in RATES[:2]:  # far beyond them nothing was measured that would bear it
        told = (f"{cores(rate, entry[part]):.1f} to {cores(rate, trip[part]):.1f} cores" for part in PARTS[:2])
        yield f"| {rate:,} | " + " | ".join(told) + " |"


def _native(result: Result, *, trips: bool) -> dict[str, float]:
    found = {}
    for part in PARTS[:2]:
        costs = [one for one in result.all("native", f"CPU of {part}") if ("rate" in one.at) is trips]
        if not costs:
            raise ValueError(f"the run does not say what the {part} used in native mode")
        found[part] = costs[0].value
    return found


def memory(result: Result) -> Iterator[str]:
    """Lines of Markdown: what daemons had of memory at most."""
    ones = [one for one in result.figures if one.what == "memory of daemon"]
    large = [one for one in ones if one.section == "bodies"]
    small = [one for one in ones if one.section != "bodies"]
    shared = sorted(result.all("processes", "memory of all"), key=lambda one: one.at["workers"])
    if not small or len(shared) < 2:
        raise ValueError("the run does not say how much memory daemons used")
    most = max(small, key=lambda one: one.value)
    few, many = shared[0], shared[-1]
    each = (many.value - few.value) / (many.at["workers"] - few.at["workers"])
    yield "| memory, resident, at most | |"
    yield "|---|---|"
    yield f"| one daemon, in all sections but *bodies* | {most.value:.0f} MB (in *{most.section}*) |"
    for one in large:
        yield f"| one daemon, {one.at['count']:,} bodies of {one.at['body'] / 1e6:g} MB | {one.value:.0f} MB |"
    yield f"| each further process, with its share of the supervisor | {each:.0f} MB |"


class Row(NamedTuple):
    """Bytes that a waiting message of 512 bytes takes on disk; ``said`` is so in words."""

    size: float
    said: str


def row(size: Result) -> Row:
    """From the store as it was filled; in a run that does not tell that, from the store as its other sections left it,
    which is too much. Raises ValueError."""
    for name, most in (("size of the store, as filled", ""), ("size of the store", "at most ")):
        if filled := [one for one in size.all("start", name) if one.at["backlog"]]:
            large = max(filled, key=lambda one: one.at["backlog"])
            each = large.value * 1e6 / large.at["backlog"]
            return Row(each, f"{most}{each:,.0f} bytes a row")
    raise ValueError("the run does not say how large the store was")


def waiting(size: Result) -> Iterator[str]:
    """Lines of Markdown: how many messages wait, and their disk: rate times delay."""
    each, said = row(size)
    heads = [f"waiting, at {said}, after a mean delay of", *DELAYS_S, "written by the store, at least"]
    yield _line(heads)
    yield "|---" * len(heads) + "|"
    for rate in RATES:
        rows = (rate * seconds for seconds in DELAYS_S.values())
        told = (f"{_millions(count)}, {_bytes(count * each)}" for count in rows)
        yield _line([f"{rate:,} a second", *told, f"{_bytes(WRITTEN * rate * each)}/s"])


def _line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def _millions(count: float) -> str:
    return f"{count / 1e6:,.3g} M" if count < BILLION else f"{count / 1e9:,.3g} billion"


def _bytes(count: float) -> str:
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1, "B"))
    return next(f"{count / unit:,.3g} {name}" for unit, name in units if count >= unit)


def billion(result: Result) -> Iterator[str]:
    """Lines of Markdown: what a billion rows of 512 bytes take."""
    each, said = row(result)
    copied = result.find("ceilings", "store copy", body=SMALL)
    yield "| a billion messages of 512 bytes | |"
    yield "|---|---|"
    yield f"| disk, indexes included ({said}) | {each * BILLION / 1e12:.2f} TB |"
    if copied is not None:
        hours = BILLION / copied.value / 3600
        yield f"| to `COPY` them in at the rate of this machine, {copied.value / 1000:,.0f} k rows/s | {hours:.1f} h |"
    drain = result.find("release", "release", body=SMALL, backlog=0)
    if drain is not None:
        yield f"| to release them all at the rate of this machine | {BILLION / drain.value / 3600:.1f} h |"
