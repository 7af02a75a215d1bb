"""Envelopes: how a message travels through the cascade, or to the strays, so that nothing of it can act on the way.

enveloped   properties of the carrier
opened      the way back out of it
tried       what a stray says of itself
"""

from __future__ import annotations

from typing import Final, NamedTuple

from delayer.core.message import Parcel, Target
from delayer.core.plan import LATEST_MS, SHORT_STRING
from delayer.services.edits import DUE, ENVELOPE, EXCHANGE, ID, PROPERTIES, ROOM, ROUTING_KEY, shown
from delayer.wire.properties import Properties, byte_array, encode_headers, entry, int64, long_string

ID_BYTES: Final = 32
"""The longest id that we give: a UUID in hexadecimal."""
REASON: Final = 440
"""Bytes of a stray's reason: fewer than of another's, whose note takes less room."""
_ROUTE: Final = b"x-delayer-route"
_TO: Final = b"x-delayer-to"
_TO_KEY: Final = b"x-delayer-to-key"
_HELD: Final = b"x-delayer-held"
_ATTEMPTS: Final = b"x-delayer-attempts"
_RETRY: Final = b"x-delayer-retry"
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
    """Why a message was not taken, how often it was tried, and when it is tried again (epoch milliseconds)."""

    reason: str
    attempts: int
    retry_ms: int


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
        headers += entry(_HELD, long_string(shown(held.reason, REASON)))
        headers += entry(_ATTEMPTS, int64(held.attempts)) + entry(_RETRY, int64(held.retry_ms))
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


def reason_of(raw: bytes) -> str:
    """Why a stray is one, as it says itself, cleaned; "" where it says nothing. Raises MalformedProperties,
    MalformedTable."""
    found = Properties.parse(raw).get(_HELD)
    return "" if found is None else found.content[:REASON].decode("utf-8", "backslashreplace")


def tried(properties: Properties) -> tuple[int, int]:
    """What a stray says of itself: how often it was tried, and when it is tried again (epoch milliseconds). Zero where
    it says nothing, or nothing that can be: then it is tried at once. Raises MalformedTable."""
    attempts, retry_ms = (
        0 if (found := properties.get(name)) is None else int.from_bytes(found.content[:8], "big", signed=True)
        for name in (_ATTEMPTS, _RETRY)
    )
    return (attempts, retry_ms) if 0 < attempts < _MOST_ATTEMPTS and 0 <= retry_ms <= LATEST_MS else (0, 0)
