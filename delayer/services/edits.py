"""What changes on the way (design, 4.4), as edits of property bytes. Everything else stays byte for byte.

asked            what the planner needs to know of a message
failed           properties of a dead letter, with a note of its failure
released         properties as they leave for the destination
for_the_broker   the same, where the broker itself finishes the cascade
enveloped        properties of the carrier that takes a message through the cascade, or to the strays
opened           the way back out of that envelope
refused          properties as they go to the refused queue
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple
from zlib import crc32

from delayer.core.delay import UnreadableDelay, read_delay_ms
from delayer.core.forms import CONSULTED, DELAY, Ask
from delayer.core.levels import X_DEATH
from delayer.core.message import Delivery, Parcel, Target
from delayer.core.plan import LATEST_MS, SHORT_STRING
from delayer.core.retrying import FAILED_IN, RETRIES, Failure
from delayer.wire.fields import array, elements, table, timestamp
from delayer.wire.properties import (
    MalformedProperties,
    MalformedTable,
    Properties,
    byte_array,
    encode_headers,
    entry,
    int64,
    long_string,
    negated,
    negated_if_positive,
    splice,
    value_at,
)

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
_EXCHANGE: Final = b"x-delayer-exchange"
_ROUTING_KEY: Final = b"x-delayer-routing-key"
_OF_THE_REFUSED: Final = frozenset({_REFUSED, _EXCHANGE, _ROUTING_KEY})
"""What a refused message gained. Published again and delivered, it is refused no more; without the first of them the
other two are somebody's own."""
_REMOVED_PREFIXES: Final = (b"x-first-death-", b"x-last-death-")
_DEATH: Final = b"-death-"
_ROUTES: Final = frozenset({b"CC", b"BCC"})

ROOM: Final = 2048
"""Bytes that any of these edits may add: ids, names of at most 255 bytes each, a reason of at most 500."""
REASON: Final = 500
HELD_REASON: Final = 440
"""The same for a stray, whose note takes room as well."""
ID_BYTES: Final = 32
"""The longest id that we give: a UUID in hexadecimal."""


def asked(delivery: Delivery, properties: Properties, consulted: Collection[bytes] = CONSULTED) -> Ask:
    """What a message says. Of a repeated header the first one counts, as it does for the broker.

    Raises MalformedTable.
    """
    raw = properties.raw
    headers: dict[bytes, object] = {}
    copies: frozenset[bytes] = frozenset()
    acts_later = "expiration" in properties.spans
    for name, type_at, stop in properties.entries():
        if name in consulted:
            if name not in headers:
                headers[name] = value_at(raw, type_at, stop)
        elif name in _ROUTES:
            acts_later = True
            copies |= _keys(value_at(raw, type_at, stop))
    return Ask(
        delivery.exchange,
        delivery.routing_key,
        headers,
        properties.timestamp,
        acts_later,
        copies,
        delivery.body,
        properties.short("content_encoding"),
        properties.message_id,
        crc32(raw) / (1 << 32) if X_DEATH in headers else 0.0,
    )


def _keys(value: object) -> frozenset[bytes]:
    """The strings of a CC header: what the broker routes by. It passes over values of other types, and so do we."""
    if not isinstance(value, list):
        return frozenset()
    strings = (one.encode("utf-8", "surrogateescape") if isinstance(one, str) else one for one in value)
    return frozenset(one for one in strings if isinstance(one, bytes))


_HISTORY: Final = b"x-delayer-history"
_ERROR: Final = b"x-delayer-error"
_FIRST_FAILURES: Final = 1
_LAST_FAILURES: Final = 19
"""Failures that the history tells of: where the message came from at first, and what happened lately."""


def failed(properties: Properties, failure: Failure, max_properties: int) -> bytes:
    """A dead letter with what is known of its failures: how many, where and why the last one, and a history.

    ``x-death`` goes: the broker would count on from it, and it is in the history. Raises MalformedTable.
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
        + entry(_ERROR, long_string(_reason(f"{failure.reason} in queue {failure.queue.decode('utf-8', 'replace')}")))
    )
    whole = _noted(properties, counted + entry(_HISTORY, array(b"".join(past))))
    return whole if len(whole) + ROOM <= max_properties else _noted(properties, counted)


def _noted(properties: Properties, append: bytes) -> bytes:
    remove = {RETRIES, FAILED_IN, _ERROR, _HISTORY, X_DEATH} | _COUNTED
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


def for_the_broker(properties: Properties, id: bytes, due_ms: int) -> bytes:
    """As the message enters a cascade that the broker finishes: persistent, or a restart would lose it on the way.

    Only for messages without ``expiration`` and ``CC``, which would act inside the cascade.
    """
    return splice(released(properties, id, due_ms), delivery_mode=2)


_ENVELOPE: Final = b"x-delayer-envelope"
_PROPERTIES: Final = b"x-delayer-properties"
_ROUTE: Final = b"x-delayer-route"
_TO: Final = b"x-delayer-to"
_TO_KEY: Final = b"x-delayer-to-key"
_HELD: Final = b"x-delayer-held"
_ATTEMPTS: Final = b"x-delayer-attempts"
_RETRY: Final = b"x-delayer-retry"

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
        + entry(_ENVELOPE, int64(FORMAT))
        + entry(_ROUTE, long_string(parcel.route))
        + entry(_EXCHANGE, long_string(parcel.exchange))
        + entry(_ROUTING_KEY, long_string(parcel.routing_key))
        + entry(_TO, long_string(parcel.target.exchange))
        + entry(_TO_KEY, long_string(parcel.target.routing_key))
        + entry(_PROPERTIES, byte_array(parcel.properties))
    )
    if held is not None:
        headers += entry(_HELD, long_string(_reason(held.reason, HELD_REASON)))
        headers += entry(_ATTEMPTS, int64(held.attempts)) + entry(_RETRY, int64(held.retry_ms))
    return encode_headers(headers, delivery_mode=2)


def opened(properties: Properties, body: bytes, max_properties: int) -> Envelope:
    """The message inside a carrier. Raises NoEnvelope, MalformedTable.

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

    version = int.from_bytes(content(_ENVELOPE, 8), "big")
    if version != FORMAT:
        raise NoEnvelope(f"expected envelope format {FORMAT}, found {version}")
    due_ms = int.from_bytes(content(DUE, 8), "big", signed=True)
    if not 0 <= due_ms <= LATEST_MS:
        raise NoEnvelope(f"expected a due instant of 0 to {LATEST_MS}, found {due_ms}")
    parcel = Parcel(
        due_ms,
        content(_ROUTE, SHORT_STRING),
        content(_EXCHANGE, SHORT_STRING),
        content(_ROUTING_KEY, SHORT_STRING),
        Target(content(_TO, SHORT_STRING), content(_TO_KEY, SHORT_STRING)),
        content(_PROPERTIES, max_properties - ROOM),
        body,
    )
    return Envelope(content(ID, ID_BYTES), parcel)


def tried(properties: Properties) -> tuple[int, int]:
    """What a stray says of itself: how often it was tried, and when it is tried again (epoch milliseconds). Zero where
    it says nothing, or nothing that can be: then it is tried at once. Raises MalformedTable."""
    attempts, retry_ms = (
        0 if (found := properties.get(name)) is None else int.from_bytes(found.content[:8], "big", signed=True)
        for name in (_ATTEMPTS, _RETRY)
    )
    return (attempts, retry_ms) if attempts > 0 and 0 <= retry_ms <= LATEST_MS else (0, 0)


def refused(delivery: Delivery, reason: str, id: bytes, max_properties: int) -> tuple[bytes, bytes]:
    """Properties of a refused message, and the token that they carry.

    Everything is kept, but ``expiration`` and ``user_id`` become headers: the one would delete the message from the
    refused queue, the other would make the broker close the channel. Where the header table is broken bytes, or full
    to the frame's limit, the original properties go along whole in one header, or, if even that does not fit, alone.
    """
    gained = (
        entry(ID, long_string(id))
        + entry(_REFUSED, long_string(_reason(reason)))
        + entry(_EXCHANGE, long_string(delivery.exchange))
        + entry(_ROUTING_KEY, long_string(delivery.routing_key))
    )
    try:
        kept = _with_gains(Properties.parse(delivery.properties), gained)
        if len(kept) <= max_properties:
            return kept, id
        bare = splice(delivery.properties, drop=("user_id", "expiration"))
    except (MalformedProperties, MalformedTable):
        bare = encode_headers(gained)
    wrapped = encode_headers(gained + entry(_PROPERTIES, byte_array(delivery.properties)))
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


def _reason(text: str, most: int = REASON) -> bytes:
    # Cut between characters: client libraries fail on strings that are not UTF-8.
    return text.encode("utf-8", "replace")[:most].decode("utf-8", "ignore").encode()
