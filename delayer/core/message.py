"""The values that the layers exchange: deliveries, publishes and their outcomes, parcels, claimed rows and lanes.

Exchange names, routing keys and keys are ``bytes``, because AMQP short strings need not be UTF-8, and the daemon never
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
"""Limit of an AMQP short string, in bytes."""


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
    """A message to publish with the mandatory flag. ``token``, its header ``x-delayer-id``, identifies the publish if
    the broker returns the message. It is unique among the publishes in flight on a channel."""

    exchange: bytes
    routing_key: bytes
    properties: bytes
    body: bytes
    token: bytes
    isolated: bool = False
    """Whether publishing it once closed a connection. If so, only the isolation connection publishes it."""


@dataclass(slots=True)
class Schedule:
    """The due times of a batch. Each message is published at its due time, never before."""

    due_ms: Sequence[int]
    """One for each message, in ascending order."""
    now_ms: Callable[[], float]
    """Returns a lower bound of the deciding clock's time, in epoch milliseconds."""
    on_written: Callable[[], object] = bool
    """Called after the last message was written. The default does nothing."""
    written_ms: dict[int, float] = field(default_factory=dict)
    """When each message was written on the shared channel, without those of the isolation connection."""


WINDOW_MS: Final = 100
"""A claim covers the messages due within this time, and a Schedule publishes each on time. A longer window costs less
CPU, but a message parked into it waits for the last message of the claim before."""
BROKER_LEAD_MS: Final = 100
"""RabbitMQ 4.4 delivers a delayed envelope this long before it is due; the daemon keeps it for the rest."""


def as_bytes(value: object) -> bytes | None:
    """Return the bytes of a decoded header's string or bytes; None for another value."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    return value if isinstance(value, bytes) else None


def as_text(raw: bytes) -> str:
    """Decode bytes; those that are not UTF-8 become backslash escapes."""
    return raw.decode("utf-8", "backslashreplace")


DIRECT_REPLY: Final = b"amq.rabbitmq.reply-to"
"""Prefix of the pseudo-queues for direct replies. The default exchange routes them to one consumer, without a queue."""


def is_direct_reply(exchange: bytes, routing_key: bytes) -> bool:
    """Whether a publish goes to a direct reply, not a queue. For an invalid name the broker closes the connection
    (541)."""
    return not exchange and routing_key.startswith(DIRECT_REPLY)


class Target(NamedTuple):
    """The destination of a due message."""

    exchange: bytes
    routing_key: bytes


class Parcel(NamedTuple):
    """A message on its way into the store: as received, with the decisions about it. ``route``, the exchange that the
    message came through, serves lists and audits. A release needs only the target, so later changes of the
    configuration do not affect it."""

    due_ms: int
    route: bytes
    exchange: bytes
    routing_key: bytes
    target: Target
    properties: bytes
    body: bytes
    key: bytes | None = None
    token: bytes = b""
    """The ``x-delayer-id`` of a message published or cascaded before it was held. If empty, the release sets one."""

    @property
    def names(self) -> dict[str, bytes]:
        """The destination and the route, for a log line."""
        return {"exchange": self.target.exchange, "routing_key": self.target.routing_key, "route": self.route}


class Due(NamedTuple):
    """A message that a claim locked for release. ``id`` is its number in the store. ``sound`` is false if the stored
    checksum or format does not match the bytes; the daemon holds such a message."""

    id: int
    due_ms: int
    attempts: int
    parcel: Parcel
    sound: bool
    hold: Hold | None = None
    """Why the message was last held; None if it never was."""
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
    """The rate-limited route that the lane serves."""
    owned: bool


class LaneTable(NamedTuple):
    """The lanes of the store and its live processes, as last read. ``rank``: the place of this process among them."""

    lanes: Sequence[LaneRow]
    live: int
    rank: int
    intake: int = 0
    """The epoch of the intake: how often a process has begun to apply operations with keys."""

    @property
    def routes(self) -> Mapping[bytes, int]:
        """The lane of each limited route."""
        return {lane.route: lane.number for lane in self.lanes if lane.route is not None}
