"""Refused messages once more: what they say of themselves, and how they go back to where they came in. Pure.

What the refusal added is taken off again (edits.refused), and what it took out, the expiration, is put back. The id
that it gave stays: the publish is known by it, and the daemon takes it off at its next edit.
"""

from __future__ import annotations

import uuid
from typing import Any, Final, NamedTuple

from delayer.core.message import Delivery, Outgoing
from delayer.services.edits import EXPIRATION, ID
from delayer.wire.properties import FLAGS, NAMES, MalformedProperties, MalformedTable, Properties, long_string, splice
from delayer.wire.properties import entry as header

_REASON: Final = b"x-delayer-refused"
_EXCHANGE: Final = b"x-delayer-exchange"
_ROUTING_KEY: Final = b"x-delayer-routing-key"
_WRAPPED: Final = b"x-delayer-properties"
_GAINED: Final = frozenset({_REASON, _EXCHANGE, _ROUTING_KEY, EXPIRATION})


class Refusal(NamedTuple):
    """What a message in the refused queue says: why it is there, and where it came in (None: it does not say)."""

    id: str
    reason: str
    exchange: bytes | None
    routing_key: bytes | None
    message_id: str
    mangled: bool
    """Its own properties cannot be read: the daemon would refuse it again."""


def told(delivery: Delivery) -> Refusal:
    """What ``delivery``, a message of the refused queue, says of itself."""
    try:
        properties = Properties.parse(delivery.properties)
        fields = {one.name: one for one in reversed(properties.headers_items())}
        if _REASON in fields:
            return Refusal(
                _text(_content(fields, ID)),
                _text(_content(fields, _REASON)),
                _content(fields, _EXCHANGE),
                _content(fields, _ROUTING_KEY),
                _text(properties.message_id),
                mangled=_WRAPPED in fields,
            )
        reason, exchange, routing_key = _death(fields)
        return Refusal(
            _text(_content(fields, ID)), reason, exchange, routing_key, _text(properties.message_id), mangled=False
        )
    except (MalformedProperties, MalformedTable) as error:
        return Refusal("", f"not readable: {error}", None, None, "", mangled=True)


def again(delivery: Delivery) -> Outgoing | str:
    """How the message goes back to where it came in; or why it cannot."""
    refusal = told(delivery)
    if refusal.mangled:
        return "its own headers cannot be read: it would be refused again"
    if refusal.exchange is None or refusal.routing_key is None:
        return "it does not say where it came in"
    properties = Properties.parse(delivery.properties)
    expiration = properties.get(EXPIRATION)
    token = properties.get(ID)
    token_bytes = uuid.uuid4().hex.encode() if token is None else token.content
    append = header(ID, long_string(token_bytes)) if token is None else b""
    raw = splice(properties, remove=_GAINED if _was_refused(properties) else (), append=append)
    if expiration is not None and _was_refused(properties):
        raw = with_short(raw, "expiration", expiration.content)
    return Outgoing(refusal.exchange, refusal.routing_key, raw, delivery.body, token_bytes)


def with_short(raw: bytes, name: str, value: bytes) -> bytes:
    """Properties with this short string, which they lacked."""
    properties = Properties.parse(raw)
    if name in properties.spans:
        return raw
    later = (properties.spans[one][0] for one in NAMES[NAMES.index(name) + 1 :] if one in properties.spans)
    at = min(later, default=len(raw))
    return (properties.flags | FLAGS[name]).to_bytes(2, "big") + raw[2:at] + bytes((len(value),)) + value + raw[at:]


def _was_refused(properties: Properties) -> bool:
    return properties.get(_REASON) is not None


def _death(fields: dict[bytes, Any]) -> tuple[str, bytes | None, bytes | None]:
    """Of a message that the broker put there: why, and where it came in, by the oldest of its deaths."""
    deaths = fields[b"x-death"].value if b"x-death" in fields else None
    if not isinstance(deaths, list) or not deaths or not isinstance(deaths[-1], dict):
        return "it does not say why", None, None
    first = deaths[-1]
    keys = first.get("routing-keys")
    exchange, key = first.get("exchange"), keys[0] if isinstance(keys, list) and keys else None
    return f"the broker: {first.get('reason')} in {first.get('queue')}", _bytes(exchange), _bytes(key)


def _bytes(value: object) -> bytes | None:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    return value if isinstance(value, bytes) else None


def _content(fields: dict[bytes, Any], name: bytes) -> bytes | None:
    content: bytes | None = fields[name].content if name in fields else None
    return content


def _text(raw: bytes | None) -> str:
    return "" if raw is None else raw.decode("utf-8", "backslashreplace")
