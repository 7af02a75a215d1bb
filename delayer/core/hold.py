"""Holds: why a destination did not accept a message, as data for decisions and a text for people. Pure. The store keeps
these values in the columns of ``held``; a message in the broker's queues carries them in headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from delayer.amqp.values import Answer, Confirmed, Nacked, Returned
from delayer.core.delay_headers import in_words
from delayer.core.message import as_text


class HoldKind(StrEnum):
    """The kind of a hold. The values are in the store and in headers."""

    RETURNED = "returned"
    """The broker found no queue for the publish (``basic.return``)."""
    NACKED = "nacked"
    """A queue refused the publish (``basic.nack``)."""
    UNANSWERED = "unanswered"
    """The broker did not confirm the publish in time."""
    CLOSED_CHANNEL = "closed_channel"
    """The broker closed the channel because of the publish."""
    CLOSED_CONNECTION = "closed_connection"
    """The broker closed the whole connection because of the publish."""
    LATE = "late"
    """The message is later than its route allows."""
    UNFIT = "unfit"
    """The message cannot be published: its checksum, headers or destination are wrong."""


FOR_A_PERSON: Final = frozenset({HoldKind.LATE, HoldKind.UNFIT})
"""Kinds that a retry cannot resolve, so the daemon does not retry; an operator decides."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Why a message is held."""

    kind: HoldKind
    text: str
    """The reason in words. Decisions never read it."""
    may_be_delivered: bool = False
    """An earlier publish was never confirmed, so the destination may already have the message."""
    isolated: bool = False
    """The message once closed a connection, so only the isolation connection publishes it."""

    @property
    def for_a_person(self) -> bool:
        """Whether only an operator can retry the message."""
        return self.kind in FOR_A_PERSON

    def after(self, earlier: Hold | None) -> Hold:
        """Add the flags of the message's ``earlier`` hold to this hold.

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
        """When the daemon retries, in epoch milliseconds: ``again_ms``, or None if an operator decides."""
        return None if self.for_a_person else again_ms


Limits = Mapping[bytes, int]
"""The ``late_limit`` of each route with ``late_action = "hold"``, in milliseconds."""


def too_late(due_ms: int, now_ms: int, limit_ms: int | None, earlier: Hold | None = None) -> Hold | None:
    """Return the Hold of a message that is later than its route allows; None if the daemon delivers it. A message whose
    ``earlier`` hold needed an operator is delivered, because the operator retried it.

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


Outcome = Confirmed | Hold
"""The result of a publish: confirmed, or why its message is held."""
NACKED: Final = Hold(HoldKind.NACKED, "nacked: the destination refused it")


def returned(code: int, text: str) -> Hold:
    """The outcome of a publish for which the broker found no queue."""
    return Hold(HoldKind.RETURNED, f"returned: {code} {text}")


def outcome_of(answer: Answer) -> Outcome:
    """The outcome of a publish that the broker has answered."""
    if isinstance(answer, Returned):
        return returned(answer.code, answer.text)
    return NACKED if isinstance(answer, Nacked) else answer


def unanswered(seconds: float, exchange: bytes, routing_key: bytes) -> Hold:
    """The outcome of a publish that the broker did not confirm within ``seconds``, while it confirmed others. A queue
    behind ``exchange`` and ``routing_key`` does not answer. It may still accept the message later."""
    where = f"exchange {as_text(exchange)!r}, key {as_text(routing_key)!r}"
    text = f"no confirm within {seconds:g} s: {where}: a queue behind them does not answer"
    return Hold(HoldKind.UNANSWERED, text, may_be_delivered=True)


def closed_channel(code: int, text: str) -> Hold:
    """The outcome of a publish for which the broker closed the channel: its exchange is missing, or forbidden to us."""
    return Hold(HoldKind.CLOSED_CHANNEL, f"the broker closed the channel: {code} {text}")


def closed_connection(code: int, text: str) -> Hold:
    """The outcome of a publish for which the broker closed the whole connection."""
    return Hold(HoldKind.CLOSED_CONNECTION, f"the broker closed the connection: {code} {text}", isolated=True)
