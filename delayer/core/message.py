"""The values that the layers exchange: deliveries, publishes and their outcomes, parcels, claimed rows and lanes.

Exchange names, routing keys and keys are ``bytes``, because AMQP short strings need not be UTF-8; the daemon never
decodes them on the way. ``properties`` is the payload of a content-header frame after class, weight and body size: the
property flags and the property list, unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from delayer.core.hold import Hold  # core/hold.py imports this module.


SHORT_STRING: Final = 255
"""The most bytes of an AMQP short string."""


class Delivery(NamedTuple):
    """A message as the broker delivered it. It is unsettled until ``tag`` is acknowledged."""

    tag: int
    redelivered: bool
    exchange: bytes
    routing_key: bytes
    properties: bytes
    body: bytes
    read_at: float = 0.0
    """The instant at which it was read from the socket, in monotonic seconds; 0.0 if unknown."""


class Outgoing(NamedTuple):
    """A message to publish with the mandatory flag. ``token`` is the value of its header ``x-delayer-id``.

    When the broker returns a message, its token tells which publish that was. It is unique among the publishes in
    flight on a channel.
    """

    exchange: bytes
    routing_key: bytes
    properties: bytes
    body: bytes
    token: bytes
    isolated: bool = False
    """Whether an earlier publish of this message closed its connection. If so, only the isolation connection publishes
    it (core/hold.py)."""


@dataclass(slots=True)
class Schedule:
    """The instants of a batch: each message is published at its own, and not before."""

    due_ms: Sequence[int]
    """One for each message, in ascending order."""
    now_ms: Callable[[], float]
    """Returns a lower bound of the time of the clock that decides, in epoch milliseconds."""
    on_written: Callable[[], object] = bool
    """Called when the last message was written. The default does nothing."""
    written_ms: dict[int, float] = field(default_factory=dict)
    """When each message was written on the shared channel. Messages of the isolation connection are not in it."""


WINDOW_MS: Final = 100
"""A claim takes the messages that are due within this time, and a Schedule publishes each at its instant. A longer
window costs less CPU. But a message that is parked into it waits for the last one of the claim before."""
BROKER_LEAD_MS: Final = 100
"""An envelope that RabbitMQ 4.4 delays is delivered so long before it is due. The daemon keeps it for the rest."""


def as_bytes(value: object) -> bytes | None:
    """The bytes of a decoded header's string or bytes; None for another value."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    return value if isinstance(value, bytes) else None


def as_text(raw: bytes) -> str:
    """Bytes as text; bytes that are not UTF-8 become backslash escapes."""
    return raw.decode("utf-8", "backslashreplace")


DIRECT_REPLY: Final = b"amq.rabbitmq.reply-to"
"""The prefix of the pseudo-queues for direct replies. At the default exchange they lead to one consumer, without a
queue."""


def is_direct_reply(exchange: bytes, routing_key: bytes) -> bool:
    """Whether a publish goes to a direct reply, not to a queue. The broker parses the rest of the name, and closes the
    whole connection (541) if that is invalid."""
    return not exchange and routing_key.startswith(DIRECT_REPLY)


class Target(NamedTuple):
    """The destination of a due message."""

    exchange: bytes
    routing_key: bytes


class Parcel(NamedTuple):
    """A message on its way into the store: as it was received, with the decisions about it.

    ``route`` is the exchange that the message came through, for lists and audits. The release needs only the
    target, so a later change of the configuration does not affect it.
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
    """The ``x-delayer-id`` that the message has already, because it was published or went through the cascade before it
    was held. If empty, the release sets one."""

    @property
    def names(self) -> dict[str, bytes]:
        """Its destination and its route, for a line of the log."""
        return {"exchange": self.target.exchange, "routing_key": self.target.routing_key, "route": self.route}


class Due(NamedTuple):
    """A message that a claim locked, in order to release it. ``id`` is its number in the store.

    ``sound`` is false if the stored checksum or format does not match the bytes: the daemon holds such a message.
    """

    id: int
    due_ms: int
    attempts: int
    parcel: Parcel
    sound: bool
    hold: Hold | None = None
    """Why the message was held last; None for a message that was never held."""
    parked_ms: int | None = None
    """When it was parked, epoch milliseconds; None for a message that was held."""


class Timestamp(int):
    """An AMQP timestamp (field type ``T``, or the ``timestamp`` property): whole seconds since the epoch."""

    __slots__ = ()


class KeyGroup(bytes):
    """All keys that begin with these bytes, which must not be empty."""

    __slots__ = ()


class LaneRow(NamedTuple):
    """A lane of the store, as last read."""

    number: int
    route: bytes | None
    """The limited route whose messages it is for."""
    owned: bool


class LaneTable(NamedTuple):
    """The lanes of the store and its live processes, as last read. ``rank``: the place of this process among them."""

    lanes: Sequence[LaneRow]
    live: int
    rank: int
    intake: int = 0
    """The epoch of the intake: how often a process began to apply operations with keys."""

    @property
    def routes(self) -> Mapping[bytes, int]:
        """The lane of each limited route."""
        return {lane.route: lane.number for lane in self.lanes if lane.route is not None}
