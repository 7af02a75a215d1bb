"""The envelope that carries a message unchanged through the cascade, the due queue and the strays queue, with the
decisions about it. Messages may stay in the cascade for 8.5 years."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from delayer.amqp.properties import Properties, byte_array, encode_headers, entry, int64, long_string
from delayer.amqp.values import SHORT_STRING, Outgoing
from delayer.core import cascade
from delayer.core.delay_headers import LONGEST_TIMER_MS, OPT_TIME
from delayer.core.hold import Hold, HoldKind
from delayer.core.marks import ID, LAST_DUE
from delayer.core.message import BROKER_LEAD_MS, Parcel, Target
from delayer.core.units import LATEST_MS
from delayer.format.headers import EXCHANGE, PROPERTIES, ROOM, ROUTING_KEY, header_text

ID_BYTES: Final = 32
"""Bytes of delayer's longest id: a UUID in hexadecimal."""
HOLD_TEXT: Final = 300
"""Maximum bytes of a hold's text. It is shorter than a refusal's reason, because the rest of the note needs room."""
_REST: Final = b"x-delayer-rest"
"""How long the daemon keeps the message after the due queue has delivered it, in milliseconds."""
_ROUTE: Final = b"x-delayer-route"
_TO: Final = b"x-delayer-to"
_TO_KEY: Final = b"x-delayer-to-key"
_HOLD_KIND: Final = b"x-delayer-held"
"""The kind of the hold (core/hold.py)."""
_TEXT: Final = b"x-delayer-held-text"
_MAY_BE_DELIVERED: Final = b"x-delayer-may-be-delivered"
_ISOLATED: Final = b"x-delayer-isolated"
_ATTEMPTS: Final = b"x-delayer-attempts"
_RETRY: Final = b"x-delayer-retry"
"""The time of the daemon's next attempt, in epoch milliseconds. If it is missing, an operator decides."""
_MAX_ATTEMPTS: Final = 1 << 31
"""Limit of ``_ATTEMPTS``. Any publisher can write that header, and one attempt more must still fit."""

FORMAT: Final = 1
ENVELOPE: Final = b"x-delayer-envelope"
"""The header that marks an envelope; its value is the format."""


_HEADERS: Final = frozenset(
    {
        ID, LAST_DUE, ENVELOPE, _ROUTE, EXCHANGE, ROUTING_KEY, _TO, _TO_KEY, PROPERTIES, _REST,
        _HOLD_KIND, _TEXT, _MAY_BE_DELIVERED, _ISOLATED, _ATTEMPTS, _RETRY,
    }
)  # fmt: skip


class InvalidEnvelope(ValueError):
    """The message is not an envelope that this version can read. The text says why."""


class HoldNote(NamedTuple):
    """A held message's note: reason, attempts so far, and time of the next (epoch ms; None if an operator decides)."""

    hold: Hold
    attempts: int
    retry_ms: int | None


class Envelope(NamedTuple):
    """The content of an envelope. ``held`` is None if the message was not held yet. ``rest_ms`` is the
    part of the delay beyond the cascade's whole seconds."""

    id: bytes
    parcel: Parcel
    held: HoldNote | None = None
    rest_ms: int = 0

    @property
    def next_ms(self) -> int:
        """When to try next, in epoch milliseconds, never before the message is due."""
        again_ms = None if self.held is None else self.held.retry_ms
        return self.parcel.due_ms if again_ms is None else max(self.parcel.due_ms, again_ms)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The daemon's own exchanges and queues, and the limit of a frame's properties in bytes."""

    levels: cascade.Cascade
    due_queue: bytes
    refused_exchange: bytes
    max_properties: int
    broker_delays: bool = False
    """Whether the broker itself delays envelopes in the due queue, so that they do not need a cascade."""


def into_broker(
    parcel: Parcel,
    id: bytes,
    at_ms: int,
    seconds: int,
    names: Endpoints,
    *,
    held: HoldNote | None = None,
    rest_ms: int = 0,
) -> Outgoing:
    """Build the publish of an envelope that comes back at ``at_ms``: after ``seconds`` in the cascade and ``rest_ms``
    in the daemon. With ``broker_delays``, the due queue delivers it BROKER_LEAD_MS early and the daemon keeps it that
    long; ``seconds`` and ``rest_ms`` are then unused."""
    if not names.broker_delays:
        return into_cascade(parcel, id, seconds, names, held=held, rest_ms=rest_ms)
    more = entry(OPT_TIME, int64(min(at_ms - BROKER_LEAD_MS, LONGEST_TIMER_MS)))
    properties = envelope_properties(parcel, id, held, BROKER_LEAD_MS, more=more)
    key = cascade.routing_key(0, names.due_queue)
    return Outgoing(names.levels.delivery.encode(), key, properties, parcel.body, id)


def into_cascade(
    parcel: Parcel, id: bytes, seconds: int, names: Endpoints, *, held: HoldNote | None = None, rest_ms: int = 0
) -> Outgoing:
    """Build the publish of an envelope into the cascade, towards the daemon's own due queue."""
    entry_exchange = names.levels.entry(seconds).encode()
    key = cascade.routing_key(seconds, names.due_queue)
    return Outgoing(entry_exchange, key, envelope_properties(parcel, id, held, rest_ms), parcel.body, id)


def to_strays(parcel: Parcel, id: bytes, held: HoldNote, names: Endpoints) -> Outgoing:
    """Build the publish of an envelope into the strays queue, where the message waits for an operator."""
    exchange = names.levels.strays.encode()
    return Outgoing(exchange, parcel.routing_key, envelope_properties(parcel, id, held), parcel.body, id)


def envelope_properties(
    parcel: Parcel, id: bytes, held: HoldNote | None = None, rest_ms: int = 0, more: bytes = b""
) -> bytes:
    """Build the properties of an envelope: one header has the message's own properties verbatim, the rest have the
    decisions. The broker neither acts on anything inside nor re-encodes it; the body stays unchanged."""
    headers = (
        entry(ID, long_string(id))
        + entry(LAST_DUE, int64(parcel.due_ms))
        + entry(ENVELOPE, int64(FORMAT))
        + entry(_ROUTE, long_string(parcel.route))
        + entry(EXCHANGE, long_string(parcel.exchange))
        + entry(ROUTING_KEY, long_string(parcel.routing_key))
        + entry(_TO, long_string(parcel.target.exchange))
        + entry(_TO_KEY, long_string(parcel.target.routing_key))
        + entry(PROPERTIES, byte_array(parcel.properties))
    )
    if rest_ms:
        headers += entry(_REST, int64(rest_ms))
    if held is not None:
        headers += (
            entry(_HOLD_KIND, long_string(held.hold.kind.encode()))
            + entry(_TEXT, long_string(header_text(held.hold.text, HOLD_TEXT)))
            + entry(_MAY_BE_DELIVERED, b"t%c" % held.hold.may_be_delivered)
            + entry(_ISOLATED, b"t%c" % held.hold.isolated)
            + entry(_ATTEMPTS, int64(held.attempts))
        )
        if held.retry_ms is not None:
            headers += entry(_RETRY, int64(held.retry_ms))
    return encode_headers(headers + more)


def read_envelope(properties: Properties, body: bytes, max_properties: int) -> Envelope:
    """Open an envelope. Raises InvalidEnvelope, MalformedTable. Call this only for messages of the due queue and the
    strays queue. Any client can publish there, so each value must fit the next publish: to the destination, into the
    cascade again, or into the strays queue."""
    found = {field.name: field for field in properties.headers_items(_HEADERS)}

    def content(name: bytes, limit: int) -> bytes:
        if name not in found:
            raise InvalidEnvelope(f"header {name.decode()} is missing")
        value = found[name].content
        if len(value) > limit:
            raise InvalidEnvelope(f"header {name.decode()}: expected at most {limit} bytes, found {len(value)}")
        return value

    version = int.from_bytes(content(ENVELOPE, 8), "big")
    if version != FORMAT:
        raise InvalidEnvelope(f"expected envelope format {FORMAT}, found {version}")
    due_ms = int.from_bytes(content(LAST_DUE, 8), "big", signed=True)
    if not 0 <= due_ms <= LATEST_MS:
        raise InvalidEnvelope(f"expected a due instant of 0 to {LATEST_MS}, found {due_ms}")
    parcel = Parcel(
        due_ms,
        content(_ROUTE, SHORT_STRING),
        content(EXCHANGE, SHORT_STRING),
        content(ROUTING_KEY, SHORT_STRING),
        Target(content(_TO, SHORT_STRING), content(_TO_KEY, SHORT_STRING)),
        content(PROPERTIES, max_properties - ROOM),
        body,
    )
    rest_ms = int.from_bytes(content(_REST, 8), "big", signed=True) if _REST in found else 0
    held = _read_hold_note(found) if _HOLD_KIND in found else None
    return Envelope(content(ID, ID_BYTES), parcel, held, min(max(rest_ms, 0), 999))


def _read_hold_note(found: Mapping[bytes, Any]) -> HoldNote | None:
    """Read the note of earlier attempts; without a valid note None, so that the daemon tries the message when due."""
    if _ATTEMPTS not in found:
        return None
    attempts = int.from_bytes(found[_ATTEMPTS].content[:8], "big", signed=True)
    retry_ms = int.from_bytes(found[_RETRY].content[:8], "big", signed=True) if _RETRY in found else None
    if not 0 <= attempts < _MAX_ATTEMPTS or not 0 <= (retry_ms or 0) <= LATEST_MS:
        return None
    try:
        kind = HoldKind(found[_HOLD_KIND].content.decode("ascii", "replace"))
    except ValueError:
        return None
    text = found[_TEXT].content[:HOLD_TEXT].decode("utf-8", "backslashreplace") if _TEXT in found else ""
    flags = (name in found and found[name].content[:1] == b"\1" for name in (_MAY_BE_DELIVERED, _ISOLATED))
    return HoldNote(Hold(kind, text, *flags), attempts, retry_ms)
