"""How far daemons scale: the rate at which each part of an installation is full, from the measured cost of a message.

Each part has a capacity of its own: seconds of CPU a second, the bytes a second of the disk with the log, or the turns
a second of what does one thing at a time (a lane, a queue). The cost of a message there is what it takes of that. The
installation stops at the smallest of these rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

CLAIMERS = 2
"""Claims of a lane that are open at the same time: one publishes while the other claims."""


@dataclass(frozen=True)
class Costs:
    """Of one message, in a daemon that is never idle. A publisher's message is parked, and later released."""

    publisher_us: float
    """CPU of the client that publishes at full speed; the others below are CPU, too."""
    broker_in_us: float
    """To take a message into `delays`, and to confirm it."""
    broker_park_us: float
    """To deliver it to the daemon."""
    daemon_park_us: float
    database_park_us: float
    daemon_release_us: float
    database_release_us: float
    broker_release_us: float
    """To take it into its destination, and to confirm it."""
    broker_out_us: float
    """To deliver it to its consumer."""
    queue_us: float
    """CPU of the process of a quorum queue: in, and out again. It has one core at most."""
    queue_log_us: float
    """CPU of the process that writes the log of all quorum queues of a node, for the same."""
    log_park_bytes: float
    log_release_bytes: float
    claim_messages: float
    """Messages in a claim."""
    sync_ms: float
    """Time to sync the log: a claim waits for the broker's, and then for the database's."""

    @property
    def lane_rate(self) -> float:
        """Messages a second of a lane that waits for no core. A claim is handled by one part after the other, and the
        daemon has one core for all claims."""
        one_us = self.daemon_release_us + self.database_release_us + self.broker_release_us
        claim_us = self.claim_messages * one_us + 2 * self.sync_ms * 1000
        return self.claim_messages * 1e6 / max(self.claim_messages * self.daemon_release_us, claim_us / CLAIMERS)


@dataclass(frozen=True)
class Layout:
    """An installation: the broker and the database have machines of their own, and each daemon a core."""

    daemons: int
    lanes: int
    broker_cores: int
    database_cores: int
    log_mb: float
    """MB a second that the database's disk writes and syncs."""
    queues: int = 1
    """Destinations that share the releases evenly."""


class Flow(NamedTuple):
    """The shares of a message that a measurement or an installation handles: 0 or 1 of each."""

    publish: int = 0
    park: int = 0
    release: int = 0
    consume: int = 0


PARK = Flow(park=1)
RELEASE = Flow(release=1)
BOTH = Flow(publish=1, park=1, release=1)
STEADY = Flow(1, 1, 1, 1)
"""As many in as out."""
DRAIN = Flow(release=1, consume=1)
"""A burst, or a backlog after an outage."""


def broker_us(costs: Costs, flow: Flow) -> float:
    """CPU of the broker."""
    return (
        flow.publish * costs.broker_in_us
        + flow.park * costs.broker_park_us
        + flow.release * costs.broker_release_us
        + flow.consume * costs.broker_out_us
    )


def database_us(costs: Costs, flow: Flow) -> float:
    """CPU of the database."""
    return flow.park * costs.database_park_us + flow.release * costs.database_release_us


def daemon_us(costs: Costs, flow: Flow, daemons: int) -> float:
    """CPU of the daemon with the intake. It alone parks; all daemons share the releases."""
    return flow.park * costs.daemon_park_us + flow.release * costs.daemon_release_us / daemons


def total_us(costs: Costs, flow: Flow) -> float:
    """CPU of daemons, servers and publisher."""
    servers_us = broker_us(costs, flow) + database_us(costs, flow)
    return daemon_us(costs, flow, 1) + servers_us + flow.publish * costs.publisher_us


def on_one_machine(costs: Costs, flow: Flow, daemons: int, cores: float) -> dict[str, float]:
    """The rate, in messages a second, at which all of them together fill the machine's cores, or a daemon its one."""
    return {"cores": cores * 1e6 / total_us(costs, flow), "daemon": 1e6 / daemon_us(costs, flow, daemons)}


def limits(costs: Costs, flow: Flow, layout: Layout) -> dict[str, float]:
    """The rate, in messages a second, at which each part is full. A part that the flow does not use is left out."""
    working = min(layout.daemons, layout.lanes)  # A daemon without a lane does nothing.
    log_bytes = flow.park * costs.log_park_bytes + flow.release * costs.log_release_bytes
    queue_us = costs.queue_us if flow.park else costs.queue_us / layout.queues  # All parks pass the one queue `delays`.
    passed = flow.park + flow.release
    of_parts = {
        "daemon": daemon_us(costs, flow, working) / 1e6,
        "lane": flow.release / (costs.lane_rate * layout.lanes),
        "database": database_us(costs, flow) / 1e6 / layout.database_cores,
        "database log": log_bytes / (layout.log_mb * 1e6),
        "broker": broker_us(costs, flow) / 1e6 / layout.broker_cores,
        "queue": queue_us / 1e6,
        "queue log": costs.queue_log_us * passed / 1e6,
    }
    return {part: 1 / seconds for part, seconds in of_parts.items() if seconds}


def stop(rates: Mapping[str, float]) -> tuple[str, float]:
    """The part that is full first, and the rate at which it is."""
    part = min(rates, key=lambda part: rates[part])
    return part, rates[part]
