"""Refused messages: the reason and the origin that their headers tell, and the way back to the intake. No I/O.

A retry undoes the refusal (edits.refused): it removes the added headers, and restores the expiration and
``x-opt-delivery-time``. A user_id stays a header. The id stays, because it names the publish; a message that the broker
dead-lettered gets a new one. The daemon removes it at its next edit. A relative delay counts from now, so the time at
which a broker first received the message goes.

The daemon writes the origin of a message into headers of ours when it refuses the message. The broker writes it into
``x-death`` when it dead-letters the message from the intake queue. A publisher may forge both. So a message goes back
only through an entry of the intake, and never if the two name different exchanges.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Final, NamedTuple

from pamqp.encode import field_table

from delayer.amqp.edits import DELIVERY_TIME, EXCHANGE, EXPIRATION, ID, PROPERTIES, REFUSED, ROUTING_KEY, USER_ID
from delayer.amqp.errors import MalformedProperties, MalformedTable
from delayer.amqp.properties import Field, Properties, changed, long_string, splice
from delayer.amqp.properties import entry as header
from delayer.amqp.reading import raw
from delayer.core.delay_headers import DELAY, DELIVER_AT, LONGEST_TIMER_MS, OPT_DELAY, OPT_TIME
from delayer.core.filters import own_name
from delayer.core.marks import RECEIVED_AT, X_DEATH
from delayer.core.message import Delivery, Outgoing, Timestamp, as_bytes, as_text

_LONGEST_ID: Final = 64
"""A retry keeps at most this many bytes of an id, because a publisher may have written it."""
_GAINED: Final = frozenset({REFUSED, EXCHANGE, ROUTING_KEY, EXPIRATION, DELIVERY_TIME})


class EntryPoints(NamedTuple):
    """The ways into the intake queue: the exchanges of the routes, and its own name through the default exchange."""

    queue: bytes
    exchanges: frozenset[bytes]

    @classmethod
    def of(cls, queue: str, exchanges: Iterable[str]) -> EntryPoints:
        return cls(queue.encode(), frozenset(one.encode() for one in exchanges))

    def lead_in(self, exchange: bytes, routing_key: bytes) -> bool:
        """Whether a message with this exchange and key can have reached the intake queue."""
        return (exchange in self.exchanges if exchange else routing_key == self.queue) and len(routing_key) <= 255


class Refusal(NamedTuple):
    """The headers of a message in the refused queue: the reason, and the origin (None: unknown). ``id``: as people
    write it; "" if it has none."""

    id: str
    reason: str
    exchange: bytes | None
    routing_key: bytes | None
    message_id: str
    mangled: bool
    """Its original properties are malformed or too long: the daemon would refuse it again."""


def refusal_of(delivery: Delivery, entries: EntryPoints) -> Refusal:
    """The reason and origin of a message of the refused queue, as its headers tell them."""
    try:
        properties = Properties.parse(delivery.properties)
        fields = {one.name: one for one in reversed(properties.headers_items())}
        reason, exchange, routing_key = _reason_and_origin(fields, entries.queue)
        mangled = REFUSED in fields and PROPERTIES in fields
        id, message_id = _content(fields, ID) or b"", properties.short("message_id") or b""
        return Refusal(own_name(as_text(id)), reason, exchange, routing_key, as_text(message_id), mangled)
    except (MalformedProperties, MalformedTable) as error:
        return Refusal("", f"not readable: {error}", None, None, "", mangled=True)


def _reason_and_origin(fields: Mapping[bytes, Any], intake: bytes) -> tuple[str, bytes | None, bytes | None]:
    """Why it is refused, and where it came in."""
    death = _death(fields, intake)
    if REFUSED not in fields:
        return death or ("the reason is unknown: there is no note of delayer or of the broker", None, None)
    reason = as_text(fields[REFUSED].content)
    exchange, key = _content(fields, EXCHANGE), _content(fields, ROUTING_KEY)
    if death is None:
        return reason, exchange, key
    # Both tell a reason and an origin. One of them may be forged.
    both = f"{death[0]}, and by its own headers: {reason}"
    return (both, exchange, key) if exchange == death[1] else (both, None, None)


class Mend(NamedTuple):
    """The changes of a retry. ``headers``: names with their encoded entries; an empty entry only removes the header.
    ``unfit``: exchanges whose messages stay refused, because their routes would not read it, with the reason.
    ``asked``: the changes as an operator gave them, for the audit log."""

    headers: Mapping[bytes, bytes] = {}
    unfit: Mapping[bytes, str] = {}
    asked: Mapping[str, Any] = {}

    @classmethod
    def of(
        cls, delay_ms: int | None, headers: Mapping[str, Any], dropped: Iterable[bytes], unread: Mapping[bytes, str]
    ) -> Mend:
        """``delay_ms`` sets ``x-delay`` in place of the other delays; messages from ``unread`` exchanges stay then."""
        removed = [*dropped]
        asked = {"delay_ms": delay_ms, "headers": dict(headers), "dropped": list(map(as_text, removed))}
        if delay_ms is not None:
            headers, removed = {**headers, as_text(DELAY): delay_ms}, [*removed, DELIVER_AT, OPT_DELAY, OPT_TIME]
        # Each value is the entry of a table with one header, without the table's length.
        entries = {raw(name): field_table({name: it})[4:] for name, it in headers.items()}
        mended = {name: it for name, it in asked.items() if it not in (None, {}, [])}
        return cls(
            dict.fromkeys(removed, b"") | entries,
            {} if delay_ms is None else unread,
            {"mended": mended} if mended else {},
        )


AS_IT_IS: Final = Mend()


def again(delivery: Delivery, entries: EntryPoints, max_properties: int, mend: Mend) -> Outgoing | str:
    """How the mended message goes back to where it came in; or why it cannot."""
    refusal = refusal_of(delivery, entries)
    if refusal.mangled:
        return "its original properties are malformed or too long: it would be refused again"
    if refusal.exchange is None or refusal.routing_key is None:
        return "its origin is unknown, or its headers contradict each other"
    known = entries.lead_in(refusal.exchange, refusal.routing_key)
    if not known or refusal.exchange in mend.unfit:
        strange = f"no route comes from its exchange {as_text(refusal.exchange)!r} with this key"
        return mend.unfit[refusal.exchange] if known else strange
    properties = Properties.parse(delivery.properties)
    was_refused = properties.get(REFUSED) is not None
    given = properties.get(ID) if was_refused else None
    token = uuid.uuid4().hex.encode() if given is None else given.content[:_LONGEST_ID]
    append, remove = header(ID, long_string(token)), (_GAINED if was_refused else frozenset()) | {ID, RECEIVED_AT}
    if (user_id := properties.short("user_id")) is not None:  # The broker refuses a user_id of another user.
        append, remove = append + header(USER_ID, long_string(user_id)), remove | {USER_ID}
    delivery_time = properties.get(DELIVERY_TIME) if was_refused else None
    if delivery_time is not None and OPT_TIME not in mend.headers:
        append += header(OPT_TIME, delivery_time.type_and_value)
    append += b"".join(mend.headers.values())
    raw = splice(properties, remove=remove | mend.headers.keys(), append=append, drop=("user_id",))
    if (time := Properties.parse(raw).get(OPT_TIME)) is not None and (why := _unfit_time(time)):
        return why
    expiration = _expiration(properties) if was_refused else None
    if expiration is not None:
        raw = with_short(raw, "expiration", expiration)
    if len(raw) > max_properties:
        return f"its properties are too long: expected at most {max_properties} bytes, found {len(raw)}"
    return Outgoing(refusal.exchange, refusal.routing_key, raw, delivery.body, token)


def _unfit_time(delivery_time: Field) -> str:
    """Why the message cannot leave with this ``x-opt-delivery-time``. Empty if it can."""
    try:
        when = delivery_time.value
    except MalformedTable as broken:
        return f"its x-opt-delivery-time cannot be read: {broken}"
    if isinstance(when, Decimal | list | dict):
        return "its x-opt-delivery-time is no number: RabbitMQ 4.4 would close the connection"
    if isinstance(when, int) and int(when) * (1000 if isinstance(when, Timestamp) else 1) > LONGEST_TIMER_MS:
        return "its x-opt-delivery-time is too far ahead: RabbitMQ 4.4 would end the queue that it comes to"
    return ""


def _expiration(properties: Properties) -> bytes | None:
    """The expiration that the refusal removed: the last header of that name. The broker closes the channel for an
    invalid expiration, so an invalid value cannot come from one."""
    values = [one.content for one in properties.headers_items() if one.name == EXPIRATION]
    return values[-1] if values and re.fullmatch(rb"[0-9]{1,10}", values[-1]) and int(values[-1]) < 1 << 32 else None


def with_short(raw: bytes, name: str, value: bytes) -> bytes:
    """Add this short string to the properties, unless it is there."""
    properties = Properties.parse(raw)
    if name in properties.places:
        return raw
    return changed(properties, {name: bytes((len(value),)) + value})


def _death(fields: Mapping[bytes, Any], intake: bytes) -> tuple[str, bytes | None, bytes | None] | None:
    """The reason and the origin of a message that the broker dead-lettered, from the intake queue's entry in
    ``x-death``. None without one. Entries of other queues belong to other trips, or to a publisher."""
    deaths = fields[X_DEATH].value if X_DEATH in fields else None
    for death in deaths if isinstance(deaths, list) else ():
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
