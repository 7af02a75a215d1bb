"""What the intake needs from a store and from the settings. tests/conformance has one suite for the backlog, which the
store on Postgres and its fake pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from delayer.amqp.edits import Endpoints
from delayer.core.hold import Hold, Limits
from delayer.core.message import Parcel
from delayer.core.operations import Applied, Operation
from delayer.core.plan import Policy


class Backlog(Protocol):
    """The messages that wait in a store."""

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
