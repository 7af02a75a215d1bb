"""The ports of the services, as Protocols. Adapters satisfy them structurally. tests/conformance has one suite for each
port, and every adapter passes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from delayer.amqp.edits import Endpoints
from delayer.core.hold import Hold, Limits
from delayer.core.message import Due, LaneTable, Parcel
from delayer.core.plan import Policy
from delayer.core.segment import Restoration


class Claimer(Protocol):
    """One claim of a lane: an open transaction with the rows that it took."""

    async def claim(self, limit: int, max_bytes: int) -> list[Due]:
        """Begin a transaction and take up to ``limit`` rows that are due within the window (by the store's clock),
        soonest first, then in the order of arrival. It stops after ``max_bytes`` of bodies, but takes at least one row.

        A call that returns rows must be followed by :meth:`settle` or :meth:`give_up`. Raises LaneLost, StoreLost.
        """

    async def settle(
        self,
        released: Sequence[Due],
        held: Sequence[tuple[Due, Hold]],
        written_ms: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        """Write ``held`` to the held table, count, and commit. ``written_ms``: when each of ``released`` was written to
        the broker, for the store's history; without it, at the settlement.

        Raises StoreLost. The transaction is rolled back, or in doubt if the connection broke during the commit.
        """

    async def give_up(self) -> None:
        """Roll back, so that the rows are there again. Raises nothing if the connection is gone."""


class Lane(Protocol):
    """A partition of the waiting messages that this process owns, by a lock on the lane's connection."""

    @property
    def number(self) -> int: ...

    @property
    def route(self) -> bytes | None:
        """The limited route of the lane; None for a lane of all others."""

    @property
    def owned(self) -> bool:
        """Whether every connection of the lane is open, as far as the daemon knows."""

    @property
    def claimers(self) -> Sequence[Claimer]:
        """The claims that can be open at once. One is made after the other."""

    def sleep_hint(self) -> float:
        """Seconds until the next claim, from 0.0 to 60: a little before the next row is due, or when a held row is
        retried. Raises LaneLost."""

    async def wait(self, seconds: float) -> None:
        """Sleep for ``seconds``, or until a row parked meanwhile is to be claimed."""

    async def close(self) -> None:
        """Unlock and close. Safe to call twice."""


class Store(Protocol):
    """The store: parking, holding, restoring, lanes."""

    def now_upper_ms(self) -> int:
        """An upper bound of the store's clock, epoch milliseconds, rounded up. Relative delays count from it."""

    def now_lower_ms(self) -> int:
        """A lower bound of the store's clock, rounded down: messages due by it are due."""

    async def park(self, lane: Lane, parcels: Sequence[Parcel], cancels: Sequence[bytes]) -> frozenset[bytes]:
        """Commit ``parcels`` into ``lane`` in one transaction, by COPY. Parcels of a route with a lane of its own go
        there, and the transaction notifies its owner. A parcel with a key replaces the waiting message of that key.
        ``cancels`` are keys, or groups of keys (KeyGroup), whose waiting messages are deleted. Wakes the lane
        afterwards. Returns the keys whose waiting messages were deleted.

        Raises LaneLost if this process does not own the lane any more (nothing is committed), StoreLost.
        """

    async def hold(self, lane: Lane, parcels: Sequence[tuple[Parcel, Hold]]) -> None:
        """Commit messages that never waited in the lane directly into the held table."""

    async def restore(self, horizon_ms: int) -> Restoration:
        """Restore the segment with the soonest first message into its lane, if that message is due by ``horizon_ms``.
        Skips segments that others restore, and broken ones. It uses one transaction, which notifies the lane's owner,
        and does not block the event loop. An unreadable segment is marked, and returned by this one call. Returns None
        if no segment is due by then.

        Raises StoreLost; then nothing is changed.
        """

    async def look(self) -> LaneTable:
        """Read lanes and live processes. This process counts as live from its first call on. Raises StoreLost."""

    async def take(self, number: int) -> Lane | None:
        """Take a free lane; None if another process was quicker. Raises StoreLost."""

    async def add_routes(self, routes: Collection[bytes]) -> None:
        """Create lanes for these limited routes. Raises StoreLost."""

    def leave(self) -> None:
        """Stop counting this process as live, until its next look()."""

    async def maintain(self) -> None:
        """Create partitions ahead of need and drop empty past ones, unless another daemon does it now.
        Raises StoreLost."""

    async def close(self) -> None:
        """Close every connection except those of lanes. Safe to call twice."""


class LivePolicy(Protocol):
    """The current settings, and the clock. Callers ask for every batch, so a reload applies from the next batch on."""

    def policy(self) -> Policy: ...

    def names(self) -> Endpoints: ...

    def late_limits(self) -> Limits:
        """The late limits of the routes that have one."""

    @property
    def rates(self) -> Mapping[bytes, float]:
        """The rate limit of each limited route, messages a second."""

    @property
    def holds_in_store(self) -> bool:
        """Whether the store holds messages that a destination refused; else they go back into the cascade."""

    @property
    def restore_ahead_ms(self) -> int:
        """How long before its first message is due a segment is restored."""

    def now_upper_ms(self) -> int:
        """An upper bound of the clock, epoch milliseconds. Relative delays count from it."""

    def now_lower_ms(self) -> int:
        """A lower bound of the clock: messages due by it are due."""


class Heartbeat(Protocol):
    """The loops that make progress; they feed the watchdog."""

    def beat(self, loop: str) -> None:
        """Note that ``loop`` made progress. The first beat of a name begins its watch."""

    def forget(self, loop: str) -> None:
        """Stop watching ``loop``, which ended on purpose."""


class Parking(Protocol):
    """Commits parcels into a lane of this process."""

    async def park(self, parcels: Sequence[Parcel], cancels: Sequence[bytes]) -> frozenset[bytes]:
        """Commit, and return the keys whose waiting messages were deleted. Raises StoreLost."""

    async def hold(self, items: Sequence[tuple[Parcel, Hold]]) -> None:
        """Hold the messages: they are safe and visible when this returns. Raises StoreLost, BrokerLost."""
