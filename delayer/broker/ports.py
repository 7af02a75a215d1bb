"""The ports of the services, as Protocols. Adapters satisfy them structurally. tests/conformance has one suite for each
port, and every adapter passes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from delayer.amqp.edits import Names
from delayer.core.hold import Hold, Limits
from delayer.core.message import Delivery, Due, Outcome, Outgoing, Parcel
from delayer.core.plan import Policy
from delayer.core.segment import Restoration


class Publisher(Protocol):
    """A confirmed, mandatory publishing channel that opens again by itself after a loss."""

    @property
    def ready(self) -> bool:
        """Connected, and not blocked by a resource alarm of the broker."""

    @property
    def max_properties(self) -> int:
        """The longest ``properties`` that fit a frame of this broker, in bytes."""

    @property
    def batch_limit(self) -> int:
        """How many messages one publish should have now: few while many of them have to go one by one. Longer batches
        are published too, but are more likely to be in doubt at the deadline, and then repeated."""

    async def publish(self, batch: Sequence[Outgoing]) -> list[Outcome]:
        """Publish and wait for every confirm. One outcome a message, in the order of the batch. Messages of one
        exchange are published in that order.

        Raises BrokerLost when some outcome cannot be known: all of the batch is then in doubt, but for what an
        Unconfirmed knows.
        """

    async def close(self) -> None:
        """Give the channel back without waiting for the broker, nor raising for one that is gone. Safe to call twice;
        a later publish opens another channel."""


class Subscription(Protocol):
    """One consumer on one queue, valid until :meth:`next_batch` raises BrokerLost."""

    async def next_batch(self, limit: int, gather: float) -> list[Delivery]:
        """Wait for deliveries; return up to ``limit``, gathering for at most ``gather`` seconds after the first.

        An empty list means that a second passed without any: the caller's chance to look around.
        Raises BrokerLost when connection, channel or consumer is gone; everything unsettled returns to the queue.
        """

    @property
    def behind(self) -> bool:
        """Whether more has been delivered than :meth:`next_batch` has handed out."""

    @property
    def prefetch(self) -> int:
        """How many deliveries may be here, unsettled."""

    @property
    def overrun(self) -> bool:
        """Whether the caller should end this subscription in order and subscribe again: its deliveries were too large
        for too long, or they are smaller now and the next one may read more ahead."""

    def ack(self, tag: int, *, multiple: bool) -> None:
        """Acknowledge one delivery, or all up to it. Does nothing once the channel is gone."""

    async def stop_deliveries(self) -> None:
        """Stop the batches. Deliveries handed out before can still be settled."""

    async def close(self) -> None:
        """Close the channel. Unsettled deliveries return to the queue. Safe to call twice."""


class Consumer(Protocol):
    """Opens subscriptions, waiting for the broker as long as it takes."""

    async def subscribe(self, queue: str, prefetch: int) -> Subscription: ...


class Lane(Protocol):
    """A partition of the waiting messages that this process owns, by a lock on the connection of its releases."""

    @property
    def number(self) -> int: ...

    @property
    def route(self) -> bytes | None:
        """The limited route whose messages it is for."""

    @property
    def held_by_us(self) -> bool:
        """False from the moment that the lock's connection is known to be gone."""

    async def claim(self, limit: int, max_bytes: int) -> list[Due]:
        """Begin a transaction and take up to ``limit`` due rows (by the store's clock), soonest first, then in the
        order of arrival. It stops after ``max_bytes`` of bodies, but takes at least one due row.

        Every call must be followed by :meth:`settle` or :meth:`give_up`, also without rows. Raises LaneLost, StoreLost.
        """

    async def settle(self, released: Sequence[Due], held: Sequence[tuple[Due, Hold]]) -> None:
        """Put the ``held`` into the held table, count, and commit.

        Raises StoreLost: rolled back, or in doubt if the connection broke at the commit.
        """

    async def give_up(self) -> None:
        """Roll back: the rows are there again. Never raises for a connection that is gone already."""

    @property
    def more(self) -> bool:
        """Whether rows may be due already: the last claim was full, or was given up."""

    async def sleep_hint(self) -> float:
        """Seconds until the next row of this lane (waiting, or held with a retry time) is due by the store's clock: 0.0
        when one is due already, 60 at most. Raises LaneLost, StoreLost."""

    def note_parked(self, due_ms: int) -> None:
        """A row due at ``due_ms`` was parked into this lane: move the watermark back if it is behind it, and wake
        the sleeper of :meth:`wait`."""

    async def wait(self, seconds: float) -> None:
        """Sleep until a row parked meanwhile is due, or for ``seconds``. Feeds the lock's idle timeout."""

    async def release(self) -> None:
        """Unlock and close. Safe to call twice."""


class SeenLane(Protocol):
    """A lane at one look: its number, its limited route, whether it has a live owner, and the mark of that owner's
    broker."""

    @property
    def number(self) -> int: ...
    @property
    def route(self) -> bytes | None: ...
    @property
    def owned(self) -> bool: ...
    @property
    def broker(self) -> str: ...


class Look(Protocol):
    """The lanes of the store, and its live processes: how many, and the place of this one among them."""

    @property
    def lanes(self) -> Sequence[SeenLane]: ...
    @property
    def live(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def routes(self) -> Mapping[bytes, int]:
        """The lanes of routes."""


class Store(Protocol):
    """Parking, holding, lanes."""

    def now_ms(self) -> int:
        """An upper bound of the store's clock, epoch milliseconds, rounded up: what relative delays count from."""

    def sure_ms(self) -> int:
        """A lower bound of the store's clock, rounded down: messages due by it are due."""

    async def park(self, lane: Lane | None, parcels: Sequence[Parcel], cancels: Sequence[bytes]) -> frozenset[bytes]:
        """Commit ``parcels`` into ``lane`` in one transaction, by COPY. Parcels of a route with a lane of its own go
        there, and the transaction notifies its owner. A parcel with a key replaces the waiting message of that key.
        ``cancels`` are keys, or groups of keys (KeyGroup), whose waiting messages go. Wakes the lane afterwards.
        Returns the keys whose waiting messages were cancelled.

        Raises LaneLost when the lane is not ours any more (nothing is committed), StoreLost.
        """

    async def hold(self, lane: Lane, parcels: Sequence[tuple[Parcel, Hold]]) -> None:
        """Commit messages that never waited (due at once, or met in the cascade) straight into held."""

    async def restore(self, horizon_ms: int) -> Restoration:
        """Restore the segment with the soonest first message into its lane, if that message is due by ``horizon_ms``.
        Skip segments that others restore, and broken ones. One transaction, which notifies the lane's owner; the event
        loop stays free. A segment that does not read back is marked, and returned by this one call. None: no segment is
        due by then.

        Raises StoreLost: then nothing is changed.
        """

    async def look(self) -> Look:
        """Look at lanes and live processes. This process counts as live from its first look on. Raises StoreLost."""

    async def take(self, number: int) -> Lane | None:
        """Take a free lane; None if another process was quicker. Raises StoreLost."""

    async def add_routes(self, routes: Collection[bytes]) -> None:
        """Make lanes for these limited routes. Raises StoreLost."""

    def leave(self) -> None:
        """This process does not count as live any more, until it looks again."""

    async def maintain(self) -> None:
        """Make partitions ahead of need and drop passed empty ones, if no other daemon is at it."""

    async def close(self) -> None:
        """Close every connection but those of lanes. Safe to call twice."""


class Live(Protocol):
    """The settings in force, and the clock that rules. Asked for every batch, so that a reload rules from the next."""

    def policy(self) -> Policy: ...

    def names(self) -> Names: ...

    def late_limits(self) -> Limits:
        """The late limits of the routes that have one."""

    def rate(self, route: bytes | None) -> float | None:
        """Messages a second that may leave the lane of this route; None: as many as can."""

    @property
    def holds_in_store(self) -> bool:
        """Whether the store holds messages that a destination did not take; else they go back into the cascade."""

    def now_ms(self) -> int:
        """An upper bound of the clock, epoch milliseconds: what relative delays count from."""

    def sure_ms(self) -> int:
        """A lower bound of the clock: messages due by it are due."""


class Heartbeat(Protocol):
    """The loops that make progress; they feed the watchdog."""

    def beat(self, loop: str) -> None:
        """``loop`` went round once more. The first beat of a name begins its watch."""

    def forget(self, loop: str) -> None:
        """``loop`` ended because it was meant to."""


class Parking(Protocol):
    """Commits parcels into some lane of ours."""

    async def park(self, parcels: Sequence[Parcel], cancels: Sequence[bytes]) -> frozenset[bytes]:
        """Committed when this returns: of which keys a waiting message was taken out. Raises StoreLost."""


class Holder(Protocol):
    """Holds messages that a destination did not take."""

    async def hold(self, items: Sequence[tuple[Parcel, Hold]]) -> None:
        """Safe and visible when this returns. Raises StoreLost, BrokerLost."""
