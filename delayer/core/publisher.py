"""The port of the publisher. Both the publisher at a broker and its fake pass the suite in tests/conformance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from delayer.amqp.values import Outgoing, Pace
from delayer.core.hold import Outcome


class Isolated(Outgoing):
    """A message whose publish once closed a connection, so it does not share one with other messages."""

    __slots__ = ()


class Publisher(Protocol):
    """Publishes with confirms and the mandatory flag. Several publishes may be in flight."""

    @property
    def ready(self) -> bool:
        """Whether it is connected and not blocked by a resource alarm of the broker."""

    @property
    def max_properties(self) -> int:
        """Limit of ``properties`` in bytes, so that they fit a frame of this broker."""

    @property
    def batch_limit(self) -> int:
        """The recommended batch size at the broker's speed. Longer batches are late, and republished, more often."""

    async def publish(self, batch: Sequence[Outgoing], pace: Pace | None = None) -> list[Outcome]:
        """Publish, and wait for every confirm, even while the broker blocks publishers. Returns one outcome for each
        message, in the order of the batch. Messages of one exchange are published in that order.

        With a ``pace``, each message is published at its due time, never before; cancelling drops those not due
        yet. Raises BrokerLost if an outcome is missing in time. Then the whole batch is in doubt, except for the
        outcomes that an Unconfirmed carries."""

    async def close(self) -> None:
        """Close the channel without waiting for the broker, which may be gone. Idempotent; publish() reopens."""
