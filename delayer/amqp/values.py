"""The values that a user of this package exchanges with it: deliveries, publishes and the broker's answers. Pure.

Names of exchanges and routing keys are ``bytes``, because AMQP short strings need not be UTF-8. ``properties`` is the
payload of a content-header frame after class, weight and body size: the property flags and the property list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

SHORT_STRING: Final = 255
"""Limit of an AMQP short string, in bytes."""


class Timestamp(int):
    """An AMQP timestamp (field type ``T``, or the ``timestamp`` property): whole seconds since the epoch."""

    __slots__ = ()


class Delivery(NamedTuple):
    """A message as the broker delivered it. It is unsettled until ``tag`` is acknowledged."""

    tag: int
    redelivered: bool
    exchange: bytes
    routing_key: bytes
    properties: bytes
    body: bytes
    read_at: float = 0.0
    """When it was read from the socket, in monotonic seconds; 0.0 if unknown."""


class Outgoing(NamedTuple):
    """A message to publish with the mandatory flag. ``token``, also in a header, identifies the publish if the broker
    returns the message. It is unique among the publishes in flight on a channel."""

    exchange: bytes
    routing_key: bytes
    properties: bytes
    body: bytes
    token: bytes


@dataclass(slots=True)
class Pace:
    """The due times of a batch. Each message is written at its due time, never before."""

    due_ms: Sequence[int]
    """One for each message, in ascending order."""
    now_ms: Callable[[], float]
    """Returns a lower bound of the deciding clock's time, in epoch milliseconds."""
    on_written: Callable[[], object] = bool
    """Called after the last message was written. The default does nothing."""
    written_ms: dict[int, float] = field(default_factory=dict)
    """When each message was written on the channel."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The broker took responsibility for the publish, and routed it to at least one queue."""


@dataclass(frozen=True, slots=True)
class Nacked:
    """A queue refused the publish."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The broker found no queue for the publish."""

    code: int
    text: str


Answer = Confirmed | Nacked | Returned
"""The broker's answer to a publish."""
CONFIRMED: Final = Confirmed()
