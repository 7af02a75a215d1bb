"""Edit a message on its way: to its destination, into the refused queue, and inside an envelope through the cascade or
into the strays queue. All other bytes stay unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final, NamedTuple
from zlib import crc32

from delayer.amqp.errors import MalformedProperties, MalformedTable
from delayer.amqp.properties import (
    Cut,
    Properties,
    byte_array,
    changed,
    edited,
    elements,
    encode_headers,
    entry,
    int64,
    long_string,
    negated,
    sized,
    splice,
    timestamp,
    value_at,
)
from delayer.core import cascade
from delayer.core.delay_headers import (
    DELAY,
    LONGEST_TIMER_MS,
    OPT_TIME,
    REQUEST_HEADERS,
    DelayRequest,
    UnreadableDelay,
    is_mark,
    read_delay_ms,
)
from delayer.core.delay_sources import CONSULTED, COPY_HEADERS
from delayer.core.hold import Hold, HoldKind
from delayer.core.marks import LAST_DUE, X_DEATH
from delayer.core.message import BROKER_LEAD_MS, SHORT_STRING, Delivery, Outgoing, Parcel, Target
from delayer.core.plan import LATEST_MS
from delayer.core.retry_policy import FAILED_IN, RETRIES, FailedAttempt

ID: Final = b"x-delayer-id"
USER_ID: Final = b"x-delayer-user-id"
EXPIRATION: Final = b"x-delayer-expiration"

# If x-death stayed, RabbitMQ before 4.0 would see a dead-letter cycle on the next trip through a cascade, and silently
# drop the message. RabbitMQ 4.3 and later counts x-acquired-count in addition to x-delivery-count.
COUNTED: Final = frozenset({b"x-delivery-count", b"x-acquired-count"})
_REMOVED: Final = REQUEST_HEADERS | COUNTED | {X_DEATH, ID, LAST_DUE}
REFUSED: Final = b"x-delayer-refused"
EXCHANGE: Final = b"x-delayer-exchange"
ROUTING_KEY: Final = b"x-delayer-routing-key"
PROPERTIES: Final = b"x-delayer-properties"
ENVELOPE: Final = b"x-delayer-envelope"
"""The header that marks an envelope; its value is the format."""
DELIVERY_TIME: Final = b"x-delayer-delivery-time"
"""The ``x-opt-delivery-time`` of a refused message. RabbitMQ 4.4 would hide the message in the refused queue until
then; a time more than 292 years ahead would crash the queue."""
_OF_THE_REFUSED: Final = frozenset({REFUSED, EXCHANGE, ROUTING_KEY, DELIVERY_TIME})
"""Headers that delayer adds to a refused message. Without ``x-delayer-refused`` they are the publisher's, and stay."""
DEATHS: Final = (b"x-first-death-", b"x-last-death-")
_DEATH: Final = b"-death-"

ROOM: Final = 2048
"""Maximum bytes that any of these edits adds: ids, names of at most 255 bytes each, a reason of at most 500."""
REASON: Final = 500


def asked(delivery: Delivery, properties: Properties, consulted: frozenset[bytes] = CONSULTED) -> DelayRequest:
    """Read the delay request from a message's headers, limited to ``consulted``. Of repeated headers the first wins, as
    for the broker, unless it is an ``x-delay`` that is a mark. Collects all ``CC`` and ``BCC``. Raises
    MalformedTable."""
    raw = properties.raw
    headers: dict[bytes, object] = {}
    copies: frozenset[bytes] = frozenset()
    for name, type_at, stop in properties.entries(consulted):
        if name in COPY_HEADERS:
            copies |= routing_keys_of(value_at(raw, type_at, stop))
        elif name not in headers or (name == DELAY and is_mark(headers[name])):
            headers[name] = value_at(raw, type_at, stop)
    # The chance spreads retries. Failed messages without an id can be equal byte for byte, but their tags differ.
    chance = crc32(delivery.tag.to_bytes(8, "big"), crc32(raw)) / (1 << 32) if X_DEATH in headers else 0.0
    _, _, exchange, routing_key, _, body, _ = delivery
    return DelayRequest(exchange, routing_key, headers, properties, body, copies, chance)


def routing_keys_of(value: object) -> frozenset[bytes]:
    """The routing keys in a CC header: its strings. Values of other types are skipped, as by the broker."""
    if not isinstance(value, list):
        return frozenset()
    strings = (one.encode("utf-8", "surrogateescape") if isinstance(one, str) else one for one in value)
    return frozenset(one for one in strings if isinstance(one, bytes))


_HISTORY: Final = b"x-delayer-history"
_ERROR: Final = b"x-delayer-error"
_COPIES: Final = b"x-delayer-cc"
_FIRST_FAILURES: Final = 1
_LAST_FAILURES: Final = 19
"""The history keeps this many failures: the first shows the origin, and the last ones the recent past."""


def failed(properties: Properties, failure: FailedAttempt, max_properties: int) -> bytes:
    """Note a dead letter's failures in its properties: their number, place and reason of the last, and a history.

    ``x-death`` is removed, because the broker would continue its count; the history has its facts. ``CC`` is renamed,
    because only the queue that dead-lettered the message gets it again; other queues have their copies. A history that
    does not fit is left out. Raises MalformedTable.
    """
    history = properties.get(_HISTORY)
    # Delayer did not write a header of this name with another type, so its content is dropped.
    past = elements(history.content) if history is not None and history.type == ord("A") else []
    if failure.retries == 1:
        past = []  # The history is from another queue.
    now = sized(
        b"F",
        entry(b"queue", long_string(failure.queue))
        + entry(b"reason", long_string(failure.reason.encode("utf-8", "surrogateescape")))
        + entry(b"time", timestamp(failure.at))
        + entry(b"exchange", long_string(failure.exchange))
        + entry(b"routing-key", long_string(failure.routing_key)),
    )
    past = [*past[:_FIRST_FAILURES], *past[_FIRST_FAILURES:][1 - _LAST_FAILURES :], now]
    counted = (
        entry(RETRIES, int64(failure.retries))
        + entry(FAILED_IN, long_string(failure.queue))
        + entry(_ERROR, long_string(shown(f"{failure.reason} in queue {failure.queue.decode('utf-8', 'replace')}")))
    )
    whole = _noted(properties, counted + entry(_HISTORY, sized(b"A", b"".join(past))))
    return whole if len(whole) + ROOM <= max_properties else _noted(properties, counted)


def _noted(properties: Properties, append: bytes) -> bytes:
    remove = {RETRIES, FAILED_IN, _ERROR, _HISTORY, X_DEATH} | COUNTED | COPY_HEADERS
    copies = properties.get(b"CC")
    if copies is not None:
        remove |= {_COPIES}
        append = entry(_COPIES, copies.type_and_value) + append
    return splice(properties, remove=remove, remove_prefixes=DEATHS, append=append)


# The entries of the two headers that every message gets, without their values.
_ID_HEAD: Final = entry(ID, long_string(b""))[:-4]
_DUE_HEAD: Final = entry(LAST_DUE, int64(0))[:-8]
_U32: Final = Struct(">I")
_I64: Final = Struct(">q")


_CUT: Final = _REMOVED | _OF_THE_REFUSED | {DELAY}


def released(properties: Properties, id: bytes, due_ms: int) -> bytes:
    """Edit the properties of a message as it leaves for its destination. Raises MalformedTable. ``x-delay`` becomes
    negative, which is the delay plugin's mark for a delay that is over."""
    append = b"".join((_ID_HEAD, _U32.pack(len(id)), id, _DUE_HEAD, _I64.pack(due_ms)))
    wanted = _CUT
    if "user_id" in properties.places:
        append += entry(USER_ID, long_string(properties.short("user_id") or b""))
        wanted |= {USER_ID}
        properties = Properties.parse(changed(properties, {}, ("user_id",)))
    raw = properties.raw
    # Searching the raw bytes is cheap, and few messages were ever dead letters.
    found = properties.entries(None if _DEATH in raw else wanted)
    cuts: list[Cut] = []
    turned = b""
    for name, type_at, stop in found:
        if name == DELAY:
            # Of repeated headers, the first that is not a mark delayed this message.
            turned = turned or _turned(raw, type_at, stop)
            if turned:
                cuts.append((type_at, stop, turned))
        elif name in _OF_THE_REFUSED:
            if any(one == REFUSED for one, _, _ in found):
                cuts.append((type_at - 1 - len(name), stop, b""))
        elif name in wanted or name.startswith(DEATHS):
            cuts.append((type_at - 1 - len(name), stop, b""))
    return edited(properties, cuts, append)


def _turned(raw: bytes, type_at: int, stop: int) -> bytes:
    """Flip the sign of the delay. Empty for a value that stays: a value that is not positive is a mark already, and an
    unreadable value did not delay this message."""
    try:
        positive = read_delay_ms(value_at(raw, type_at, stop)) > 0
    except (UnreadableDelay, MalformedTable):
        return b""
    return negated(raw[type_at], raw[type_at + 1 : stop]) if positive else b""


def refused(
    delivery: Delivery, reason: str, id: bytes, max_properties: int, parsed: Properties | None = None
) -> tuple[bytes, bytes]:
    """Build the properties of a refused message, and its token. ``parsed``: the delivery's properties, if known.

    ``expiration``, ``user_id`` and an ``x-opt-delivery-time`` other than text become headers of ours. The first would
    delete the message from the refused queue, the second would make the broker close the channel. The third would delay
    the message, or as a decimal close the connection. If the header table is malformed, or the result exceeds the
    frame's limit, one header carries the original properties. If they do not fit in a header, they go without the note,
    these three and ``x-death``, and the token is empty. If they do not fit either way, only the note goes.
    """
    notes = (
        entry(ID, long_string(id))
        + entry(REFUSED, long_string(shown(reason)))
        + entry(EXCHANGE, long_string(delivery.exchange))
        + entry(ROUTING_KEY, long_string(delivery.routing_key))
    )
    fallback = b""
    try:
        kept = _with_notes(parsed or Properties.parse(delivery.properties), notes)
        if len(kept) <= max_properties:
            return kept, id
        fallback = splice(
            delivery.properties, remove=_OF_THE_REFUSED | {ID, X_DEATH, OPT_TIME}, drop=("user_id", "expiration")
        )
    except (MalformedProperties, MalformedTable):
        pass
    wrapped = encode_headers(notes + entry(PROPERTIES, byte_array(delivery.properties)))
    if len(wrapped) <= max_properties:
        return wrapped, id
    # The fallback needs no token: the refused exchange always has its queue, so nothing is returned.
    return (fallback, b"") if 0 < len(fallback) <= max_properties else (encode_headers(notes), id)


def _with_notes(properties: Properties, notes: bytes) -> bytes:
    for name, header in (("expiration", EXPIRATION), ("user_id", USER_ID)):
        if (value := properties.short(name)) is not None:
            notes += entry(header, long_string(value))
    remove = _OF_THE_REFUSED | {ID}
    delivery_time = properties.get(OPT_TIME)
    if delivery_time is not None and not isinstance(delivery_time.value, str):  # The broker ignores text.
        notes += entry(DELIVERY_TIME, delivery_time.type_and_value)
        remove |= {OPT_TIME}
    return splice(properties, remove=remove, append=notes, drop=("user_id", "expiration"))


def shown(text: str, most: int = REASON) -> bytes:
    """Cut a reason to a header value of at most ``most`` bytes."""
    # Cut between characters, because client libraries fail on strings that are not UTF-8.
    return text.encode("utf-8", "replace")[:most].decode("utf-8", "ignore").encode()


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

# To change the format: messages of an older format may stay in the cascade for 8.5 years. So give the new format a new
# number here, let opened() read every older format, and keep bytes of each in tests/unit.
FORMAT: Final = 1


class InvalidEnvelope(ValueError):
    """The message is not an envelope that this version can read. The text says why."""


class HoldNote(NamedTuple):
    """A held message's note: reason, attempts so far, and time of the next (epoch ms; None if an operator decides)."""

    hold: Hold
    attempts: int
    retry_ms: int | None


class Envelope(NamedTuple):
    """The content of an envelope. ``held`` is None if no destination has refused the message yet. ``rest_ms`` is the
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
    in the daemon, or with ``broker_delays`` from the due queue, BROKER_LEAD_MS early, for the daemon to keep."""
    if not names.broker_delays:
        return into_cascade(parcel, id, seconds, names, held=held, rest_ms=rest_ms)
    more = entry(OPT_TIME, int64(min(at_ms - BROKER_LEAD_MS, LONGEST_TIMER_MS)))
    properties = enveloped(parcel, id, held, BROKER_LEAD_MS, more=more)
    key = cascade.routing_key(0, names.due_queue)
    return Outgoing(names.levels.delivery.encode(), key, properties, parcel.body, id)


def into_cascade(
    parcel: Parcel, id: bytes, seconds: int, names: Endpoints, *, held: HoldNote | None = None, rest_ms: int = 0
) -> Outgoing:
    """Build the publish of an envelope into the cascade, towards the daemon's own due queue."""
    entry_exchange = names.levels.entry(seconds).encode()
    key = cascade.routing_key(seconds, names.due_queue)
    return Outgoing(entry_exchange, key, enveloped(parcel, id, held, rest_ms), parcel.body, id)


def to_strays(parcel: Parcel, id: bytes, held: HoldNote, names: Endpoints) -> Outgoing:
    """Build the publish of an envelope into the strays queue, where the message waits for an operator."""
    exchange = names.levels.strays.encode()
    return Outgoing(exchange, parcel.routing_key, enveloped(parcel, id, held), parcel.body, id)


def enveloped(parcel: Parcel, id: bytes, held: HoldNote | None = None, rest_ms: int = 0, more: bytes = b"") -> bytes:
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
        headers += _hold_headers(held)
    return encode_headers(headers + more)


def opened(properties: Properties, body: bytes, max_properties: int) -> Envelope:
    """Open an envelope. Raises InvalidEnvelope, MalformedTable. Call this only for messages of the due queue and the
    strays queue. Any client can publish there, so each value must fit the next publish: to the destination, into the
    cascade again, or into the strays queue."""
    found = {field.name: field for field in properties.headers_items()}

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


def _hold_headers(held: HoldNote) -> bytes:
    hold = held.hold
    note = (
        entry(_HOLD_KIND, long_string(hold.kind.encode()))
        + entry(_TEXT, long_string(shown(hold.text, HOLD_TEXT)))
        + entry(_MAY_BE_DELIVERED, b"t%c" % hold.may_be_delivered)
        + entry(_ISOLATED, b"t%c" % hold.isolated)
        + entry(_ATTEMPTS, int64(held.attempts))
    )
    return note if held.retry_ms is None else note + entry(_RETRY, int64(held.retry_ms))


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
