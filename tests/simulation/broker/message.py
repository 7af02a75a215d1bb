"""A message inside the broker: what the broker reads from it, and the headers that the broker writes."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tests.simulation.broker.declared import TYPE_NAMES
from tests.simulation.broker.fields import (
    DELIVERY_MODE,
    EXPIRATION,
    HEADERS,
    REPLY_TO,
    USER_ID,
    Malformed,
    entries,
    header,
    items,
    join,
    set_header,
    split,
    table,
)
from tests.simulation.broker.wire import Code, Refusal
from tests.support.raw import Header, Value, array, number, text

LARGEST: Final = 128 << 20
LONGEST_TTL_MS: Final = 315_360_000_000


@dataclass(eq=False, slots=True)
class Message:
    """``keys``: the routing key, then those of the headers CC and BCC."""

    exchange: bytes
    keys: tuple[bytes, ...]
    properties: bytes
    body: bytes
    ttl_ms: int | None = None
    persistent: bool = False

    @property
    def key(self) -> bytes:
        return self.keys[0]

    @property
    def headers(self) -> dict[bytes, Value]:
        return dict(reversed(entries(split(self.properties)[HEADERS])))


def receive(exchange: bytes, key: bytes, properties: bytes, body: bytes, user: str) -> Message:
    """Check a published message as the broker does. Raises Refusal."""
    if len(body) > LARGEST:
        reason = f"message size {len(body)} is larger than configured max size {LARGEST}"
        raise Refusal(Code.PRECONDITION_FAILED, reason)
    try:
        fields = split(properties)
        headers = entries(fields[HEADERS])
        _check_numbers(headers)
    except Malformed as broken:
        raise Refusal(Code.INTERNAL_ERROR) from broken
    named, mode = fields[USER_ID], fields[DELIVERY_MODE]
    if named is not None and named.decode() != user:
        reason = f"user_id property set to '{named.decode()}' but authenticated user was '{user}'"
        raise Refusal(Code.PRECONDITION_FAILED, reason)
    if mode not in (None, b"\1", b"\2"):
        raise Refusal(Code.PRECONDITION_FAILED, f"invalid message: {{delivery_mode_unknown,{mode[0]}}}")
    if fields[REPLY_TO] == b"amq.rabbitmq.reply-to":
        raise Refusal(Code.PRECONDITION_FAILED, "fast reply consumer does not exist")
    keys = (key, *_copies(headers))
    if any(name == b"BCC" for name, _ in headers):
        fields[HEADERS] = table(one for one in headers if one[0] != b"BCC")
        properties = join(fields)
    return Message(exchange, keys, properties, body, _ttl_ms(fields[EXPIRATION]), mode == b"\2")


def _copies(headers: Sequence[Header]) -> list[bytes]:
    """The routing keys in CC and BCC. Raises Refusal."""
    found: list[bytes] = []
    for name in (b"CC", b"BCC"):
        value = header(headers, name)
        if value is not None:
            if value.kind != b"A":
                kind = TYPE_NAMES.get(value.kind, "?")
                reason = f'invalid message: {{unacceptable_type_in_header,"{name.decode()}",{kind}}}'
                raise Refusal(Code.PRECONDITION_FAILED, reason)
            found += [one.raw[4:] for one in items(value.raw[4:]) if one.kind == b"S"]
    return found


def arguments_of(raw: bytes) -> dict[str, Value]:
    """The arguments of a declaration, with their types."""
    return {name.decode(): value for name, value in entries(raw)}


def _check_numbers(headers: Sequence[Header]) -> None:
    """Erlang has no NaN and no infinity, so the broker's channel crashes. Raises Malformed."""
    for _, (kind, raw) in headers:
        if kind in b"fd" and not math.isfinite(struct.unpack(">f" if kind == b"f" else ">d", raw)[0]):
            raise Malformed
        if kind == b"F":
            _check_numbers(entries(raw[4:]))
        elif kind == b"A":
            _check_numbers([(b"", one) for one in items(raw[4:])])


def _ttl_ms(expiration: bytes | None) -> int | None:
    """Raises Refusal."""
    if expiration is None:
        return None
    number = re.match(rb"[+-]?[0-9]+", expiration)
    if number is None:
        reason = "no_integer"
    elif rest := expiration[number.end() :].decode("utf-8", "replace"):
        reason = f'{{leftover_string,"{rest}"}}'
    elif (ttl_ms := int(number[0])) < 0:
        reason = f"{{value_negative,{ttl_ms}}}"
    elif ttl_ms > LONGEST_TTL_MS:
        reason = f"{{value_too_large,{ttl_ms}}}"
    else:
        return ttl_ms
    shown = expiration.decode("utf-8", "replace")
    raise Refusal(Code.PRECONDITION_FAILED, f"invalid expiration '{shown}': {reason}")


def counted(properties: bytes, deliveries: int) -> bytes:
    """The properties with ``x-delivery-count``, as a quorum queue delivers a message again."""
    fields = split(properties)
    fields[HEADERS] = table(set_header(entries(fields[HEADERS]), b"x-delivery-count", number("l", deliveries)))
    return join(fields)


@dataclass(frozen=True, slots=True)
class Death:
    """Why and where a queue gives a message up, and where it goes."""

    reason: bytes
    queue: bytes
    exchange: bytes
    key: bytes | None
    at: float


def dead(message: Message, death: Death) -> Message:
    """The message as the broker publishes it to the dead-letter exchange."""
    fields = split(message.properties)
    headers = entries(fields[HEADERS])
    copies = header(headers, b"CC")
    keys = [text(message.key), *(items(copies.raw[4:]) if copies is not None and copies.kind == b"A" else ())]
    info = {
        b"count": number("l", 1),
        b"reason": text(death.reason),
        b"queue": text(death.queue),
        b"time": number("T", int(death.at)),
        b"exchange": text(message.exchange),
        b"routing-keys": array(*keys),
    }
    if fields[EXPIRATION] is not None:
        info[b"original-expiration"] = text(fields[EXPIRATION])
    headers = _with_death(headers, info)
    routing = message.keys
    if death.key is not None:
        routing = (death.key,)
        headers = [one for one in headers if one[0] != b"CC"]
    fields[HEADERS], fields[EXPIRATION] = table(headers), None
    return Message(death.exchange, routing, join(fields), message.body, None, message.persistent)


def _with_death(headers: list[Header], info: dict[bytes, Value]) -> list[Header]:
    found = header(headers, b"x-death")
    if found is None or found.kind != b"A":
        for name in (b"reason", b"queue", b"exchange"):
            headers = set_header(headers, b"x-first-death-" + name, info[name])
        return set_header(headers, b"x-death", array(_nested(info.items())))
    rest, now = [], _nested(sorted(info.items()))
    for one in items(found.raw[4:]):
        death = _death(one) if info[b"queue"].raw in one.raw else {}
        if death.get(b"queue") == info[b"queue"] and death.get(b"reason") == info[b"reason"]:
            count = int.from_bytes(death.get(b"count", number("l", 0)).raw, "big", signed=True)
            now = _nested(sorted((death | {b"count": number("l", count + 1)}).items()))
        else:
            rest.append(one)
    return set_header(headers, b"x-death", array(now, *rest))


def _nested(headers: Sequence[Header] | object) -> Value:
    content = table(headers)  # type: ignore[arg-type]
    return Value(b"F", struct.pack(">I", len(content)) + content)


def _death(value: Value) -> dict[bytes, Value]:
    return dict(entries(value.raw[4:])) if value.kind == b"F" else {}


def goes_in_a_circle(message: Message, queue: bytes) -> bool:
    """Whether a message that nobody rejected would die in this queue a second time."""
    name = text(queue)
    if name.raw not in message.properties:
        return False
    found = header(entries(split(message.properties)[HEADERS]), b"x-death")
    for one in items(found.raw[4:]) if found is not None and found.kind == b"A" else ():
        death = _death(one)
        if death.get(b"reason") == text(b"rejected"):
            return False
        if death.get(b"queue") == name:
            return True
    return False
