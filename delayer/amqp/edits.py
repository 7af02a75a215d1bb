"""The edits of a message on its way (design, 4.4). All other bytes stay as they came.

asked         the request that the planner reads
failed        properties of a dead letter, with a note of its failure
released      properties as they leave for the destination
refused       properties as they go to the refused queue
enveloped     properties of an envelope: the broker acts on nothing inside it, in the cascade or the strays queue
opened        the message that an envelope of the due queue carries
into_cascade  a publish towards the due queue
to_strays     a publish into the strays queue
stray         the message that an envelope of the strays queue carries
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from zlib import crc32

from delayer.amqp.properties import (
    MalformedProperties,
    MalformedTable,
    Properties,
    array,
    boolean,
    byte_array,
    elements,
    encode_headers,
    entry,
    int64,
    long_string,
    negated,
    negated_if_positive,
    splice,
    table,
    timestamp,
    value_at,
)
from delayer.core import cascade
from delayer.core.delay_headers import DELAY, Ask, UnreadableDelay, read_delay_ms
from delayer.core.hold import Hold, HoldKind
from delayer.core.levels import X_DEATH
from delayer.core.message import SHORT_STRING, Delivery, Outgoing, Parcel, Target
from delayer.core.plan import CONSULTED, LATEST_MS
from delayer.core.retry_policy import FAILED_IN, RETRIES, Failure

ID: Final = b"x-delayer-id"
DUE: Final = b"x-delayer-due"
USER_ID: Final = b"x-delayer-user-id"
EXPIRATION: Final = b"x-delayer-expiration"

SAID: Final = frozenset(
    {
        b"x-deliver-at",
        b"x-opt-delivery-delay",
        b"x-opt-delivery-time",
        b"x-delay-routing-key",
        b"x-delay-exchange",
        b"x-delay-key",
        b"x-delay-cancel",
    }
)
# x-death and its kin are the broker's own notes of a message's past. Kept, they would make RabbitMQ before 4.0 drop it
# silently on its next trip through a cascade, which it takes for a dead-letter cycle.
# x-acquired-count: what RabbitMQ from 4.3 on counts beside x-delivery-count.
_COUNTED: Final = frozenset({b"x-delivery-count", b"x-acquired-count"})
_REMOVED: Final = SAID | _COUNTED | {b"x-death", ID, DUE}
_REFUSED: Final = b"x-delayer-refused"
EXCHANGE: Final = b"x-delayer-exchange"
ROUTING_KEY: Final = b"x-delayer-routing-key"
PROPERTIES: Final = b"x-delayer-properties"
ENVELOPE: Final = b"x-delayer-envelope"
"""What makes an envelope of a message; see edits.py."""
_OF_THE_REFUSED: Final = frozenset({_REFUSED, EXCHANGE, ROUTING_KEY})
"""What a refused message gained. Published again and delivered, it is refused no more; without the first of them the
other two are somebody's own."""
_REMOVED_PREFIXES: Final = (b"x-first-death-", b"x-last-death-")
_DEATH: Final = b"-death-"
_ROUTES: Final = frozenset({b"CC", b"BCC"})

ROOM: Final = 2048
"""Bytes that any of these edits may add: ids, names of at most 255 bytes each, a reason of at most 500."""
REASON: Final = 500


def asked(delivery: Delivery, properties: Properties, consulted: Collection[bytes] = CONSULTED) -> Ask:
    """What a message says. Of a repeated header the first one counts, as it does for the broker.

    Raises MalformedTable.
    """
    raw = properties.raw
    headers: dict[bytes, object] = {}
    copies: frozenset[bytes] = frozenset()
    for name, type_at, stop in properties.entries():
        if name in consulted:
            if name not in headers:
                headers[name] = value_at(raw, type_at, stop)
        elif name in _ROUTES:
            copies |= _keys(value_at(raw, type_at, stop))
    return Ask(
        delivery.exchange,
        delivery.routing_key,
        headers,
        properties.timestamp,
        copies,
        delivery.body,
        properties.short("content_encoding"),
        properties.message_id,
        # Messages without an id that failed together are alike, byte for byte: their deliveries are not.
        crc32(delivery.tag.to_bytes(8, "big"), crc32(raw)) / (1 << 32) if X_DEATH in headers else 0.0,
    )


def _keys(value: object) -> frozenset[bytes]:
    """The strings of a CC header: what the broker routes by. It passes over values of other types, and so do we."""
    if not isinstance(value, list):
        return frozenset()
    strings = (one.encode("utf-8", "surrogateescape") if isinstance(one, str) else one for one in value)
    return frozenset(one for one in strings if isinstance(one, bytes))


_HISTORY: Final = b"x-delayer-history"
_ERROR: Final = b"x-delayer-error"
_COPIES: Final = b"x-delayer-cc"
_FIRST_FAILURES: Final = 1
_LAST_FAILURES: Final = 19
"""Failures that the history tells of: where the message came from at first, and what happened lately."""


def failed(properties: Properties, failure: Failure, max_properties: int) -> bytes:
    """A dead letter with what is known of its failures: how many, where and why the last one, and a history.

    ``x-death`` goes: the broker would count on from it, and it is in the history. ``CC`` becomes a header of ours: it
    goes back to the one queue that gave it up, and the others have their copies. Raises MalformedTable.
    """
    told = properties.get(_HISTORY)
    # Of a history that somebody else made of this header nothing can be kept.
    past = elements(told.content) if told is not None and told.type == ord("A") else []
    if failure.retries == 1:
        past = []  # of another queue
    now = table(
        entry(b"queue", long_string(failure.queue))
        + entry(b"reason", long_string(failure.reason.encode("utf-8", "surrogateescape")))
        + entry(b"time", timestamp(failure.at))
        + entry(b"exchange", long_string(failure.exchange))
        + entry(b"routing-key", long_string(failure.routing_key))
    )
    past = [*past[:_FIRST_FAILURES], *past[_FIRST_FAILURES:][1 - _LAST_FAILURES :], now]
    counted = (
        entry(RETRIES, int64(failure.retries))
        + entry(FAILED_IN, long_string(failure.queue))
        + entry(_ERROR, long_string(shown(f"{failure.reason} in queue {failure.queue.decode('utf-8', 'replace')}")))
    )
    whole = _noted(properties, counted + entry(_HISTORY, array(b"".join(past))))
    return whole if len(whole) + ROOM <= max_properties else _noted(properties, counted)


def _noted(properties: Properties, append: bytes) -> bytes:
    remove = {RETRIES, FAILED_IN, _ERROR, _HISTORY, X_DEATH} | _COUNTED | _ROUTES
    copies = properties.get(b"CC")
    if copies is not None:
        remove |= {_COPIES}
        append = entry(_COPIES, copies.type_and_value) + append
    return splice(properties, remove=remove, remove_prefixes=_REMOVED_PREFIXES, append=append)


# The entries of the two headers that every message gets, up to their values.
_ID_HEAD: Final = entry(ID, long_string(b""))[:-4]
_DUE_HEAD: Final = entry(DUE, int64(0))[:-8]


def released(properties: Properties, id: bytes, due_ms: int) -> bytes:
    """As the message leaves for its destination. Raises MalformedTable."""
    append = b"%b%b%b%b%b" % (
        _ID_HEAD,
        len(id).to_bytes(4, "big"),
        id,
        _DUE_HEAD,
        due_ms.to_bytes(8, "big", signed=True),
    )
    remove = _REMOVED
    # The bytes are searched first, which costs next to nothing: hardly any message was ever refused.
    if _REFUSED in properties.raw and properties.get(_REFUSED) is not None:
        remove |= _OF_THE_REFUSED
    drop: tuple[str, ...] = ()
    user_id = properties.user_id
    if user_id is not None:
        append += entry(USER_ID, long_string(user_id))
        remove |= {USER_ID}
        drop = ("user_id",)
    return splice(
        properties,
        remove=remove,
        remove_prefixes=_REMOVED_PREFIXES if _DEATH in properties.raw else (),
        replace=_turned(properties),
        append=append,
        drop=drop,
    )


def _turned(properties: Properties) -> Mapping[bytes, bytes]:
    """``x-delay`` with its sign turned: the plugin's mark for a delay that is over. One that is not positive is that
    mark already; one that cannot be read was not what this message was delayed by, and stays."""
    for name, type_at, stop in properties.entries():
        if name == DELAY:
            return _turned_delay(properties.raw, type_at, stop)
    return {}


def _turned_delay(raw: bytes, type_at: int, stop: int) -> Mapping[bytes, bytes]:
    turned = negated_if_positive(raw, type_at)
    if turned is not None:
        return {DELAY: turned}
    try:
        positive = read_delay_ms(value_at(raw, type_at, stop)) > 0
    except UnreadableDelay:
        return {}
    return {DELAY: negated(raw[type_at], raw[type_at + 1 : stop])} if positive else {}


def refused(delivery: Delivery, reason: str, id: bytes, max_properties: int) -> tuple[bytes, bytes]:
    """Properties of a refused message, and the token that they carry.

    Everything is kept, but ``expiration`` and ``user_id`` become headers: the one would delete the message from the
    refused queue, the other would make the broker close the channel. Where the header table is broken bytes, or full
    to the frame's limit, the original properties go along whole in one header, or, if even that does not fit, alone.
    """
    gained = (
        entry(ID, long_string(id))
        + entry(_REFUSED, long_string(shown(reason)))
        + entry(EXCHANGE, long_string(delivery.exchange))
        + entry(ROUTING_KEY, long_string(delivery.routing_key))
    )
    try:
        kept = _with_gains(Properties.parse(delivery.properties), gained)
        if len(kept) <= max_properties:
            return kept, id
        bare = splice(delivery.properties, remove=_OF_THE_REFUSED | {ID, X_DEATH}, drop=("user_id", "expiration"))
    except (MalformedProperties, MalformedTable):
        bare = encode_headers(gained)
    wrapped = encode_headers(gained + entry(PROPERTIES, byte_array(delivery.properties)))
    # Alone they carry no token, so a return could not be told apart; the refused exchange has its queue, always.
    return (wrapped, id) if len(wrapped) <= max_properties else (bare, b"")


def _with_gains(properties: Properties, gained: bytes) -> bytes:
    if properties.expiration is not None:
        gained += entry(EXPIRATION, long_string(properties.expiration))
    if properties.user_id is not None:
        gained += entry(USER_ID, long_string(properties.user_id))
    return splice(
        properties,
        remove=_OF_THE_REFUSED | {ID},
        append=gained,
        drop=("user_id", "expiration"),
    )


def shown(text: str, most: int = REASON) -> bytes:
    """A reason as it stands in a header, of at most so many bytes."""
    # Cut between characters: client libraries fail on strings that are not UTF-8.
    return text.encode("utf-8", "replace")[:most].decode("utf-8", "ignore").encode()


ID_BYTES: Final = 32
"""The longest id that we give: a UUID in hexadecimal."""
HOLD_TEXT: Final = 300
"""Bytes of the text of a hold: its note takes more room than that of a refused message."""
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
        + entry(_TEXT, long_string(shown(hold.text, HOLD_TEXT)))
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
    text = found[_TEXT].content[:HOLD_TEXT].decode("utf-8", "backslashreplace") if _TEXT in found else ""
    flags = (name in found and found[name].content[:1] == b"\1" for name in (_MAY_BE_DELIVERED, _ISOLATED))
    return Held(Hold(kind, text, *flags), attempts, retry_ms)
