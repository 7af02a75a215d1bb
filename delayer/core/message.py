"""The values that travel between the layers: what came in, what goes out, what happened to it.

Exchange names, routing keys and keys are ``bytes``: AMQP short strings need not be UTF-8, and a value that is only
carried is never decoded. ``properties`` is the payload of a content-header frame after class, weight and body size:
the property flags and the property list, as they stood on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from delayer.core.hold import Hold  # it imports the outcomes of this module


SHORT_STRING: Final = 255
"""Bytes of an AMQP short string at most."""


class Delivery(NamedTuple):
    """A message as the broker delivered it, unsettled until somebody acknowledges ``tag``."""

    tag: int
    redelivered: bool
    exchange: bytes
    routing_key: bytes
    properties: bytes
    body: bytes


class Outgoing(NamedTuple):
    """A message to publish, mandatory. ``token`` is the value of its header ``x-delayer-id``.

    The token is what a returned message is recognised by; it is unique among the publishes in flight on a channel.
    """

    exchange: bytes
    routing_key: bytes
    properties: bytes
    body: bytes
    token: bytes
    isolated: bool = False
    """An earlier publish of it closed a connection, so it goes by the isolation connection only (core/hold.py)."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The broker took responsibility for the publish, and routed it to at least one queue."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The broker found no queue for the publish (``basic.return``)."""

    code: int
    text: str


@dataclass(frozen=True, slots=True)
class Nacked:
    """A queue refused the publish, or the broker could not take it (``basic.nack``)."""


@dataclass(frozen=True, slots=True)
class Unanswered:
    """No confirm within ``seconds``, while the broker confirmed others: a queue behind ``exchange`` and ``routing_key``
    does not answer. That queue may still take the message later."""

    seconds: float
    exchange: bytes
    routing_key: bytes


@dataclass(frozen=True, slots=True)
class ClosedChannel:
    """The broker closed the channel for the publish: its exchange is missing, or closed to this user."""

    code: int
    text: str


@dataclass(frozen=True, slots=True)
class ClosedConnection:
    """The broker closed the whole connection for the publish."""

    code: int
    text: str


DIRECT_REPLY: Final = b"amq.rabbitmq.reply-to"
"""What names begin with that lead, at the default exchange, past all queues to one consumer of the broker's."""


def is_direct_reply(exchange: bytes, routing_key: bytes) -> bool:
    """Whether a publish leads to no queue, but to whoever waits for a direct reply. What follows the name is read as
    the broker's own: of other bytes it makes an error that ends the whole connection (541)."""
    return not exchange and routing_key.startswith(DIRECT_REPLY)


Outcome = Confirmed | Returned | Nacked | Unanswered | ClosedChannel | ClosedConnection
CONFIRMED = Confirmed()
NACKED = Nacked()


class Target(NamedTuple):
    """Where a message goes when it is due."""

    exchange: bytes
    routing_key: bytes


class Parcel(NamedTuple):
    """A message on its way into the store: as it was received, plus what was decided about it.

    ``route`` is the ``from`` of the route that chose the target, kept for people who list and audit; the release
    needs the target only, so it works whatever the configuration says by then.
    """

    due_ms: int
    route: bytes
    exchange: bytes
    routing_key: bytes
    target: Target
    properties: bytes
    body: bytes
    key: bytes | None = None
    token: bytes = b""
    """The ``x-delayer-id`` that it has already, where it was published, or went through the cascade, before it is held:
    it keeps that. Else whoever releases it gives one."""


class Due(NamedTuple):
    """A message that the store gave up for release (its row claimed) together with its identity there.

    ``sound`` is false where the stored checksum or format does not fit the bytes: such a message is held, not sent.
    """

    id: int
    due_ms: int
    attempts: int
    parcel: Parcel
    sound: bool
    hold: Hold | None = None
    """Why the message is held; None for a message that was never held."""


class Timestamp(int):
    """An AMQP timestamp (field type ``T``, or the ``timestamp`` property): whole seconds since the epoch."""

    __slots__ = ()


class KeyGroup(bytes):
    """Every key that begins with these bytes; they are not empty."""

    __slots__ = ()
