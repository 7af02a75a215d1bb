"""Envelopes: how a message travels through the cascade, or to the strays, so that nothing of it can act on the way.

enveloped   properties of the carrier
opened      the way back out of it
held        what a stray says of its Hold
"""

from __future__ import annotations

from typing import Final, NamedTuple

from delayer.core.hold import Hold, HoldKind
from delayer.core.message import Parcel, Target
from delayer.core.plan import LATEST_MS, SHORT_STRING
from delayer.services.edits import DUE, ENVELOPE, EXCHANGE, ID, PROPERTIES, ROOM, ROUTING_KEY, shown
from delayer.wire.fields import boolean
from delayer.wire.properties import Properties, byte_array, encode_headers, entry, int64, long_string

ID_BYTES: Final = 32
"""The longest id that we give: a UUID in hexadecimal."""
REASON: Final = 300
"""Bytes of a stray's text: the note of a stray takes more room than that of a refused message."""
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


class Envelope(NamedTuple):
    """What an envelope holds."""

    id: bytes
    parcel: Parcel


class Held(NamedTuple):
    """What a stray says of itself: why it is held, the number of attempts, and when the daemon retries it (epoch
    milliseconds; None: a person decides)."""

    hold: Hold
    attempts: int
    retry_ms: int | None


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
    return Envelope(content(ID, ID_BYTES), parcel)


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


def held(properties: Properties) -> Held | None:
    """What a stray says of itself; None where it says nothing, or nothing possible: then the daemon tries it at once.
    Raises MalformedTable."""
    found = {field.name: field for field in properties.headers_items()}
    if _HELD not in found or _ATTEMPTS not in found:
        return None
    attempts = int.from_bytes(found[_ATTEMPTS].content[:8], "big", signed=True)
    retry_ms = int.from_bytes(found[_RETRY].content[:8], "big", signed=True) if _RETRY in found else None
    if not 0 < attempts < _MOST_ATTEMPTS or not 0 <= (retry_ms or 0) <= LATEST_MS:
        return None
    try:
        kind = HoldKind(found[_HELD].content.decode("ascii", "replace"))
    except ValueError:
        return None
    text = found[_TEXT].content[:REASON].decode("utf-8", "backslashreplace") if _TEXT in found else ""
    flags = (name in found and found[name].content[:1] == b"\1" for name in (_MAY_BE_DELIVERED, _ISOLATED))
    return Held(Hold(kind, text, *flags), attempts, retry_ms)
