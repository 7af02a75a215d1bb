"""Refused messages: their reason and origin, and the way back to the intake. No I/O.

A retry undoes :func:`refused_properties`: it removes the added headers, and restores the expiration and
``x-opt-delivery-time``. A user_id stays a header. The id stays, because it names the publish, and the daemon removes it
at its next edit. A message that the broker dead-lettered gets a new id. A relative delay counts from the retry, so the
time when a broker first received the message is removed.

The origin is in delayer's headers if the daemon refused the message, and in ``x-death`` if the broker dead-lettered it
from the intake queue. A publisher may forge both. So a message returns only through an entry of the intake, and never
if the two name different exchanges.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Final, NamedTuple

from delayer.amqp.errors import MalformedProperties, MalformedTable
from delayer.amqp.properties import Properties, byte_array, changed, encode_headers, entry, long_string, splice
from delayer.amqp.values import Delivery, Outgoing, Timestamp
from delayer.core.delay_headers import DELAY, DELIVER_AT, LONGEST_TIMER_MS, OPT_DELAY, OPT_TIME
from delayer.core.filters import own_name
from delayer.core.marks import ID, LAST_DUE, RECEIVED_AT, X_DEATH
from delayer.core.message import COPY_HEADERS, as_bytes, as_text, raw
from delayer.core.plan import closes_channel
from delayer.format.from_json import encode_value
from delayer.format.headers import (
    ADDED_TO_REFUSED,
    DELIVERY_TIME,
    EXCHANGE,
    EXPIRATION,
    PROPERTIES,
    REFUSED,
    ROUTING_KEY,
    USER_ID,
    header_text,
)
from delayer.format.release import why_unpublishable

_LONGEST_ID: Final = 64
"""Bytes of an id that a retry keeps, because a publisher may have written it."""
_READ: Final = frozenset({ID, REFUSED, EXCHANGE, ROUTING_KEY, PROPERTIES, X_DEATH})
"""The headers that describe a refusal."""
_HARMFUL: Final[tuple[str, ...]] = ("user_id", "expiration")
_GAINED: Final = ADDED_TO_REFUSED | {EXPIRATION}


def refused_properties(
    delivery: Delivery, reason: str, id: bytes, max_properties: int, parsed: Properties | None = None
) -> tuple[bytes, bytes]:
    """Build the properties of a refused message, and its token. ``parsed``: the delivery's properties, if known.

    ``expiration``, ``user_id`` and an ``x-opt-delivery-time`` other than text become headers of ours. The first would
    delete the message from the refused queue, the second would make the broker close the channel. The third would delay
    the message, or as a decimal close the connection. If the header table is malformed, if ``reply_to`` or the copies
    would close the channel, or if the result exceeds the frame's limit, one header carries the original properties. If
    they do not fit in a header, the message keeps them without the note, what would do harm and ``x-death``, and the
    token is empty. If they do not fit even then, the message has only the note.
    """
    notes = (
        entry(ID, long_string(id))
        + entry(REFUSED, long_string(header_text(reason)))
        + entry(EXCHANGE, long_string(delivery.exchange))
        + entry(ROUTING_KEY, long_string(delivery.routing_key))
    )
    fallback = b""
    try:
        found = parsed or Properties.parse(delivery.properties)
        kept, remove, drop = _with_notes(found, notes), ADDED_TO_REFUSED | {ID, X_DEATH, OPT_TIME}, _HARMFUL
        if why_unpublishable(Properties.parse(kept)):
            remove, drop = remove | COPY_HEADERS, (*drop, "reply_to")
        elif len(kept) <= max_properties:
            return kept, id
        fallback = splice(found, remove=remove, drop=drop)
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
    remove = ADDED_TO_REFUSED | {ID}
    delivery_time = properties.get(OPT_TIME)
    if delivery_time is not None and not isinstance(delivery_time.value, str):  # The broker ignores text.
        notes += entry(DELIVERY_TIME, delivery_time.type_and_value)
        remove |= {OPT_TIME}
    return splice(properties, remove=remove, append=notes, drop=_HARMFUL)


class EntryPoints(NamedTuple):
    """The ways into the intake queue: the exchanges of the routes, and the queue's name on the default exchange."""

    queue: bytes
    exchanges: frozenset[bytes]

    @classmethod
    def of(cls, queue: str, exchanges: Iterable[str]) -> EntryPoints:
        return cls(queue.encode(), frozenset(one.encode() for one in exchanges))

    def can_route(self, exchange: bytes, routing_key: bytes) -> bool:
        """Whether a message with this exchange and key may have reached the intake queue."""
        return (exchange in self.exchanges if exchange else routing_key == self.queue) and len(routing_key) <= 255


class Refusal(NamedTuple):
    """The reason and origin (None if unknown) of a refused message. ``id``: in the form for operators; "" if it has
    none."""

    id: str
    reason: str
    exchange: bytes | None
    routing_key: bytes | None
    message_id: str
    mangled: bool
    """Whether one header carries its original properties, so that the daemon would refuse it again."""


def read_refusal(delivery: Delivery, entries: EntryPoints) -> Refusal:
    """Read the headers of a message of the refused queue."""
    try:
        properties = Properties.parse(delivery.properties)
        fields = {one.name: one for one in reversed(properties.headers_items(_READ))}
        reason, exchange, routing_key = _read_reason_and_origin(fields, entries.queue)
        mangled = REFUSED in fields and PROPERTIES in fields
        id, message_id = _content(fields, ID) or b"", properties.short("message_id") or b""
        return Refusal(own_name(as_text(id)), reason, exchange, routing_key, as_text(message_id), mangled)
    except (MalformedProperties, MalformedTable) as error:
        return Refusal("", f"not readable: {error}", None, None, "", mangled=True)


def _read_reason_and_origin(fields: Mapping[bytes, Any], intake: bytes) -> tuple[str, bytes | None, bytes | None]:
    death = _read_death(fields, intake)
    if REFUSED not in fields:
        return death or ("the reason is unknown: there is no note of delayer or of the broker", None, None)
    reason = as_text(fields[REFUSED].content)
    exchange, key = _content(fields, EXCHANGE), _content(fields, ROUTING_KEY)
    if death is None:
        return reason, exchange, key
    # Either of the two may be forged.
    both = f"{death[0]}, and by its own headers: {reason}"
    return (both, exchange, key) if exchange == death[1] else (both, None, None)


class RetryEdits(NamedTuple):
    """The changes of a retry. ``headers``: encoded entries by name; an empty entry only removes the header.
    ``unread``: exchanges whose messages stay refused, because their routes would not read the new delay, with the
    reason. ``request``: the changes as an operator gave them, for the audit log."""

    headers: Mapping[bytes, bytes] = {}
    unread: Mapping[bytes, str] = {}
    request: Mapping[str, Any] = {}

    @classmethod
    def of(
        cls, delay_ms: int | None, headers: Mapping[str, Any], dropped: Iterable[bytes], unread: Mapping[bytes, str]
    ) -> RetryEdits:
        """``delay_ms`` replaces all delays by an ``x-delay``, and then messages from ``unread`` exchanges stay."""
        removed = [*dropped]
        request = {"delay_ms": delay_ms, "headers": dict(headers), "dropped": list(map(as_text, removed))}
        if delay_ms is not None:
            headers, removed = {**headers, as_text(DELAY): delay_ms}, [*removed, DELIVER_AT, OPT_DELAY, OPT_TIME]
        if delay_ms == 0:
            removed.append(LAST_DUE)  # Next to it, an x-delay of 0 would be what an earlier delay left.
        entries = {raw(name): entry(raw(name), encode_value(it)) for name, it in headers.items()}
        mended = {name: it for name, it in request.items() if it not in (None, {}, [])}
        return cls(
            dict.fromkeys(removed, b"") | entries,
            {} if delay_ms is None else unread,
            {"mended": mended} if mended else {},
        )


NO_EDITS: Final = RetryEdits()


def build_retry(delivery: Delivery, entries: EntryPoints, max_properties: int, edits: RetryEdits) -> Outgoing | str:
    """Build the edited message that returns to where it came from. Returns the reason if it cannot."""
    refusal = read_refusal(delivery, entries)
    if refusal.mangled:
        return "its original properties are malformed, too long or unpublishable: it would be refused again"
    if refusal.exchange is None or refusal.routing_key is None:
        return "its origin is unknown, or its headers contradict each other"
    can_return = entries.can_route(refusal.exchange, refusal.routing_key)
    if not can_return or refusal.exchange in edits.unread:
        unroutable = f"no route comes from its exchange {as_text(refusal.exchange)!r} with this key"
        unroutable += "; add a [[route]] for it, or drop the message"
        return edits.unread[refusal.exchange] if can_return else unroutable
    properties = Properties.parse(delivery.properties)
    was_refused = properties.get(REFUSED) is not None
    given = properties.get(ID) if was_refused else None
    token = uuid.uuid4().hex.encode() if given is None else given.content[:_LONGEST_ID]
    append, remove = entry(ID, long_string(token)), (_GAINED if was_refused else frozenset()) | {ID, RECEIVED_AT}
    if (user_id := properties.short("user_id")) is not None:  # The broker refuses a user_id of another user.
        append, remove = append + entry(USER_ID, long_string(user_id)), remove | {USER_ID}
    delivery_time = properties.get(DELIVERY_TIME) if was_refused else None
    if delivery_time is not None and OPT_TIME not in edits.headers:
        append += entry(OPT_TIME, delivery_time.type_and_value)
    append += b"".join(edits.headers.values())
    raw = splice(properties, remove=remove | edits.headers.keys(), append=append, drop=("user_id",))
    expiration = _removed_expiration(properties) if was_refused and "expiration" not in properties.places else None
    if expiration is not None:
        raw = changed(Properties.parse(raw), {"expiration": bytes((len(expiration),)) + expiration})
    if why := _why_unsendable(Properties.parse(raw)):
        return why
    if len(raw) > max_properties:
        return f"its properties are too long: expected at most {max_properties} bytes, found {len(raw)}"
    return Outgoing(refusal.exchange, refusal.routing_key, raw, delivery.body, token)


def _why_unsendable(properties: Properties) -> str:
    """Return why a message cannot leave with these properties, or ""."""
    if wrong := why_unpublishable(properties):
        return wrong
    if (delivery_time := properties.get(OPT_TIME)) is None:
        return ""
    try:
        when = delivery_time.value
    except MalformedTable as broken:
        return f"its x-opt-delivery-time cannot be read: {broken}"
    if isinstance(when, Decimal | list | dict):
        return "its x-opt-delivery-time is no number: RabbitMQ 4.4 would close the connection"
    if isinstance(when, int) and int(when) * (1000 if isinstance(when, Timestamp) else 1) > LONGEST_TIMER_MS:
        return "its x-opt-delivery-time is too far ahead: RabbitMQ 4.4 would end the queue that it comes to"
    return ""


def _removed_expiration(properties: Properties) -> bytes | None:
    """Return the expiration that the refusal removed: the last header of that name. None if it is invalid, because the
    broker closes the channel for one."""
    values = [one.content for one in properties.headers_items((EXPIRATION,))]
    return values[-1] if values and not closes_channel(None, values[-1], {}) else None


def _read_death(fields: Mapping[bytes, Any], intake: bytes) -> tuple[str, bytes | None, bytes | None] | None:
    """Read the reason and the origin from the intake queue's entry in ``x-death``; None without one. Entries of other
    queues are from other trips, or from a publisher."""
    for death in fields[X_DEATH].tables() if X_DEATH in fields else ():
        if isinstance(death, dict) and as_bytes(death.get("queue")) == intake:
            keys = death.get("routing-keys")
            key = keys[0] if isinstance(keys, list) and keys else None
            return (
                f"the broker: {death.get('reason')} in {death.get('queue')}",
                as_bytes(death.get("exchange")),
                as_bytes(key),
            )
    return None


def _content(fields: Mapping[bytes, Any], name: bytes) -> bytes | None:
    content: bytes | None = fields[name].content if name in fields else None
    return content
