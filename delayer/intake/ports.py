"""The intake's ports: a store, a broker's consuming side, and the settings. core/publisher.py is the publishing side.

Each port has a suite in tests/conformance, which the real part and its fake pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from delayer.amqp.edits import Endpoints
from delayer.core.hold import Hold, Limits
from delayer.core.message import Delivery, Parcel
from delayer.core.operations import Applied, Operation
from delayer.core.plan import Policy


class Backlog(Protocol):
    """The messages that wait in a store."""

    def begin_term(self) -> None:
        """A new subscription got its first delivery. From its first operation with a key on, those of earlier terms,
        of this or another process, fail: they come again, and in order."""

    async def apply(self, operations: Sequence[Operation]) -> Applied:
        """Commit ``operations`` in one transaction, with the result that one after another would have, in their order.

        Two calls may run at the same time, and then end in any order. A caller whose operations on a key must follow
        each other waits for the first call.

        Raises StoreLost: nothing is committed, or the commit is in doubt. Raises Rejected if the database rejects the
        data of an operation.
        """

    async def hold(self, items: Sequence[tuple[Parcel, Hold]]) -> None:
        """Commit messages that never waited as held ones, each with its reason. They count as parked, and as held.
        Raises StoreLost."""

    @property
    def usable(self) -> bool:
        """Whether the backlog takes operations at the moment."""

    @property
    def reason(self) -> str:
        """Why it takes none; empty if it does, or if the reason lies outside the store."""


class Subscription(Protocol):
    """One consumer on one queue, valid until :meth:`next_batch` raises BrokerLost."""

    @property
    def prefetch(self) -> int:
        """The most unsettled deliveries."""

    @property
    def overrun(self) -> bool:
        """Whether the caller should end this subscription in order and subscribe again, with another prefetch."""

    @property
    def behind(self) -> bool:
        """Whether there are deliveries that :meth:`next_batch` has not returned yet."""

    async def next_batch(self, limit: int, gather: float) -> list[Delivery]:
        """Wait for deliveries. Returns up to ``limit``, gathered until ``gather`` seconds after the last batch at most.

        An empty list means that a second passed without any, so that the caller can do other work.
        Raises BrokerLost if connection, channel or consumer is gone; all unsettled deliveries return to the queue.
        """

    def ack(self, tag: int, *, multiple: bool) -> None:
        """Acknowledge one delivery, or all up to it. Does nothing once the channel is gone."""

    def stop(self) -> None:
        """Stop the batches. Deliveries handed out before can still be settled; the consumer itself ends in
        :meth:`close`."""

    async def close(self) -> None:
        """End the consumer: unsettled deliveries return to the queue, in their order. Safe to call twice."""


class Consumer(Protocol):
    """The opener of subscriptions."""

    @property
    def active(self) -> bool:
        """Whether the last subscription gets the queue's messages, as far as this is known."""

    async def subscribe(self, queue: str, prefetch: int) -> Subscription:
        """Consume ``queue``. Raises BrokerLost, also if the queue is missing or forbidden."""


class Clock(Protocol):
    """The clock that decides what is due: the store's, or this host's without a store."""

    def now_upper_ms(self) -> int:
        """An upper bound of the clock, epoch milliseconds. Relative delays count from it."""

    def now_lower_ms(self) -> int:
        """A lower bound of the clock: messages due by it are due."""


class IntakeSettings(Clock, Protocol):
    """The settings of the intake. It reads them for every batch, so a reload applies from the next batch on."""

    def policy(self) -> Policy: ...

    def names(self) -> Endpoints: ...

    def late_limits(self) -> Limits:
        """The late limits of the routes that have one."""

    @property
    def holds_in_store(self) -> bool:
        """Whether the store holds messages that a destination refused; else they go back into the cascade."""
