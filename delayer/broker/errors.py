"""Errors of a broker, and differences of its topology. Their texts never have a password, only host, port and vhost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from delayer.amqp.errors import BrokerLost
from delayer.core.cascade import ONE_CONSUMER


class BrokerUnreachable(BrokerLost):
    """The broker cannot be reached, the connection broke, or the broker did not answer in time."""


RIGHTS: Final = "check user, password, vhost and permissions"


class BrokerRefused(Exception):
    """The broker refused the login, the vhost or the operation. A retry seldom helps. ``advice``: the next step, as an
    imperative."""

    def __init__(self, text: str, advice: str = "") -> None:
        super().__init__(text)
        self.advice = advice or RIGHTS


class QueueMissing(Exception):
    """A queue that a command needs does not exist."""


OTHER_CONSUMERS: Final = (
    "set the other value of [intake] consumers, which this queue was declared with; for the new value name a new "
    'intake.queue (docs/operations.md, "The other value of consumers")'
)


def mismatch_advice(broker_says: str) -> str:
    """Return the next step for a queue that differs, if the broker names the argument of ``[intake] consumers``; else
    ""."""
    return OTHER_CONSUMERS if ONE_CONSUMER in broker_says else ""


UNDECLARED: Final = (
    "do what the reason asks for: remove queues, or raise the limit of the virtual host (rabbitmqctl set_vhost_limits)"
)
"""The next step if the broker refuses to declare a part that does not exist."""

FREE: Final = "free memory or disk on that node (rabbitmq.com/docs/alarms)"
MAJORITY: Final = "start the nodes of its members: `rabbitmq-queues quorum_status QUEUE` shows them"
"""The next step if a quorum queue has no majority."""

TopologySeverity = Literal["error", "note", "unknown"]


@dataclass(frozen=True, slots=True)
class TopologyFinding:
    """One finding. "error" must be corrected, "note" is for information, "unknown" could not be checked."""

    kind: Literal["exchange", "queue", "binding", "policy"]
    name: str
    expected: str
    found: str
    severity: TopologySeverity = "error"
    state: Literal["missing", "down", "alone", "minority", "different"] = "different"

    def __str__(self) -> str:
        return f"{self.severity}: {self.kind} {self.name}: expected {self.expected}, found {self.found}"


class TopologyMismatch(Exception):
    """Parts of the topology exist, but differ from the wanted ones."""

    def __init__(self, findings: Sequence[TopologyFinding]) -> None:
        self.findings = tuple(findings)
        super().__init__("; ".join(str(finding) for finding in self.findings))

    @property
    def advice(self) -> str:
        """See :func:`mismatch_advice`."""
        return next(filter(None, (mismatch_advice(one.found) for one in self.findings)), "")
