"""What is known of a message whose destination did not take it: data for decisions, and one text for people. Pure.

The store keeps these values in the columns of ``held``; a message of the broker's queues carries them in headers. No
decision reads :attr:`Hold.text`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final


class HoldKind(StrEnum):
    """The objection that a message is held for. The values stand in the store and in headers."""

    RETURNED = "returned"
    """The broker found no queue for the publish (``basic.return``)."""
    NACKED = "nacked"
    """A queue refused the publish (``basic.nack``)."""
    UNANSWERED = "unanswered"
    """The broker sent no confirm in time."""
    CLOSED_CHANNEL = "closed_channel"
    """The broker closed the channel for the publish."""
    CLOSED_CONNECTION = "closed_connection"
    """The broker closed the whole connection for the publish."""
    LATE = "late"
    """The message is later than its route allows."""
    UNFIT = "unfit"
    """The message cannot be published as it stands: its checksum, headers or destination are wrong."""


FOR_A_PERSON: Final = frozenset({HoldKind.LATE, HoldKind.UNFIT})
"""Kinds that time does not mend. The daemon does not retry these messages; an operator decides."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Why a message is held."""

    kind: HoldKind
    text: str
    """The reason in words. Only people read it."""
    may_be_delivered: bool = False
    """An earlier publish was never confirmed, so the destination may already have the message."""
    isolated: bool = False
    """The message once closed a connection, so it is published on the isolation connection only."""

    @property
    def for_a_person(self) -> bool:
        """Whether only an operator has this message retried."""
        return self.kind in FOR_A_PERSON

    def after(self, earlier: Hold | None) -> Hold:
        """This objection to a message that was held before: what was true of ``earlier`` stays true.

        >>> first = Hold(HoldKind.UNANSWERED, "no confirm within 8 s", may_be_delivered=True)
        >>> Hold(HoldKind.NACKED, "nacked").after(first).may_be_delivered
        True
        """
        if earlier is None:
            return self
        return replace(
            self,
            may_be_delivered=self.may_be_delivered or earlier.may_be_delivered,
            isolated=self.isolated or earlier.isolated,
        )

    def retry_ms(self, again_ms: int) -> int | None:
        """When the daemon retries the message, epoch milliseconds: ``again_ms``, or None where a person decides."""
        return None if self.for_a_person else again_ms
