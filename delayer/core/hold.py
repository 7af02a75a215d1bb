"""Holds: data for decisions about a message that its destination did not accept, with a text for people. Pure.

The store keeps these values in the columns of ``held``; a message of the broker's queues carries them in headers. No
decision reads :attr:`Hold.text`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from delayer.core.delay_headers import in_words
from delayer.core.message import as_text


class HoldKind(StrEnum):
    """The kind of a hold. The values are in the store and in headers."""

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
    """The message cannot be published: its checksum, headers or destination are wrong."""


FOR_A_PERSON: Final = frozenset({HoldKind.LATE, HoldKind.UNFIT})
"""Kinds that a retry cannot resolve. The daemon does not retry these messages; an operator decides."""


@dataclass(frozen=True, slots=True)
class Hold:
    """The reason why a message is held."""

    kind: HoldKind
    text: str
    """The reason in words. No decision reads it."""
    may_be_delivered: bool = False
    """An earlier publish was never confirmed, so the destination may already have the message."""
    isolated: bool = False
    """The message once closed a connection, so it is published on the isolation connection only."""

    @property
    def for_a_person(self) -> bool:
        """Whether only an operator can retry the message."""
        return self.kind in FOR_A_PERSON

    def after(self, earlier: Hold | None) -> Hold:
        """This hold of a message that was held before. The flags of ``earlier`` stay set.

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
        """The time of the daemon's retry, epoch milliseconds: ``again_ms``, or None if an operator decides."""
        return None if self.for_a_person else again_ms


Limits = Mapping[bytes, int]
"""The ``late_limit`` of each route with ``late_action = "hold"``, in milliseconds."""


def too_late(due_ms: int, now_ms: int, limit_ms: int | None, earlier: Hold | None = None) -> Hold | None:
    """The Hold of a message that is later than its route allows; None if the daemon delivers it.

    A message that was held ``earlier`` for a person is here only because an operator retried it, so it is delivered.

    >>> too_late(0, 60_000, 60_000)
    >>> too_late(0, 90_000, 60_000).text
    'late: by 0:01:30, and late_limit of its route is 0:01:00'
    """
    late_ms = now_ms - due_ms
    if limit_ms is None or late_ms <= limit_ms or (earlier is not None and earlier.for_a_person):
        return None
    text = f"late: by {in_words(late_ms)}, and late_limit of its route is {in_words(limit_ms)}"
    return Hold(HoldKind.LATE, text)


def unfit(text: str) -> Hold:
    """The Hold of a message that cannot be published."""
    return Hold(HoldKind.UNFIT, f"unfit: {text}")


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The broker took responsibility for the publish, and routed it to at least one queue."""


Outcome = Confirmed | Hold
"""The result of a publish: confirmed, or the reason why its message is held."""
CONFIRMED: Final = Confirmed()
NACKED: Final = Hold(HoldKind.NACKED, "nacked: the destination refused it")


def returned(code: int, text: str) -> Hold:
    """The outcome of a publish for which the broker found no queue."""
    return Hold(HoldKind.RETURNED, f"returned: {code} {text}")


def unanswered(seconds: float, exchange: bytes, routing_key: bytes) -> Hold:
    """The outcome of a publish without a confirm within ``seconds``, while the broker confirmed others. A queue behind
    ``exchange`` and ``routing_key`` does not answer. It may still accept the message later."""
    where = f"exchange {as_text(exchange)!r}, key {as_text(routing_key)!r}"
    text = f"no confirm within {seconds:g} s: {where}: a queue behind them does not answer"
    return Hold(HoldKind.UNANSWERED, text, may_be_delivered=True)


def closed_channel(code: int, text: str) -> Hold:
    """The outcome of a publish for which the broker closed the channel: its exchange is missing, or closed to us."""
    return Hold(HoldKind.CLOSED_CHANNEL, f"the broker closed the channel: {code} {text}")


def closed_connection(code: int, text: str) -> Hold:
    """The outcome of a publish for which the broker closed the whole connection."""
    return Hold(HoldKind.CLOSED_CONNECTION, f"the broker closed the connection: {code} {text}", isolated=True)
