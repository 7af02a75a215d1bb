"""Every stall has a cause: deliveries later than 50 ms, attributed by evidence of the same run.

Steady traffic runs through the daemon, and then for as long through the broker alone, so that both meet the broker's
new log files. Probes run beside it: a confirmed publish into a queue of its own, a commit of one row, and a process
that only sleeps. Postgres logs its checkpoints, lock waits and slow commits, and the daemon its long durations
(bench/traced.py). bench/evidence.py has the rule. Each stall becomes a line in a file of JSON lines, with its evidence.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NamedTuple

from bench.evidence import LATE_MS, Share, Span, Stall, cause_of, merged, of_postgres, shares, stalls, weigh
from bench.figures import median
from bench.mixture import LEAD_SECONDS, sent_in
from bench.rows import KEY
from bench.run import Bench
from bench.servers import IN, INBOX, POSTGRES, Place, running_servers
from bench.steady import SIZE
from bench.traffic import Helper
from tests.support.daemon import DaemonProcess

LOGGED: Mapping[str, str | int] = {
    **POSTGRES,
    "checkpoint_timeout": "5min",
    "log_checkpoints": "on",
    "log_lock_waits": "on",
    "deadlock_timeout": f"{LATE_MS:.0f}ms",
    "log_min_duration_statement": f"{LATE_MS:.0f}ms",
}
"""The time between checkpoints is the default of Postgres again, so that an hour has twelve of them."""
ALONE, DAEMON = "broker alone", "delayer"


class Attributed(NamedTuple):
    """A stall, its evidence by kind in milliseconds, its cause, and the kind that decided."""

    stall: Stall
    evidence: dict[str, float]
    cause: str
    by: str


class Turn(NamedTuple):
    """One load at one rate. ``steps`` are the consumer's lines."""

    seen: dict[str, Any]
    steps: list[dict[str, Any]]
    spans: list[Span]
    probes: dict[str, float]
    """The median of each probe, in milliseconds."""

    def attributed(self) -> list[Attributed]:
        """Each stall with its evidence and its cause."""
        spans = merged(self.spans)
        found = ((one, weigh(one, spans)) for one in stalls(map(tuple, self.seen["later"])))
        return [Attributed(stall, evidence, *cause_of(stall, evidence)) for stall, evidence in found]


async def turn(bench: Bench, place: Place, what: str, rate: int, trace: Path | None = None) -> Turn:
    """The load for ``stall_seconds`` after the warm-up, with all probes."""
    longest = bench.options.longest_delay if what == DAEMON else 0
    start = time.time() + LEAD_SECONDS
    seconds = longest + 1 + bench.options.stall_seconds
    common = {"url": place.broker_url, "start": start, "rate": rate, "seconds": seconds, "size": SIZE}
    patience = LEAD_SECONDS + longest + bench.options.patience
    reading = {"queue": INBOX, "step": bench.options.hours_step, "patience": patience,
               "later_ms": LATE_MS, "since_ms": (start + longest + 1) * 1000}  # fmt: skip
    if what == DAEMON:
        sending = {"exchange": IN, "key": KEY, "queue": "delays", "delays_ms": (1000, longest * 1000, 1)}
        verb, count = "publish", sent_in(rate, seconds)
    else:
        sending, verb, count = {"exchange": "", "key": INBOX, "queue": INBOX}, "stamped", 0
    place.fresh_inbox()
    probing = {"seconds": LEAD_SECONDS + seconds + longest}
    urls = {"broker": place.broker_url, "database": place.servers.postgres.url(), "machine": ""}
    async with AsyncExitStack() as stack:
        consumer = stack.enter_context(Helper("consume", common | reading | {"count": count}, "bench.mixture"))
        publisher = stack.enter_context(Helper(verb, common | sending))
        probes = {
            name: stack.enter_context(Helper(name, probing | {"url": url}, "bench.probes"))
            for name, url in urls.items()
        }
        answers = asyncio.gather(*(probe.result() for probe in probes.values()), publisher.result())
        steps = [line async for line in consumer.answers()]
        *probed, _ = await answers
    seen = steps.pop()
    spans = [Span(*one) for answer in probed for one in answer["spans"]]
    spans += [one for one in of_postgres(place.servers.postgres.log()) if one.end > start]
    if trace:
        spans += of_daemon(trace)
    medians = {name: answer["p50_ms"] for name, answer in zip(probes, probed, strict=True)}
    return Turn(seen, steps, spans, medians)


def of_daemon(trace: Path) -> list[Span]:
    """The long durations that the daemon recorded itself."""
    return [Span(*json.loads(line)) for line in trace.read_text().splitlines()]


async def through_daemon(bench: Bench, place: Place, rate: int) -> Turn:
    with TemporaryDirectory(prefix="delayer-stalls-") as directory:
        trace = Path(directory) / "trace"
        program = [sys.executable, "-m", "bench.traced", str(trace)]
        async with DaemonProcess({"HTTP__LISTEN": ""}, config=place.config, program=program) as daemon:
            await daemon.ready()
            found = await turn(bench, place, DAEMON, rate, trace)
            await daemon.stop()
            return found


async def run(bench: Bench) -> None:
    with bench.writing_lines() as file:
        async with running_servers(LOGGED) as servers:
            for rate in bench.options.stall_rates:
                place = await servers.place()
                for what in (DAEMON, ALONE):
                    bench.say(f"{what}: {rate:,} messages a second for {bench.options.stall_seconds:,} s, with probes")
                    through = through_daemon(bench, place, rate) if what == DAEMON else turn(bench, place, what, rate)
                    found = await through
                    attributed = found.attributed()
                    write(file, what, rate, attributed)
                    report(bench, what, found, shares([(one.stall, one.cause) for one in attributed]), rate)


def write(file: IO[str], what: str, rate: int, attributed: list[Attributed]) -> None:
    """Write a line for each stall."""
    for stall, evidence, cause, by in attributed:
        told = {"turn": what, "rate": rate, "cause": cause, "by": by, **stall._asdict(), "evidence": evidence}
        file.write(json.dumps(told) + "\n")
    file.flush()


def report(bench: Bench, what: str, found: Turn, rows: list[Share], rate: int) -> None:
    """Lateness as the median of the minutes (``max``: of all), then a row for each cause."""
    bench.add(f"{what}, messages", found.seen["counted"], "msg", rate=rate)
    measured = [step for step in found.steps if "late_p50_ms" in step]
    if measured:
        for share, of_all in (("p50", median), ("p99", median), ("max", max)):
            value = of_all([step[f"late_{share}_ms"] for step in measured])
            bench.add(f"{what}, lateness {share}", value, "ms", rate=rate)
    for name, ms in found.probes.items():
        bench.add(f"{what}, probe of the {name}, p50", ms, "ms", rate=rate)
    for row in rows:
        bench.add(f"{what}, {row.cause}: deliveries", row.deliveries, "msg", rate=rate)
        bench.add(f"{what}, {row.cause}: stalls", row.stalls, "stalls", rate=rate)
        bench.add(f"{what}, {row.cause}: worst", row.worst_ms, "ms", rate=rate)
    if what == DAEMON:
        for kind in ("early", "missing", "repeated"):
            bench.add(f"{what}, {kind}", found.seen[kind], "msg", rate=rate)
