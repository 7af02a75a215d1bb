"""Envelopes: a message travels through the cascade, or to the strays queue, so that nothing of it can act on the way.

enveloped      properties of the carrier
opened         the way back out of it
into_cascade   a publish towards the due queue
to_strays      a publish into the strays queue
stray          the way back out of that
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from delayer.amqp.edits import DUE, ENVELOPE, EXCHANGE, ID, PROPERTIES, ROOM, ROUTING_KEY, shown
from delayer.amqp.properties import (
    MalformedProperties,
    MalformedTable,
    Properties,
    boolean,
    byte_array,
    encode_headers,
    entry,
    int64,
    long_string,
)
from delayer.core import cascade
from delayer.core.hold import Hold, HoldKind
from delayer.core.message import SHORT_STRING, Delivery, Outgoing, Parcel, Target
from delayer.core.plan import LATEST_MS

ID_BYTES: Final = 32
"""The longest id that we give: a UUID in hexadecimal."""
REASON: Final = 300
"""Bytes of a Hold's text: its note takes more room than that of a refused message."""
_ROUTE: Final = b"x-delayer-route"
_TO: Final = b"x-delayer-to"
_TO_KEY: Final = b"x-delayer-to-key"
_HELD: Final = b"x-delayer-held"
"""The kind of the objection (core/hold.py)."""
_TEXT: Final = b"x-delayer-held-text"
_MAY_BE_DELIVERED: Final = b"x-delayer-may-be-delivered"
_ISOLATED: Final = b"x-delayer-isolated"
_ATTEMPTS: Final = b"x-delayer-attempts"
_RETRY: Final = b"x-delayer-retry"
"""When the daemon retries the message, epoch milliseconds. Absent: a person decides."""
_MOST_ATTEMPTS: Final = 1 << 31
"""Believed of what anybody can put there: one more must fit the header too."""

# The rule for changing this: messages of an older format may be in the cascade for 8.5 years. A new format gets a new
# number here, opened() goes on reading every older one, and tests/unit keeps bytes of each.
FORMAT: Final = 1


class NoEnvelope(ValueError):
    """A message in the due queue that did not come out of our cascade; it says what is missing."""


class Held(NamedTuple):
    """The note of a message that a destination did not take: why, after how many attempts, and when the daemon retries
    it (epoch milliseconds; None: a person decides)."""

    hold: Hold
    attempts: int
    retry_ms: int | None


class Envelope(NamedTuple):
    """What an envelope holds. ``held``: None where no destination refused the message yet."""

    id: bytes
    parcel: Parcel
    held: Held | None = None

    @property
    def next_ms(self) -> int:
        """The instant of the next attempt: never before the message is due."""
        again_ms = None if self.held is None else self.held.retry_ms
        return self.parcel.due_ms if again_ms is None else max(self.parcel.due_ms, again_ms)


@dataclass(frozen=True, slots=True)
class Names:
    """The places that a publish of the daemon's own may go to, and how many bytes of properties fit a frame."""

    levels: cascade.Cascade
    due_queue: bytes
    refused_exchange: bytes
    max_properties: int


def into_cascade(parcel: Parcel, id: bytes, seconds: int, names: Names, held: Held | None = None) -> Outgoing:
    """A publish into the cascade, towards the daemon's own due queue."""
    entry_exchange = names.levels.entry(seconds).encode()
    key = cascade.routing_key(seconds, names.due_queue)
    return Outgoing(entry_exchange, key, enveloped(parcel, id, held), parcel.body, id)


def to_strays(parcel: Parcel, id: bytes, held: Held, names: Names) -> Outgoing:
    """A publish into the strays queue, where the message waits for a person."""
    exchange = names.levels.strays.encode()
    return Outgoing(exchange, parcel.routing_key, enveloped(parcel, id, held), parcel.body, id)


def stray(delivery: Delivery, delivery_exchange: bytes, due_queue: bytes, max_properties: int) -> Envelope | str:
    """The envelope that stands in the strays queue; or why the message there is none of ours.

    A message that came out of the cascade for another address than the due queue is its publisher's own, whatever its
    headers look like: the way that a message took says what it is.
    """
    if delivery.exchange == delivery_exchange and not cascade.leads_to(delivery.routing_key, due_queue):
        found = delivery.routing_key.decode("utf-8", "backslashreplace")
        return f"not an envelope of ours: expected a key that ends with {due_queue.decode()!r}, found {found!r}"
    try:
        return opened(Properties.parse(delivery.properties), delivery.body, max_properties)
    except (NoEnvelope, MalformedProperties, MalformedTable) as broken:
        return f"not an envelope of ours: {broken}"


def enveloped(parcel: Parcel, id: bytes, held: Held | None = None) -> bytes:
    """Properties of a carrier: the message's own, verbatim, in one header, and what was decided in others.

    Nothing of the message can act or be re-encoded on the way; its body rides as it is.
    """
    headers = (
        entry(ID, long_string(id))
        + entry(DUE, int64(parcel.due_ms))
        + entry(ENVELOPE, int64(FORMAT))
        + entry(_ROUTE, long_string(parcel.route))
        + entry(EXCHANGE, long_string(parcel.exchange))
        + entry(ROUTING_KEY, long_string(parcel.routing_key))
        + entry(_TO, long_string(parcel.target.exchange))
        + entry(_TO_KEY, long_string(parcel.target.routing_key))
        + entry(PROPERTIES, byte_array(parcel.properties))
    )
    if held is not None:
        headers += _note(held)
    return encode_headers(headers, delivery_mode=2)


def opened(properties: Properties, body: bytes, max_properties: int) -> Envelope:
    """The message inside a carrier. Raises NoEnvelope, MalformedTable.

    Only for what came the way that carriers come: publishers can write all of these headers on messages of their own.
    Anybody can publish to the due queue, so nothing is believed that would not fit where it goes next: its destination,
    the cascade once more, or the strays queue.
    """
    found = {field.name: field for field in properties.headers_items()}

    def content(name: bytes, limit: int) -> bytes:
        if name not in found:
            raise NoEnvelope(f"header {name.decode()} is missing")
        value = found[name].content
        if len(value) > limit:
            raise NoEnvelope(f"header {name.decode()}: expected at most {limit} bytes, found {len(value)}")
        return value

    version = int.from_bytes(content(ENVELOPE, 8), "big")
    if version != FORMAT:
        raise NoEnvelope(f"expected envelope format {FORMAT}, found {version}")
    due_ms = int.from_bytes(content(DUE, 8), "big", signed=True)
    if not 0 <= due_ms <= LATEST_MS:
        raise NoEnvelope(f"expected a due instant of 0 to {LATEST_MS}, found {due_ms}")
    parcel = Parcel(
        due_ms,
        content(_ROUTE, SHORT_STRING),
        content(EXCHANGE, SHORT_STRING),
        content(ROUTING_KEY, SHORT_STRING),
        Target(content(_TO, SHORT_STRING), content(_TO_KEY, SHORT_STRING)),
        content(PROPERTIES, max_properties - ROOM),
        body,
    )
    return Envelope(content(ID, ID_BYTES), parcel, _held(found) if _HELD in found else None)


def _note(held: Held) -> bytes:
    hold = held.hold
    note = (
        entry(_HELD, long_string(hold.kind.encode()))
        + entry(_TEXT, long_string(shown(hold.text, REASON)))
        + entry(_MAY_BE_DELIVERED, boolean(hold.may_be_delivered))
        + entry(_ISOLATED, boolean(hold.isolated))
        + entry(_ATTEMPTS, int64(held.attempts))
    )
    return note if held.retry_ms is None else note + entry(_RETRY, int64(held.retry_ms))


def _held(found: Mapping[bytes, Any]) -> Held | None:
    """The note of earlier attempts; None where it is not possible: then the daemon tries the message at once."""
    if _ATTEMPTS not in found:
        return None
    attempts = int.from_bytes(found[_ATTEMPTS].content[:8], "big", signed=True)
    retry_ms = int.from_bytes(found[_RETRY].content[:8], "big", signed=True) if _RETRY in found else None
    if not 0 <= attempts < _MOST_ATTEMPTS or not 0 <= (retry_ms or 0) <= LATEST_MS:
        return None
    try:
        kind = HoldKind(found[_HELD].content.decode("ascii", "replace"))
    except ValueError:
        return None
    text = found[_TEXT].content[:REASON].decode("utf-8", "backslashreplace") if _TEXT in found else ""
    flags = (name in found and found[name].content[:1] == b"\1" for name in (_MAY_BE_DELIVERED, _ISOLATED))
    return Held(Hold(kind, text, *flags), attempts, retry_ms)
