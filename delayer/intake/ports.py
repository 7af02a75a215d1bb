"""The intake's ports: a store, the consuming side of a broker, and the settings. core/publisher.py is the publishing
side.

Each port has a suite in tests/conformance, which the real part and its fake pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from delayer.amqp.values import Delivery
from delayer.core.hold import Hold, Limits
from delayer.core.message import Parcel
from delayer.core.operations import Applied, Operation
from delayer.core.plan import Policy
from delayer.format.envelope import Endpoints


class Backlog(Protocol):
    """The messages that wait in a store."""

    def begin_term(self) -> None:
        """Note that a new subscription got its first delivery. Once it has applied an operation with a key, operations
        of earlier terms fail, even those of another process. The broker redelivers those in order."""

    async def apply(self, operations: Sequence[Operation]) -> Applied:
        """Commit ``operations`` in one transaction, as if applied one after another in their order.

        Calls may run at the same time, and finish in any order. To keep the order of operations on a key, wait for each
        call before the next.

        Raises StoreLost if nothing is committed, or the commit is in doubt; Rejected if the database rejects the data
        of an operation.
        """

    async def hold(self, items: Sequence[tuple[Parcel, Hold]]) -> None:
        """Commit messages that never waited as held, in one transaction, each with its reason. They count as parked and
        as held. A single message gets a plain reason if the database rejects its reason. Raises as :meth:`apply`."""

    @property
    def usable(self) -> bool:
        """Whether the backlog accepts operations now."""

    @property
    def reason(self) -> str:
        """Why the backlog does not accept operations; empty if it does, or if the reason lies outside the store."""


class Inbox(Protocol):
    """The messages that applications write into the store by SQL. Their deliveries are rows."""

    async def move(self, operations: Sequence[Operation], tags: Sequence[int]) -> Applied:
        """Apply ``operations`` like :meth:`Backlog.apply`, and delete the rows of the deliveries ``tags``, which they
        came by, in the same transaction. Raises as that, and StoreLost if another process has moved one of the rows."""


class Subscription(Protocol):
    """One consumer on one queue, valid until :meth:`next_batch` raises BrokerLost."""

    @property
    def prefetch(self) -> int:
        """Maximum number of unsettled deliveries."""

    @property
    def overrun(self) -> bool:
        """Whether the caller should close this subscription cleanly and resubscribe, with another prefetch."""

    @property
    def behind(self) -> bool:
        """Whether deliveries exist that :meth:`next_batch` has not returned yet."""

    async def next_batch(self, limit: int, gather: float) -> list[Delivery]:
        """Wait for deliveries. Returns up to ``limit``, gathered until at most ``gather`` seconds after the last batch.

        Returns an empty list after a second without any, so that the caller can do other work. Raises BrokerLost if
        connection, channel or consumer is gone. All unsettled deliveries then return to the queue.
        """

    def ack(self, tag: int, *, multiple: bool) -> None:
        """Acknowledge one delivery, or all up to it. Does nothing once the channel is gone."""

    def postpone(self, tags: Sequence[int]) -> bool:
        """Note that one of our own queues did not take what became of these deliveries, which return to the queue. Says
        whether the next subscription reads the deliveries behind them first. Their order does not matter."""

    def stop(self) -> None:
        """Stop the batches. Earlier deliveries can still be settled; :meth:`close` ends the consumer itself."""

    async def close(self) -> None:
        """Close the consumer. Unsettled deliveries return to the queue in their order. Safe to call twice."""


class Consumer(Protocol):
    """Opens subscriptions."""

    @property
    def active(self) -> bool:
        """Whether the last subscription gets the queue's messages, as far as this is known."""

    async def subscribe(self, queue: str, prefetch: int) -> Subscription:
        """Consume ``queue``. Raises BrokerLost, even if the queue is missing or forbidden."""


class Clock(Protocol):
    """The clock that decides what is due: the store's, or this host's without a store."""

    def now_upper_ms(self) -> int:
        """An upper bound of the clock, in epoch milliseconds. Relative delays are measured from it."""

    def now_lower_ms(self) -> int:
        """A lower bound of the clock. A message whose due time is not after it is due."""


class IntakeSettings(Clock, Protocol):
    """The settings of the intake. It reads them for every batch, so a reload applies from the next batch on."""

    def policy(self) -> Policy: ...

    def names(self) -> Endpoints: ...

    def late_limits(self) -> Limits:
        """The late limits of the routes that have one."""

    @property
    def holds_in_store(self) -> bool:
        """Whether the store holds messages that a destination did not take. Otherwise they return to the cascade."""
