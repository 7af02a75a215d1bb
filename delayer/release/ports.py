"""What the release needs from a store and from the settings. The Postgres store and its fake pass one suite for lanes,
in tests/conformance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

from delayer.core.hold import Hold, Limits
from delayer.core.message import Due


class Claimer(Protocol):
    """A claimer of a lane: an open transaction with the rows it took."""

    async def claim(self, limit: int, max_bytes: int) -> list[Due]:
        """Begin a transaction and take up to ``limit`` rows due within the window by the store's clock, by due instant,
        then by arrival. Stops after ``max_bytes`` of bodies. Takes at least one row, but not a row that exceeds
        ``max_bytes`` by a megabyte while another claim has such a row: then the caller tries again. After it returns
        rows, call :meth:`settle` or :meth:`give_up`. Raises LaneLost, StoreLost."""

    async def settle(
        self,
        released: Sequence[Due],
        held: Sequence[tuple[Due, Hold]],
        written_ms: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        """Write ``held`` to the held table, count, and commit. ``written_ms``: when each of ``released`` was written to
        the broker, for the store's history; by default, the time of the settlement. Raises StoreLost: the transaction
        is rolled back, or in doubt if the connection broke during the commit."""

    async def give_up(self) -> None:
        """Roll back, so that the rows wait again. Does not raise if the connection is gone."""


class Lane(Protocol):
    """A partition of the waiting messages that this process owns until it closes or loses the lane."""

    @property
    def number(self) -> int: ...

    @property
    def route(self) -> bytes | None:
        """The limited route of the lane; None for a lane of all other routes."""

    @property
    def claimers(self) -> Sequence[Claimer]:
        """The claimers that can be open at once; they claim in turn."""

    @property
    def leaving(self) -> asyncio.Event:
        """Set when another process should take over. The release settles its open claims and closes the lane."""

    def leave(self) -> None:
        """Set ``leaving`` and end :meth:`wait`."""

    def sleep_hint(self) -> float:
        """Seconds until the next claim, 0.0 to 60. It begins a little before a row is due, or when a held row is
        retried. Raises LaneLost."""

    async def wait(self, seconds: float) -> None:
        """Sleep for ``seconds``, or until a newly parked row is to be claimed or the lane to be left."""

    async def close(self) -> None:
        """Unlock and close. Safe to call twice."""


class Releases(Protocol):
    """The lanes from which this process releases."""

    def lanes(self) -> AsyncIterator[Lane]:
        """Yield each lane when this process gets it, until the store stops. The receiver closes the lane."""


class ReleaseSettings(Protocol):
    """The settings of the release, read for every claim, so a reload applies from the next claim on."""

    def late_limits(self) -> Limits:
        """The late limits of the routes that have one."""

    @property
    def rates(self) -> Mapping[bytes, float]:
        """The rate limit of each limited route, in messages per second."""

    def now_lower_ms(self) -> int:
        """A lower bound of the clock. A message whose due time is not after it is due."""
