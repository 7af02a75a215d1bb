"""What the release needs from a store and from the settings. tests/conformance has one suite for the lanes, which the
store on Postgres and its fake pass."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

from delayer.core.hold import Hold, Limits
from delayer.core.message import Due
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
    """A partition of the waiting messages that this process owns until it closes the lane, or loses it."""

    @property
    def number(self) -> int: ...

    @property
    def route(self) -> bytes | None:
        """The limited route of the lane; None for a lane of all others."""

    @property
    def claimers(self) -> Sequence[Claimer]:
        """The claims that can be open at once. One is made after the other."""

    @property
    def leaving(self) -> asyncio.Event:
        """Set when the lane shall go to another process: its release settles the open claims, and closes the lane."""

    def leave(self) -> None:
        """Set ``leaving``, and end :meth:`wait`."""

    def sleep_hint(self) -> float:
        """Seconds until the next claim, from 0.0 to 60: a little before the next row is due, or when a held row is
        retried. Raises LaneLost."""

    async def wait(self, seconds: float) -> None:
        """Sleep for ``seconds``, or until a row parked meanwhile is to be claimed, or the lane is to be left."""

    async def close(self) -> None:
        """Unlock and close. Safe to call twice."""


class Releases(Protocol):
    """The lanes that this process releases from."""

    def lanes(self) -> AsyncIterator[Lane]:
        """Yield each lane as soon as this process owns it. Ends when the store stops. Whoever got a lane closes it."""


class Segments(Protocol):
    """The compacted messages of the store."""

    async def wait_usable(self) -> None:
        """Wait until the store is usable."""

    async def restore(self, ahead_ms: int) -> Restoration:
        """Restore the segment with the soonest first message into its lane, if that message is due within ``ahead_ms``.
        Skips segments that others restore, and broken ones. It uses one transaction, which notifies the lane's owner,
        and does not block the event loop. An unreadable segment is marked, and returned by this one call. Returns None
        if no segment is due by then.

        Raises StoreLost; then nothing is changed.
        """

    def now_upper_ms(self) -> int | None:
        """An upper bound of the store's clock, epoch milliseconds; None while no store was reached."""


class ReleaseSettings(Protocol):
    """The settings of the release. It reads them for every claim, so a reload applies from the next claim on."""

    def late_limits(self) -> Limits:
        """The late limits of the routes that have one."""

    @property
    def rates(self) -> Mapping[bytes, float]:
        """The rate limit of each limited route, messages a second."""

    @property
    def restore_ahead_ms(self) -> int:
        """How long before its first message is due a segment is restored."""

    def now_lower_ms(self) -> int:
        """A lower bound of the clock: messages due by it are due."""
