"""Frames as a broker reads and writes them.

Independent of delayer's own codec in both directions that carry messages and settlements. The other methods are read
and written by pamqp, as the client also does, so a fault of pamqp itself would not show."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from typing import Any, Final, NamedTuple

from pamqp import commands
from pamqp.base import Frame
from pamqp.frame import marshal

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
GREETING: Final = b"AMQP\0\0\x09\x01"
HEARTBEAT_FRAME: Final = b"\x08\0\0\0\0\0\0\xce"
FRAME_MAX: Final = 131_072

_HEAD = struct.Struct(">BHI")
_ORIGIN = struct.Struct(">HH")
_CONTENT = struct.Struct(">HHQ")
_END = b"\xce"

PUBLISH, ACK, REJECT, NACK = (60, 40), (60, 80), (60, 90), (60, 120)


class Code(IntEnum):
    """Reply codes; those from 500 on, and 320, close the connection, the rest the channel."""

    CONNECTION_FORCED = 320
    NO_ROUTE = 312
    ACCESS_REFUSED = 403
    NOT_FOUND = 404
    RESOURCE_LOCKED = 405
    PRECONDITION_FAILED = 406
    FRAME_ERROR = 501
    COMMAND_INVALID = 503
    CHANNEL_ERROR = 504
    UNEXPECTED_FRAME = 505
    NOT_ALLOWED = 530
    NOT_IMPLEMENTED = 540
    INTERNAL_ERROR = 541


class Refusal(Exception):
    """The broker refuses a method, and closes its channel or connection."""

    def __init__(self, code: Code, text: str = "") -> None:
        super().__init__(code, text)
        self.code = code
        self.text = f"{code.name} - {text}" if text else code.name

    @property
    def ends_connection(self) -> bool:
        return self.code >= 500


class Publish(NamedTuple):
    """The arguments of basic.publish, as bytes."""

    exchange: bytes
    key: bytes
    mandatory: bool


class Settlement(NamedTuple):
    """basic.ack, basic.nack and basic.reject."""

    positive: bool
    tag: int
    multiple: bool
    requeue: bool


class Frames:
    """Splits the bytes of a client into frames. Keeps what :meth:`read` did not reach."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> None:
        self._held = self._held + data if self._held else data

    def take(self, count: int) -> bytes:
        """The first bytes, if that many arrived; otherwise none."""
        if len(self._held) < count:
            return b""
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def read(self) -> Iterator[tuple[int, int, bytes]]:
        """Each whole frame as its kind, channel and payload. Close the iterator to keep the rest for later."""
        data, at = self._held, 0
        try:
            while len(data) - at >= 8:
                kind, channel, size = _HEAD.unpack_from(data, at)
                end = at + 7 + size
                if size > FRAME_MAX - 8:
                    raise Refusal(Code.FRAME_ERROR, f"type {kind}, frame of {size} bytes, maximum {FRAME_MAX}")
                if end >= len(data):
                    return
                if data[end] != 0xCE:
                    raise Refusal(Code.FRAME_ERROR, f"type {kind}, frame end marker {data[end]:#x}")
                payload = data[at + 7 : end]
                at = end + 1
                yield kind, channel, payload
        finally:
            self._held = data[at:]


def read_method(payload: bytes) -> Publish | Settlement | Frame:
    origin = _ORIGIN.unpack_from(payload)
    if origin == PUBLISH:
        exchange, at = _short(payload, 6)
        key, at = _short(payload, at)
        return Publish(exchange, key, payload[at] & 1 == 1)
    if origin in (ACK, NACK, REJECT):
        tag, bits = struct.unpack_from(">QB", payload, 4)
        if origin == REJECT:
            return Settlement(False, tag, False, bits & 1 == 1)
        return Settlement(origin == ACK, tag, bits & 1 == 1, bits & 2 == 2)
    kind = commands.INDEX_MAPPING.get(int.from_bytes(payload[:4], "big"))
    if kind is None:
        raise Refusal(Code.COMMAND_INVALID, f"unknown method {origin}")
    method = kind()
    try:
        method.unmarshal(payload[4:])
    except (ValueError, struct.error, LookupError) as broken:
        raise Refusal(Code.FRAME_ERROR, str(broken)) from broken
    return method


def _short(payload: bytes, at: int) -> tuple[bytes, int]:
    end = at + 1 + payload[at]
    return payload[at + 1 : end], end


def declared_table(payload: bytes, names: int) -> bytes:
    """The arguments of queue.declare (one name) and exchange.declare (two), which follow the names and the bits."""
    at = 6
    for _ in range(names):
        _, at = _short(payload, at)
    at += 1
    return payload[at + 4 : at + 4 + int.from_bytes(payload[at : at + 4], "big")]


class Content(NamedTuple):
    """A content header: the size of the body, and the properties."""

    size: int
    properties: bytes


def read_header(payload: bytes) -> Content:
    _, _, size = _CONTENT.unpack_from(payload)
    return Content(size, payload[12:])


@cache
def _unchecked(kind: type[Frame]) -> type[Frame]:
    """The method without pamqp's check of names: the broker accepts any."""
    return type(kind.__name__, (kind,), {"validate": lambda _: None})


def method(channel: int, kind: type[Frame], **fields: Any) -> bytes:
    return marshal(_unchecked(kind)(**fields), channel)


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return _HEAD.pack(kind, channel, len(payload)) + payload + _END


def close(channel: int, refusal: Refusal) -> bytes:
    """connection.close on channel 0, otherwise channel.close. The broker cuts the text, perhaps inside a character."""
    origin = b"\0\x14\0\x28" if channel else b"\0\x0a\0\x32"
    text = _sized(refusal.text.encode()[:255])
    return _frame(METHOD, channel, origin + struct.pack(">H", refusal.code) + text + bytes(4))


def _sized(name: bytes) -> bytes:
    return bytes((len(name),)) + name


def content(channel: int, properties: bytes, body: bytes) -> bytes:
    """The content header and the frames of the body."""
    parts = [_frame(HEADER, channel, _CONTENT.pack(60, 0, len(body)) + properties)]
    room = FRAME_MAX - 8
    parts += [_frame(BODY, channel, body[at : at + room]) for at in range(0, len(body), room)]
    return b"".join(parts)


def deliver(channel: int, consumer: bytes, tag: int, redelivered: bool, exchange: bytes, key: bytes) -> bytes:
    names = _sized(consumer) + struct.pack(">QB", tag, redelivered) + _sized(exchange) + _sized(key)
    return _frame(METHOD, channel, b"\0\x3c\0\x3c" + names)


def got(channel: int, tag: int, redelivered: bool, exchange: bytes, key: bytes, left: int) -> bytes:
    names = struct.pack(">QB", tag, redelivered) + _sized(exchange) + _sized(key) + struct.pack(">I", left)
    return _frame(METHOD, channel, b"\0\x3c\0\x47" + names)


def returned(channel: int, exchange: bytes, key: bytes) -> bytes:
    code = struct.pack(">H", Code.NO_ROUTE) + _sized(b"NO_ROUTE")
    return _frame(METHOD, channel, b"\0\x3c\0\x32" + code + _sized(exchange) + _sized(key))


def confirm(channel: int, number: int, *, multiple: bool, positive: bool) -> bytes:
    origin = b"\0\x3c\0\x50" if positive else b"\0\x3c\0\x78"
    return _frame(METHOD, channel, origin + struct.pack(">QB", number, multiple))
