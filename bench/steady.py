"""Steady traffic, the same rate in and out, with delays of mixed lengths: lateness, CPU a message, memory.

The measurement begins when the longest delay has passed: before that, more arrives than leaves.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from bench.figures import median
from bench.marks import BROKER_HEADER, DAEMON_HEADER, RELATIVE_HEADER
from bench.meter import peak_mb
from bench.rows import KEY
from bench.run import Bench
from bench.servers import BROKER, IN, INBOX, Place, Servers, running_servers
from bench.traffic import Helper

SIZE = 512
LEAD_SECONDS = 1.2
"""Time for the helpers to start."""
PATIENCE_SECONDS = 20.0
LATENESS = (("p50", "0.5"), ("p99", "0.99"), ("p99.9", "0.999"))
TOO_LATE_MS = 1000.0
"""If half of the messages are so late, the machine is too small for that rate."""
STAMPS = {"message_interceptors.incoming.set_header_timestamp.overwrite": "false"}
"""With it the broker adds the time at which it received a message, and a relative delay is measured from that."""


@dataclass
class Steady:
    """The result of one run of steady traffic. CPU is in microseconds a message, in and out together."""

    sent: int
    seen: dict[str, Any]
    published: dict[str, Any]
    cpu_us: dict[str, float]
    memory_mb: float

    @property
    def missing(self) -> int:
        """Missing messages by their numbers: a repeat does not hide a loss."""
        return int(max(self.sent - self.seen["came"], 0))


async def once(
    place: Place, rate: int, seconds: int, delays_ms: tuple[int, int, int], *, header: str = DAEMON_HEADER
) -> Steady:
    """A daemon under ``rate`` messages a second, measured for ``seconds`` once the longest delay is over.

    ``delays_ms``: shortest, longest, step.
    """
    async with place.daemon() as daemon:
        await daemon.ready()
        steady = await under_load(place, daemon.pid, rate, seconds, delays_ms, header=header)
        await daemon.stop()
    return steady


async def in_memory(
    place: Place, rate: int, seconds: int, delays_ms: tuple[int, int, int], *, header: str = DAEMON_HEADER
) -> Steady:
    """The same load on a minimal relay: our AMQP client, and a heap instead of a store."""
    place.fresh_inbox()
    lasts = 2 * delays_ms[1] / 1000 + seconds + 5
    order = {"url": place.broker_url, "queue": "delays", "prefetch": 5000, "seconds": lasts}
    with Helper("in_memory", order, "bench.rivals") as relay:
        return await under_load(place, relay.pid, rate, seconds, delays_ms, header=header)


async def under_load(
    place: Place, pid: int | None, rate: int, seconds: int, delays_ms: tuple[int, int, int],
    *, header: str = DAEMON_HEADER, delaying: str = "",
) -> Steady:  # fmt: skip
    """Measure the relaying process ``pid`` and its children. ``delaying``: a queue whose messages RabbitMQ 4.4 itself
    delays; then there is no relaying process."""
    warm = delays_ms[1] / 1000 + 1
    start = time.time() + LEAD_SECONDS
    since, until = start + warm, start + warm + seconds
    count = round((warm + seconds) * rate)
    common = {"url": place.broker_url, "size": SIZE, "start": start, "rate": rate}
    load: dict[str, Any] = {"delays_ms": delays_ms, "seconds": warm + seconds}
    sending = load | {"exchange": IN, "key": KEY, "queue": "delays", "header": header}
    if delaying:
        sending |= {"exchange": "", "key": delaying, "queue": delaying, "header": BROKER_HEADER}
    reading = {"queue": delaying or INBOX, "count": count, "distinct": count, "patience": warm + PATIENCE_SECONDS}
    window: dict[str, Any] = {"since_ms": since * 1000, "until_ms": until * 1000}
    with Helper("consume", common | reading | window) as consumer, Helper("publish", common | sending) as publisher:
        await asyncio.sleep(since - time.time())
        relay = {} if pid is None else {"daemon": pid}
        meter = place.servers.meter(**relay, publisher=publisher.pid, consumer=consumer.pid)
        began = time.time()
        await asyncio.sleep(until - 0.05 - time.time())  # the publisher is gone a moment after its last message
        cpu, measured = meter.read(), time.time() - began
        memory = 0.0 if pid is None else peak_mb(pid)
        published, seen = await asyncio.gather(publisher.result(), consumer.result())
    used = {name: spent * 1e6 / (rate * measured) for name, spent in cpu.items()}
    return Steady(published["sent"], seen, published, used, memory)


async def alone(place: Place, rate: int, seconds: int) -> dict[str, Any]:
    """The lateness of messages of the same size and rate that go straight from the publisher through the destination
    queue to the consumer. No daemon can be more punctual through this broker on this machine."""
    place.fresh_inbox()
    start = time.time() + LEAD_SECONDS
    common = {"url": place.broker_url, "size": SIZE, "start": start, "rate": rate, "seconds": seconds}
    reading = {"queue": INBOX, "count": rate * seconds, "patience": PATIENCE_SECONDS}
    sending = {"exchange": "", "key": INBOX, "queue": INBOX}
    with Helper("consume", common | reading) as consumer, Helper("stamped", common | sending) as publisher:
        return dict((await asyncio.gather(publisher.result(), consumer.result()))[1])


async def run(bench: Bench) -> None:
    options = bench.options
    place = await bench.place(0)
    for rate in options.rates:
        bench.say(f"{rate:,} messages a second through the destination queue alone")
        seen = await alone(place, rate, options.steady_seconds)
        for name, share in LATENESS:
            bench.add(f"broker alone, lateness {name}", seen["late"][share], "ms", rate=rate, backlog=0)
        if options.quick:
            continue
        bench.say(f"{rate:,} messages a second through a relay without a store")
        # As long as the daemon itself: a broker starts a new log about once a minute, and is then late.
        floor = await in_memory(place, rate, options.steady_seconds, _delays(bench))
        for name, share in LATENESS:
            bench.add(f"without a store, lateness {name}", floor.seen["late"][share], "ms", rate=rate, backlog=0)
        for of in ("daemon", "broker"):
            name = "relay" if of == "daemon" else of
            bench.add(f"without a store, CPU of {name}", floor.cpu_us[of], "µs/msg", rate=rate, backlog=0)
    middle = 5000 if 5000 in options.rates else options.rates[0]
    turns = [(rate, 0) for rate in options.rates]
    if options.backlog and not options.quick:
        turns.append((middle, options.backlog))
    found: dict[tuple[int, int], list[Steady]] = {load: [] for load in turns}
    # One load after the other, and then all of them again: a slow minute must not hit one load only.
    for turn in range(options.repeats):
        for rate, backlog in turns:
            place = await bench.place(backlog)
            text = f"{rate:,} messages a second for {options.steady_seconds} s, {backlog:,} rows waiting"
            bench.say(f"{text}, turn {turn + 1}")
            found[rate, backlog].append(await once(place, rate, options.steady_seconds, _delays(bench)))
    for (rate, backlog), runs in found.items():
        report(bench, runs, rate=rate, backlog=backlog)
    if not options.quick:
        await _relative(bench, bench.servers, "relative delays")
        if bench.servers.broker.version >= (4,):
            async with running_servers(broker_settings=BROKER | STAMPS) as stamping:
                await _relative(bench, stamping, "relative delays, timestamp_in_ms by the broker")


async def _relative(bench: Bench, servers: Servers, what: str) -> None:
    rate, seconds = bench.options.rates[0], bench.options.steady_seconds
    for name, relay in ((f"{what} without a store", in_memory), (what, once)):
        bench.say(f"{rate:,} messages a second for {seconds} s, {name}")
        turn = await relay(await servers.place(), rate, seconds, _delays(bench), header=RELATIVE_HEADER)
        for share, quantile in LATENESS:
            bench.add(f"{name}, lateness {share}", turn.seen["late"][quantile], "ms", rate=rate, backlog=0)


def _delays(bench: Bench) -> tuple[int, int, int]:
    return 1000, bench.options.longest_delay * 1000, 1


def report(bench: Bench, turns: list[Steady], of_what: str = "", /, **at: int) -> None:
    """Report the medians of some turns, but the largest value of memory and of each kind of failure. ``of_what``: the
    beginning of each figure's name."""
    arrived = [turn for turn in turns if turn.seen["late"]]
    for name, share in (("p50", "0.5"), ("p99", "0.99"), ("p99.9", "0.999"), ("max", "1.0")):
        if arrived:
            bench.add(f"{of_what}lateness {name}", median([turn.seen["late"][share] for turn in arrived]), "ms", **at)
    if any(turn.seen["late"]["0.5"] > TOO_LATE_MS for turn in arrived):
        bench.note(f"{at}: more came in than went out; the CPU a message lacks the work left for later")
    bench.add(f"{of_what}early", max(turn.seen["early"] for turn in turns), "msg", **at)
    bench.add(f"{of_what}missing", max(turn.missing for turn in turns), "msg", **at)
    bench.add(f"{of_what}repeated", max(turn.seen["repeated"] for turn in turns), "msg", **at)
    for of in turns[0].cpu_us:
        bench.add(f"{of_what}CPU of {of}", median([turn.cpu_us[of] for turn in turns]), "µs/msg", **at)
    if "daemon" in turns[0].cpu_us:
        bench.add(f"{of_what}memory of daemon", max(turn.memory_mb for turn in turns), "MB", **at)
    behind = max(turn.published["behind_ms"] for turn in turns)
    bench.add(f"{of_what}publisher behind its plan, at most", behind, "ms", **at)
