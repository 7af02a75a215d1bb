"""What differs between versions of RabbitMQ, as far as a test has to know."""

from __future__ import annotations

from abc import ABC, abstractmethod


class OfAVersion(ABC):
    """A broker that knows its own."""

    @property
    @abstractmethod
    def version(self) -> tuple[int, ...]:
        """(3, 10, 8), say."""

    @property
    def sorts_headers(self) -> bool:
        """Whether it hands header tables over sorted by name, each name once, as it does from 4.0 on."""
        return self.version >= (4,)

    @property
    def largest_body(self) -> int:
        """Bytes of the largest message that it takes unless told otherwise."""
        return (16 if self.version >= (4,) else 128) << 20

    @property
    def takes_any_delivery_mode(self) -> bool:
        """Whether it takes a message whose delivery mode is neither 1 nor 2, as it does from 4.0 on."""
        return self.version >= (4,)

    @property
    def lists_queue_types(self) -> bool:
        """Whether it lists a queue that was declared without ``x-queue-type`` with one, as it does from 4.0 on."""
        return self.version >= (4,)

    @property
    def falls_over_clipped_names(self) -> bool:
        """Whether it ends the connection (541) when the reason to close a channel has to be clipped in the middle of a
        character, as it does from 4.0 on."""
        return self.version >= (4,)

    @property
    def hides_queues(self) -> bool:
        """Whether who may not configure a queue is not even told that it is there, as from 4.3 on."""
        return self.version >= (4, 3)

    @property
    def cancels_slow_consumers(self) -> bool:
        """Whether it cancels the consumer of a quorum queue that leaves a delivery unacknowledged for the consumer
        timeout, as from 4.3 on, and does not close its channel."""
        return self.version >= (4, 3)

    @property
    def counts_only_failed_deliveries(self) -> bool:
        """Whether a quorum queue counts no delivery that comes back by ``basic.nack`` after the end of its consumer, as
        from 4.3 on."""
        return self.version >= (4, 3)

    @property
    def knows_old_messages(self) -> bool:
        """Whether its code can still make messages of the form before 4.0, which the delayed-message plugin kept: that
        plugin cannot run from 4.3 on."""
        return self.version < (4, 3)
