"""What the services need of the outside, as Protocols. Adapters satisfy them structurally; tests/conformance holds
one suite for each port, and every adapter goes through it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from delayer.core.hold import Hold, Limits
from delayer.core.message import Delivery, Due, Outcome, Outgoing, Parcel
from delayer.core.pace import Scope
from delayer.core.plan import Policy
from delayer.core.segment import Restoration
from delayer.core.values import TakenOut
from delayer.services.envelopes import Names


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
        """Whether it should be ended now, in order, and the queue subscribed to again: what came was too large for too
        long, and was let go of; or it is smaller than it was, and the next one may be given more."""

    def ack(self, tag: int, *, multiple: bool) -> None:
        """Acknowledge one delivery, or all up to it. Does nothing once the channel is gone."""

    async def stop_deliveries(self) -> None:
        """No batch comes any more. What was delivered can still be settled."""

    async def close(self) -> None:
        """Close the channel; whatever is unsettled is given back to the queue. Safe to call twice."""


class Consumer(Protocol):
    """Opens subscriptions, waiting for the broker as long as it takes."""

    async def subscribe(self, queue: str, prefetch: int) -> Subscription: ...


class Lane(Protocol):
    """The part of the store that this process owns, by a lock that lives in :attr:`claim`'s own connection."""

    @property
    def number(self) -> int: ...

    @property
    def held_by_us(self) -> bool:
        """False from the moment that the lock's connection is known to be gone."""

    def pace(self, scopes: Sequence[Scope]) -> None:
        """Claims are of one of these scopes each from now on; of everything, if there are none. Not between
        :meth:`claim` and :meth:`settle`."""

    async def claim(self, limit: int, max_bytes: int, scope: Scope | None = None) -> list[Due]:
        """Begin a transaction and take up to ``limit`` due rows (by the store's clock), soonest due first, then in
        the order of arrival, stopping after ``max_bytes`` of bodies (at least one row is taken when one is due).

        Every call must be followed by :meth:`settle` or :meth:`give_up`, also when it returns nothing.
        Raises LaneLost, StoreLost.
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
        """Seconds until the next row of this lane (waiting, or held with a retry time) is due by the store's clock;
        0.0 when one is due already; at most 60. Raises LaneLost, StoreLost."""

    def note_parked(self, due_ms: int) -> None:
        """A row due at ``due_ms`` was parked into this lane: move the watermark back if it is behind it, and wake
        the sleeper of :meth:`wait`."""

    async def wait(self, seconds: float) -> None:
        """Sleep until a row parked meanwhile is due, or for ``seconds``. Feeds the lock's idle timeout."""

    @property
    def idle(self) -> bool:
        """Whether nothing in this lane, waiting or held, is due for so long that :meth:`Store.adopt` would not take it
        again soon. As the store said when it was last asked, about once a minute; False until it was."""

    async def keep(self) -> None:
        """An adopted lane becomes one of our own: nobody is offered it any more. Raises LaneLost, StoreLost."""

    async def release(self) -> None:
        """Unlock and close. Safe to call twice."""


class Store(Protocol):
    """Parking, holding, lanes."""

    def now_ms(self) -> int:
        """An upper bound of the store's clock, epoch milliseconds, rounded up: what relative delays count from."""

    def sure_ms(self) -> int:
        """A lower bound of the store's clock, rounded down: what is due by it is due."""

    async def park(self, lane: Lane, parcels: Sequence[Parcel], cancels: Sequence[bytes]) -> TakenOut:
        """Commit ``parcels`` into ``lane`` in one transaction, by COPY. A parcel with a key replaces the waiting
        message of that key; ``cancels`` are keys, or groups of keys (KeyGroup), whose waiting messages go. Wakes the
        lane afterwards. Returns of which keys a waiting message was taken out.

        Raises LaneLost when the lane is not ours any more (nothing is committed), StoreLost.
        """

    async def hold(self, lane: Lane, parcels: Sequence[tuple[Parcel, Hold]]) -> None:
        """Commit messages that never waited (due at once, or met in the cascade) straight into held."""

    async def restore(self, lane: Lane, horizon_ms: int) -> Restoration:
        """Restore the segment with the soonest first message into ``lane``, if that is due by ``horizon_ms``; skip what
        others are restoring, and what is marked as broken. One transaction; the event loop stays free meanwhile, and
        the lane is told. A segment that does not read back is marked, and told about by this one call. None: no
        segment is due by then.

        Raises LaneLost when the lane is not ours any more, StoreLost: then nothing is changed.
        """

    async def doubtful(self, horizon_ms: int) -> list[int]:
        """Segments due by ``horizon_ms`` that :meth:`restore` leaves alone, the soonest first: marked as broken, or
        packed by a newer program. Raises StoreLost."""

    async def restore_again(self, lane: Lane, segment: int) -> Restoration:
        """Try to restore one of :meth:`doubtful`; otherwise like :meth:`restore`. None: it is gone, or somebody else
        has it."""

    async def own_free(self, count: int) -> list[Lane]:
        """Take up to ``count`` lanes that are free at this moment, those with rows first. Raises StoreLost."""

    async def own_lanes(self, count: int) -> list[Lane]:
        """Take ``count`` lanes: free ones with rows first, then free empty ones, then some that others have adopted and
        hand over (which takes seconds), then new ones. Fewer when the store fails after the first. Raises StoreLost."""

    async def adopt(self, count: int) -> list[Lane]:
        """Take up to ``count`` of the lanes without a living owner in which something is due within the next two
        minutes, or tried again: the soonest first. Empty list most of the time. Lanes whose rows are all due later
        stay free for :meth:`own_lanes`. Fewer when the store fails after the first. Raises StoreLost."""

    async def wanted(self, numbers: Collection[int]) -> set[int]:
        """Which of the adopted lanes ``numbers`` a daemon that found none to own asks for. Raises StoreLost."""

    async def maintain(self) -> None:
        """Make partitions ahead of need and drop passed empty ones, if no other daemon is at it."""

    async def close(self) -> None:
        """Close every connection but those of lanes. Safe to call twice."""


class Live(Protocol):
    """The settings in force, and the clock that rules. Asked for every batch, so that a reload rules from the next."""

    def policy(self) -> Policy: ...

    def names(self) -> Names: ...

    def late_limits(self) -> Limits: ...

    @property
    def holds_in_store(self) -> bool:
        """Whether the store holds messages that a destination did not take; else they go back into the cascade."""

    def now_ms(self) -> int:
        """An upper bound of the clock, epoch milliseconds: what relative delays count from."""

    def sure_ms(self) -> int:
        """A lower bound of the clock: what is due by it is due."""


class Pulse(Protocol):
    """Who is still moving: what the watchdog is fed by."""

    def beat(self, loop: str) -> None:
        """``loop`` went round once more. The first beat of a name begins its watch."""

    def forget(self, loop: str) -> None:
        """``loop`` ended because it was meant to."""


class Parking(Protocol):
    """Where parcels are committed: some lane of ours."""

    async def park(self, parcels: Sequence[Parcel], cancels: Sequence[bytes]) -> TakenOut:
        """Committed when this returns: of which keys a waiting message was taken out. Raises StoreLost."""


class Holder(Protocol):
    """Where messages are set aside whose destination would not take them."""

    async def hold(self, items: Sequence[tuple[Parcel, Hold]]) -> None:
        """Safe and visible when this returns. Raises StoreLost, BrokerLost."""
