"""A message inside the broker: what the broker reads from it, and the headers that the broker writes."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from tests.simulation.broker.declared import TYPE_NAMES
from tests.simulation.broker.wire import Code, Refusal
from tests.support.raw import VOID, Header, Props, Value, array, content, number, table, text

LARGEST: Final = 128 << 20
_EXPIRATION, _DELIVERY_MODE, _USER_ID = 1 << 8, 1 << 12, 1 << 4


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
        return dict(Props.decode(self.properties).headers or ())


def receive(exchange: bytes, key: bytes, properties: bytes, body: bytes, user: str) -> Message:
    """Check a published message as the broker does. Raises Refusal."""
    if len(body) > LARGEST:
        text_ = f"message size {len(body)} is larger than configured max size {LARGEST}"
        raise Refusal(Code.PRECONDITION_FAILED, text_)
    try:
        props = Props.decode(properties)
        _check_numbers(props.headers or ())
    except (AssertionError, KeyError, IndexError, struct.error, ArithmeticError) as broken:
        raise Refusal(Code.INTERNAL_ERROR) from broken
    if props.user_id is not None and props.user_id.decode() != user:
        found = props.user_id.decode()
        text_ = f"user_id property set to '{found}' but authenticated user was '{user}'"
        raise Refusal(Code.PRECONDITION_FAILED, text_)
    if props.delivery_mode not in (None, 1, 2):
        text_ = f"invalid message: {{delivery_mode_unknown,{props.delivery_mode}}}"
        raise Refusal(Code.PRECONDITION_FAILED, text_)
    keys = (key,)
    if props.headers is not None and any(name in (b"CC", b"BCC") for name, _ in props.headers):
        keys += _copies(props)
        kept = tuple(header for header in props.headers if header[0] != b"BCC")
        properties = replace(props, headers=kept).encode()
    return Message(exchange, keys, properties, body, _ttl_ms(props.expiration), props.delivery_mode == 2)


def _copies(props: Props) -> tuple[bytes, ...]:
    found: list[bytes] = []
    for name in (b"CC", b"BCC"):
        for value in props.all(name):
            if value.kind != b"A":
                kind = TYPE_NAMES.get(value.kind, "?")
                text_ = f'invalid message: {{unacceptable_type_in_header,"{name.decode()}",{kind}}}'
                raise Refusal(Code.PRECONDITION_FAILED, text_)
            found += [content(one) for one in _items(value) if one.kind == b"S"]
    return tuple(found)


def _items(value: Value) -> list[Value]:
    """The values of an array."""
    named = b"".join(b"\0" + one.kind + one.raw for one in _split(value.raw[4:]))
    return [one for _, one in _decode(named)]


def _split(raw: bytes) -> list[Value]:
    found, at = [], 0
    while at < len(raw):
        kind = raw[at : at + 1]
        width = _WIDTHS[kind] if kind in _WIDTHS else 4 + int.from_bytes(raw[at + 1 : at + 5], "big")
        found.append(Value(kind, raw[at + 1 : at + 1 + width]))
        at += 1 + width
    return found


def _decode(raw: bytes) -> Sequence[Header]:
    """The entries of a table, without its length."""
    return Props.decode(b"\x20\0" + struct.pack(">I", len(raw)) + raw).headers or ()


_WIDTHS: Final = dict(zip((b"t", b"b", b"B", b"s", b"u", b"I", b"i", b"l", b"f", b"d", b"T", b"D", b"V"),
                          (1, 1, 1, 2, 2, 4, 4, 8, 4, 8, 8, 5, 0), strict=True))  # fmt: skip


def entries_of(value: Value) -> dict[bytes, Value]:
    """The entries of a nested table."""
    return dict(_decode(value.raw[4:]))


def arguments_of(raw: bytes) -> dict[str, Value]:
    """The arguments of a declaration, with their types."""
    return {name.decode(): value for name, value in _decode(raw)}


def _check_numbers(headers: Sequence[Header]) -> None:
    """Erlang has no NaN and no infinity, so the broker's channel crashes."""
    for _, (kind, raw) in headers:
        if kind in b"fd" and not math.isfinite(struct.unpack(">f" if kind == b"f" else ">d", raw)[0]):
            raise ArithmeticError("a number that Erlang does not have")
        if kind == b"F":
            _check_numbers(_decode(raw[4:]))
        elif kind == b"A":
            _check_numbers([(b"", one) for one in _split(raw[4:])])


def _ttl_ms(expiration: bytes | None) -> int | None:
    if expiration is None:
        return None
    if expiration.startswith(b"-") and expiration[1:].isdigit():
        text_ = f"invalid expiration '{expiration.decode()}': {{value_negative,{expiration.decode()}}}"
        raise Refusal(Code.PRECONDITION_FAILED, text_)
    if not expiration.isdigit():
        raise Refusal(Code.PRECONDITION_FAILED, f"invalid expiration '{expiration.decode()}': no_integer")
    return int(expiration)


def set_header(headers: Sequence[Header], name: bytes, value: Value) -> tuple[Header, ...]:
    """Set a header as the broker does: the first of its name is replaced, and the table comes out sorted by name."""
    found = list(headers)
    at = next((at for at, header in enumerate(found) if header[0] == name), len(found))
    found[at : at + 1] = [(name, value)]
    return tuple(sorted(found, key=lambda header: header[0]))


def counted(properties: bytes, deliveries: int) -> bytes:
    """The properties with ``x-delivery-count``, as a quorum queue delivers a message again."""
    props = Props.decode(properties)
    headers = set_header(props.headers or (), b"x-delivery-count", number("l", deliveries))
    return replace(props, headers=headers).encode()


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
    props = Props.decode(message.properties)
    headers = tuple(props.headers or ())
    copies = [content(one) for value in props.all(b"CC") if value.kind == b"A" for one in _items(value)]
    info = {
        b"reason": text(death.reason),
        b"queue": text(death.queue),
        b"time": number("T", int(death.at)),
        b"exchange": text(message.exchange),
        b"routing-keys": array(*(text(key) for key in (message.key, *copies))),
    }
    if props.expiration is not None:
        info[b"original-expiration"] = text(props.expiration)
    headers = _with_death(headers, info)
    keys = message.keys
    if death.key is not None:
        keys = (death.key,)
        headers = tuple(header for header in headers if header[0] != b"CC")
    properties = replace(props, headers=headers, expiration=None).encode()
    return Message(death.exchange, keys, properties, message.body, None, message.persistent)


def _with_death(headers: tuple[Header, ...], info: dict[bytes, Value]) -> tuple[Header, ...]:
    reason, queue = info[b"reason"], info[b"queue"]
    found = dict(headers).get(b"x-death", VOID)
    if found.kind != b"A":
        for name in (b"reason", b"queue", b"exchange"):
            headers = set_header(headers, b"x-first-death-" + name, info[name])
        first = table((b"count", number("l", 1)), *info.items())
        return set_header(headers, b"x-death", array(first))
    deaths = [entries_of(one) for one in _items(found) if one.kind == b"F"]
    same = [one for one in deaths if one.get(b"reason") == reason and one.get(b"queue") == queue]
    rest = [one for one in deaths if one not in same]
    now = {b"count": number("l", 1)} | info
    if same:
        count = int.from_bytes(same[0].get(b"count", number("l", 0)).raw, "big", signed=True)
        now = same[0] | {b"count": number("l", count + 1)}
    tables = [table(*sorted(now.items())), *(table(*one.items()) for one in rest)]
    return set_header(headers, b"x-death", array(*tables))


def goes_in_a_circle(message: Message, queue: bytes) -> bool:
    """Whether a message that nobody rejected would die in this queue a second time."""
    found = message.headers.get(b"x-death", VOID)
    if found.kind != b"A":
        return False
    for one in _items(found):
        death = entries_of(one)
        if content(death[b"reason"]) == b"rejected":
            return False
        if content(death[b"queue"]) == queue:
            return True
    return False
