"""The values that the layers exchange: parcels, claimed rows and lanes. Names and properties are bytes, as in
amqp/values.py, and the daemon never decodes them on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from delayer.core.hold import Hold  # core/hold.py imports this module.


WINDOW_MS: Final = 100
"""A claim covers the messages due within this time, and a Pace publishes each on time. A longer window costs less
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


def raw(text: str) -> bytes:
    """Encode a name from the command line or a form as AMQP has it."""
    return text.encode("utf-8", "surrogateescape")


DIRECT_REPLY: Final = b"amq.rabbitmq.reply-to"
"""Prefix of the pseudo-queues for direct replies. The default exchange routes them to one consumer, without a queue."""


def is_direct_reply(exchange: bytes, routing_key: bytes) -> bool:
    """Whether a publish goes to a direct reply, not a queue. For an invalid name the broker closes the connection
    (541)."""
    return not exchange and routing_key.startswith(DIRECT_REPLY)


COPY_HEADERS: Final = frozenset({b"CC", b"BCC"})
"""The headers with further routing keys of a message."""
LONGEST_EXPIRATION_MS: Final = 315_360_000_000
"""Ten years: RabbitMQ's own limit for any time to live."""


class Target(NamedTuple):
    """The destination of a due message."""

    exchange: bytes
    routing_key: bytes


class KeyMode(NamedTuple):
    """What a message does to the message that waits under its key. It replaces it, unless ``keep``: then it is
    dropped."""

    keep: bool = False
    ceiling_ms: int | None = None
    """If set, the message debounces: it is due at most this long after the first message of its burst was parked. A
    burst is a message and those that replaced it by debouncing, until one is cancelled, released, held or replaced by
    another mode."""


REPLACE: Final = KeyMode()


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
    mode: KeyMode = REPLACE
    since_ms: int | None = None
    """When the first message of its burst was parked, epoch milliseconds; None if it is the first."""

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


class KeyGroup(bytes):
    """All keys that begin with these bytes, which must not be empty."""

    __slots__ = ()


OCCURRENCE: Final = b"delayer.schedule/"
"""How the key of a schedule's waiting occurrence begins. The schedule's name follows. No publisher may use it."""
OCCURRENCES: Final = (OCCURRENCE, OCCURRENCE[:-1] + b"0")
"""The range of these keys, without its end."""


def is_occurrence(key: bytes | None) -> bool:
    """Whether the key is that of a schedule's waiting occurrence."""
    return key is not None and key.startswith(OCCURRENCE)


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
    foreign: Sequence[str] = ()
    """The sessions of other roles that have locks of the store."""

    @property
    def routes(self) -> Mapping[bytes, int]:
        """The lane of each limited route."""
        return {lane.route: lane.number for lane in self.lanes if lane.route is not None}
