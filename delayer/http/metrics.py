"""Metrics for Prometheus, as families: this process's counts, and the last query of store and broker. Pure. METRICS is
the complete list; a test compares docs/metrics.md with it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from delayer import __version__
from delayer.config.model import Settings
from delayer.core import horizon
from delayer.core.counters import ROUTE_KINDS, Counters
from delayer.core.heartbeat import STUCK_SECONDS
from delayer.core.message import as_text
from delayer.http.view import DaemonState, Depths, Snapshot
from delayer.store.admin.census import COMPACTED, SCHEDULES, Census
from delayer.store.admin.stats import StoreOverview
from delayer.store.schedules.reading import ScheduleCounts

PREFIX: Final = "delayer_"


class MetricKind(NamedTuple):
    """A metric's type, labels separated by blanks, unit and meaning."""

    type: str
    labels: str
    unit: str
    help: str


_gauge, _histogram = partial(MetricKind, "gauge"), partial(MetricKind, "histogram")


def _counter(labels: str, text: str, unit: str = "messages") -> MetricKind:
    return MetricKind("counter", labels, unit, text)


METRICS: Final[Mapping[str, MetricKind]] = {
    # Per process.
    "build_info": _gauge("version", "1", "which version runs; always 1"),
    "start_time_seconds": _gauge("", "unix seconds", "when the process began"),
    "mode_info": _gauge("mode", "1", "where new delays go; always 1"),
    "ready": _gauge("", "0 or 1", "whether /health/ready answers 200"),
    "stalled_loops": _gauge("", "loops", "loops without progress; the watchdog ends the process"),
    "consuming": _gauge("queue", "0 or 1", "whether the queue is consumed"),
    "intake_active": _gauge(
        "", "0 or 1", "whether the intake's messages come to this process; 0: standby or not consuming"
    ),
    "connected": _gauge("connection", "0 or 1", "whether this connection to the broker is open"),
    "blocked": _gauge("connection", "0 or 1", "whether the broker blocks this connection (a resource alarm)"),
    "reconnects_total": _counter("connection", "reconnects of this connection", "connections"),
    "lanes": _gauge("", "lanes", "lanes that the daemon releases from"),
    "lanes_lost_total": _counter("", "lanes that were lost while messages were written to them", "lanes"),
    "parked_total": _counter("route", "messages written to the store"),
    "released_total": _counter("route", "messages published to their destination, and confirmed"),
    "cascaded_total": _counter("route", "messages published into the cascade, or delayed by the broker, and confirmed"),
    "refused_total": _counter("route", "messages set aside in the refused queue"),
    "held_total": _counter("route", "messages held because their destination did not take them"),
    "returned_total": _counter("route", "publishes that the broker returned, or refused by closing the channel"),
    "nacked_total": _counter("route", "publishes that a queue nacked"),
    "undelayed_total": _counter("route", "messages that arrived without a delay, not counting those that were refused"),
    "restored_total": _counter("", "messages restored from segments"),
    "broken_segments_total": _counter("", "segments found unreadable", "segments"),
    "lateness_seconds": _histogram(
        "route",
        "seconds",
        "from a message's due instant to its confirm; only for messages that arrived before it and were never held",
    ),
    "batch_messages": _histogram("stage", "messages", "messages in a batch, by the stage that processes it"),
    "claim_seconds": _histogram("", "seconds", "the time to claim due messages, if there were any, or to fail"),
    "settle_seconds": _histogram("", "seconds", "the time to settle and commit a release, or to fail"),
    "park_seconds": _histogram("", "seconds", "the time to write and commit a batch of new messages, or to fail"),
    "publish_seconds": _histogram("", "seconds", "the time that the broker took to confirm a batch, or to fail"),
    "loop_lag_seconds": _histogram("", "seconds", "the time by which the event loop ran a timer later than asked"),
    # Per store. Every daemon that queries it reports the same.
    "store_up": _gauge("", "0 or 1", "whether the last query of the store succeeded"),
    "store_schema_current": _gauge("", "0 or 1", "whether the store has the schema that this version needs"),
    "waiting_messages": _gauge("", "messages", "rows that wait in the store; exact"),
    "held_messages": _gauge("", "messages", "held messages; exact"),
    "inbox_messages": _gauge(
        "", "messages", "messages in the SQL inbox that no daemon has moved yet; at most 100,000; missing if unknown"
    ),
    "inbox_unread_seconds": _gauge(
        "", "seconds", "time since the oldest of them was sent, from 30 s on; 0 while a daemon reads them"
    ),
    "backlog_messages": _gauge(
        "route due", "messages", "waiting messages, by route and due time; large numbers are estimates"
    ),
    "next_due_timestamp_seconds": _gauge("", "unix seconds", "when the next row is due; missing if nothing waits"),
    "overdue_seconds": _gauge("", "seconds", "time since the next row was due; 0 if it is not due yet"),
    "store_lanes": _gauge("state", "lanes", "lanes with a living owner, and without"),
    "stuck_lanes": _gauge(
        "", "lanes", f"lanes that have had due messages for {STUCK_SECONDS:.0f} s without settling a claim"
    ),
    "unowned_messages": _gauge("", "messages", "rows that wait in lanes without a living owner"),
    "store_messages_total": _counter("kind", "changes of messages by all daemons since the store was created"),
    "segments": _gauge("state", "segments", "segments: all, broken ones, and those not restored in time"),
    "segment_messages": _gauge("state", "messages", "the messages in these segments"),
    "schedules": _gauge("state", "schedules", "schedules, by state"),
    "schedule_occurrences": _gauge(
        "kind", "messages", "occurrences of these schedules: sent, and missed; fewer once a schedule is removed"
    ),
    "schedule_late_seconds": _gauge("", "seconds", "the most by which the last occurrence of a schedule was late"),
    # Per broker. Every daemon that queries it reports the same.
    "broker_up": _gauge("", "0 or 1", "whether the last query of the broker's queues succeeded"),
    "queue_messages": _gauge(
        "queue role", "messages", "ready messages in delayer's own queues, by the role of the queue"
    ),
    "delayed_messages": _gauge(
        "queue", "messages", "messages that RabbitMQ itself delays or forwards, counted up to 12 s ago"
    ),
    "cascade_messages": _gauge("level", "messages", "messages waiting in a level of the cascade"),
    "look_age_seconds": _gauge("part", "seconds", "age of the figures of store, backlog, schedules and queues"),
}


@dataclass(frozen=True, slots=True)
class MetricSources:
    """The sources of one scrape; a registry of prometheus_client."""

    state: DaemonState
    store: Snapshot[StoreOverview] | None
    census: Snapshot[Census] | None
    depths: Snapshot[Depths]
    ready: bool
    roles: Mapping[str, str] = field(default_factory=dict)
    """Queue roles by name; queues not listed are strays queues."""
    schedules: Snapshot[ScheduleCounts] | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield every family of METRICS, in order, even without samples."""
        samples: dict[str, list[tuple[list[str], Any]]] = {name: [] for name in METRICS}
        for name, labels, value in _all(self):
            samples[name].append((labels, value))
        for name, kind in METRICS.items():
            yield _family(name, kind, samples[name])


def roles(settings: Settings) -> dict[str, str]:
    """Map queues to roles, for alert rules, because queues may have any name."""
    return {settings.refused.queue: "refused", settings.native.due_queue: "due", settings.intake.queue: "intake"}


MetricSample = tuple[str, list[str], Any]
GO_DOWN: Final = frozenset({"held", "compacted"})
"""Store counters that a cancel reduces, shown as gauges, because Prometheus would read a decrease as a restart."""


def _all(sight: MetricSources) -> Iterator[MetricSample]:
    yield "build_info", [__version__], 1
    yield "ready", [], int(sight.ready)
    yield "mode_info", [sight.state.mode], 1
    yield from _of_process(sight.state)
    ages = {"queues": sight.depths.age}
    yield from _of_broker(sight.depths, sight.roles)
    if sight.store is not None:
        yield from _of_store(sight.store)
        ages["store"] = sight.store.age
    if sight.census is not None:
        yield from _of_census(sight.census, sight.state.counters)
        ages["backlog"] = sight.census.age
    if sight.schedules is not None:
        yield from _of_schedules(sight.schedules)
        ages["schedules"] = sight.schedules.age
    yield from (("look_age_seconds", [part], age) for part, age in ages.items() if age is not None)


def _of_process(state: DaemonState) -> Iterator[MetricSample]:
    counters = state.counters
    yield "start_time_seconds", [], state.started_ms / 1000
    yield "stalled_loops", [], len(state.stalled)
    yield from (("consuming", [queue], int(is_)) for queue, is_ in state.consuming.items())
    yield "intake_active", [], int(state.intake == "active")
    for use, connection in state.connections.items():
        yield "connected", [use], int(connection.connected)
        yield "blocked", [use], int(connection.blocked)
        yield "reconnects_total", [use], max(connection.connects - 1, 0)
    if state.store:
        yield "lanes", [], len(state.lanes)
        yield "lanes_lost_total", [], counters.lanes_lost
    for kind in ROUTE_KINDS:
        # The counter begins at 0, because a counter that begins with its first message hides that message.
        named = {as_text(route): count for route, count in counters.routes[kind].items()}
        yield from ((f"{kind}_total", [route], n) for route, n in (dict.fromkeys(state.routes, 0) | named).items())
    yield "restored_total", [], counters.restored
    yield "broken_segments_total", [], counters.broken_segments
    yield from (("lateness_seconds", [as_text(route)], tally) for route, tally in counters.lateness.items())
    yield from (("batch_messages", [stage], tally) for stage, tally in counters.sizes.items())
    yield from ((f"{name}_seconds", [], tally) for name, tally in counters.seconds.items())


def _of_store(seen: Snapshot[StoreOverview]) -> Iterator[MetricSample]:
    yield "store_up", [], int(seen.fresh is not None)
    if seen.fresh is None:
        return
    overview = seen.fresh
    yield "store_schema_current", [], int(not overview.upgrade_pending)
    if overview.upgrade_pending:
        return
    yield "waiting_messages", [], overview.waiting
    yield "held_messages", [], overview.held
    if overview.inbox is not None:
        yield "inbox_messages", [], overview.inbox.messages
        yield "inbox_unread_seconds", [], overview.inbox.unread_ms / 1000
    if overview.next_due_ms is not None:
        yield "next_due_timestamp_seconds", [], overview.next_due_ms / 1000
    overdue_ms = 0 if overview.next_due_ms is None else max(overview.store_now_ms - overview.next_due_ms, 0)
    yield "overdue_seconds", [], overdue_ms / 1000
    for state, alive in (("owned", True), ("free", False)):
        yield "store_lanes", [state], sum(lane.alive is alive for lane in overview.lanes)
    yield "stuck_lanes", [], sum(lane.stuck_ms > 0 for lane in overview.lanes)
    yield "unowned_messages", [], sum(lane.waiting for lane in overview.lanes if not lane.alive)
    for kind, number in overview.counters.items():
        if kind not in GO_DOWN:
            yield "store_messages_total", [kind], number
    packed, late = overview.segments, overview.late
    for state, segments, messages in (
        ("all", packed.segments, packed.messages),
        ("broken", packed.broken, packed.broken_messages),
        ("late", late.segments, late.messages),
    ):
        yield "segments", [state], segments
        yield "segment_messages", [state], messages


def _of_census(seen: Snapshot[Census], counters: Counters) -> Iterator[MetricSample]:
    if seen.fresh is None:
        return
    found: defaultdict[tuple[bytes, str], float] = defaultdict(float)
    for route, counts in seen.fresh.by_route().items():
        name = route if route in (COMPACTED, SCHEDULES) else counters.name_of(route)
        for due, count in horizon.by_class(counts).items():
            found[name, due] += count
    yield from (("backlog_messages", [as_text(name), due], round(count)) for (name, due), count in found.items())


def _of_schedules(seen: Snapshot[ScheduleCounts]) -> Iterator[MetricSample]:
    if (counts := seen.fresh) is None:
        return
    yield from (("schedules", [state.value], number) for state, number in counts.states.items())
    yield "schedule_occurrences", ["sent"], counts.made
    yield "schedule_occurrences", ["missed"], counts.missed
    if counts.late_ms is not None:
        yield "schedule_late_seconds", [], max(counts.late_ms, 0) / 1000


def _of_broker(seen: Snapshot[Depths], of: Mapping[str, str]) -> Iterator[MetricSample]:
    yield "broker_up", [], int(seen.fresh is not None)
    if seen.fresh is None:
        return
    for queue, depth in seen.fresh.queues.items():
        if depth is not None:
            yield "queue_messages", [queue, of.get(queue, "strays")], depth
    yield from (("delayed_messages", [name], n) for name, n in seen.fresh.delayed.items() if n is not None)
    yield from (("cascade_messages", [str(n)], depth) for n, depth in seen.fresh.levels.items() if depth is not None)


def _family(name: str, kind: MetricKind, samples: Iterable[tuple[list[str], Any]]) -> Metric:
    named = PREFIX + name
    if kind.type == "histogram":
        histogram = HistogramMetricFamily(named, kind.help, labels=kind.labels.split())
        for labels, tally in samples:
            below = [(str(bound), count) for bound, count in zip(tally.bounds, tally.below, strict=True)]
            histogram.add_metric(labels, [*below, ("+Inf", tally.count)], tally.total)
        return histogram
    family = (CounterMetricFamily if kind.type == "counter" else GaugeMetricFamily)(
        named, kind.help, labels=kind.labels.split()
    )
    for labels, value in samples:
        family.add_metric(labels, value)
    return family
