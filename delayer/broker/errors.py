"""Errors of a broker. Their texts contain no password: they name host, port and vhost only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from delayer.core.cascade import ONE_CONSUMER
from delayer.core.errors import BrokerLost


class BrokerUnreachable(BrokerLost):
    """There is no connection to the broker, it broke, or the broker did not answer in time."""


class BrokerRefused(Exception):
    """The broker answered and refused: the login, the vhost, or the operation. A retry seldom helps."""


class QueueMissing(Exception):
    """A queue does not exist that a command needs."""


OTHER_CONSUMERS: Final = (
    "set the other value of [intake] consumers, which this queue was declared with; for the new value name a new "
    'intake.queue (docs/operations.md, "The other value of consumers")'
)


def mismatch_advice(broker_says: str) -> str:
    """The next step for a queue that differs, if the broker names the argument of ``[intake] consumers``; else ""."""
    return OTHER_CONSUMERS if ONE_CONSUMER in broker_says else ""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One part that differs. ``kind`` is "exchange" or "queue"; ``broker_says`` is the broker's text. ``messages``: the
    ready ones in the queue; None for an exchange, or a hidden queue."""

    kind: str
    name: str
    expected: str
    broker_says: str
    messages: int | None = None

    def __str__(self) -> str:
        found = f"{self.kind} {self.name!r}: expected {self.expected}; the broker says: {self.broker_says}"
        return f"{found}; messages in it: {self.messages}" if self.messages else found


class TopologyMismatch(Exception):
    """Parts of the topology exist, but differ from the wanted ones."""

    def __init__(self, mismatches: Sequence[Mismatch]) -> None:
        self.mismatches = tuple(mismatches)
        super().__init__("; ".join(str(mismatch) for mismatch in self.mismatches))

    @property
    def advice(self) -> str:
        """See :func:`mismatch_advice`."""
        return next(filter(None, (mismatch_advice(one.broker_says) for one in self.mismatches)), "")
