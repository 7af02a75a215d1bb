"""Bytes of the methods that we send often, or that pamqp would not let us send. No input or output."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence

from delayer.amqp.framing import (
    BASIC_ACK,
    BASIC_CONSUME,
    BASIC_NACK,
    BASIC_PUBLISH,
    BODY,
    CLASS_BASIC,
    FRAME_END,
    FRAME_HEAD,
    HEADER,
    METHOD,
    OVERHEAD,
)
from delayer.core.message import Outgoing

_END = bytes((FRAME_END,))
_SETTLE = struct.Struct(">BHIIQBB")  # a whole ack or nack frame
_PUBLISH_HEAD = struct.Struct(">BHIIHB")  # frame head, method, reserved, length of the exchange's name
_HEADER_HEAD = struct.Struct(">BBBHIHHQ")  # mandatory bit and end of the method frame; frame head, class, weight, size
_BODY_HEAD = struct.Struct(">BBHI")  # end of the header frame; frame head
_PUBLISH_ARGUMENTS = 4 + 2 + 1 + 1 + 1
_CONTENT_BYTES = 12
_MULTIPLE, _REQUEUE = 1, 2
HEARTBEAT_FRAME = b"\x08\x00\x00\x00\x00\x00\x00\xce"


def ack(channel: int, tag: int, *, multiple: bool) -> bytes:
    """A basic.ack frame."""
    return _SETTLE.pack(METHOD, channel, 13, BASIC_ACK, tag, _MULTIPLE * multiple, FRAME_END)


def nack(channel: int, tag: int, *, multiple: bool, requeue: bool) -> bytes:
    """A basic.nack frame."""
    bits = _MULTIPLE * multiple | _REQUEUE * requeue
    return _SETTLE.pack(METHOD, channel, 13, BASIC_NACK, tag, bits, FRAME_END)


def consume(channel: int, queue: bytes, consumer_tag: bytes) -> bytes:
    """A basic.consume frame, with acknowledgements. By hand: pamqp refuses queue names that RabbitMQ allows.

    Raises ValueError for a name of more than 255 bytes.
    """
    if len(queue) > 255:
        raise ValueError(f"a queue name holds 255 bytes, found {len(queue)}")
    names = bytes((len(queue),)) + queue + bytes((len(consumer_tag),)) + consumer_tag
    payload = struct.pack(">IH", BASIC_CONSUME, 0) + names + struct.pack(">BI", 0, 0)
    return FRAME_HEAD.pack(METHOD, channel, len(payload)) + payload + _END


def header_limit(frame_max: int) -> int:
    """The longest properties that fit a content-header frame."""
    return frame_max - OVERHEAD - _CONTENT_BYTES


def publish(
    channel: int, frame_max: int, batch: Sequence[Outgoing], start: int, enough: int
) -> tuple[list[bytes | memoryview], int]:
    """Frames of mandatory publishes from ``batch[start]`` on, until they have ``enough`` bytes or the batch ends.

    Returns the pieces, to be written without anything else of this channel in between, and the index to go on with.
    The lengths of names and headers must have been checked.
    """
    parts: list[bytes | memoryview] = []
    size = 0
    body_max = frame_max - OVERHEAD
    add = parts.append
    index = start
    while index < len(batch) and size < enough:
        exchange, routing_key, properties, body, _, _ = batch[index]
        index += 1
        names = len(exchange) + len(routing_key)
        add(_PUBLISH_HEAD.pack(METHOD, channel, _PUBLISH_ARGUMENTS + names, BASIC_PUBLISH, 0, len(exchange)))
        add(b"%b%c%b" % (exchange, len(routing_key), routing_key))
        length = len(body)
        add(_HEADER_HEAD.pack(1, FRAME_END, HEADER, channel, _CONTENT_BYTES + len(properties), CLASS_BASIC, 0, length))
        add(properties)
        if length <= body_max:
            if length:
                add(_BODY_HEAD.pack(FRAME_END, BODY, channel, length))
                add(body)
        else:
            whole = memoryview(body)
            for at in range(0, length, body_max):
                piece = whole[at : at + body_max]
                add(_BODY_HEAD.pack(FRAME_END, BODY, channel, len(piece)))
                add(piece)
        add(_END)
        size += names + len(properties) + length + 60
    return parts, index


# Publishes are handed over in runs of about this many bytes, and the room in the buffer is looked at between them:
# few enough writes to be cheap, small enough that a blocked broker costs little memory.
WRITE_BYTES = 1 << 18


class Outlet:
    """``written_at`` is the loop time of the last write."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.written_at = loop.time()
        self._loop = loop
        self._transport: asyncio.WriteTransport | None = None
        self._full = False
        self._waiting: set[asyncio.Future[None]] = set()

    def attach(self, transport: asyncio.WriteTransport) -> None:
        """The transport is there: from now on writes go somewhere."""
        self._transport = transport
        # Bytes that the transport may hold before writers are asked to wait.
        transport.set_write_buffer_limits(high=(1 << 20))

    def write(self, data: bytes) -> None:
        """Hand over bytes; nothing happens when the transport is closing."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
            self.written_at = self._loop.time()

    def write_parts(self, parts: Sequence[bytes | memoryview]) -> None:
        """The same for the pieces of many frames, joined to writes of a size that does not double their memory."""
        size = start = 0
        for index, part in enumerate(parts):
            size += len(part)
            if size >= WRITE_BYTES:
                self.write(b"".join(parts[start : index + 1]))
                size, start = 0, index + 1
        if size:
            self.write(b"".join(parts[start:]))

    async def drain(self) -> None:
        """Wait while the transport holds too much."""
        while self._full:
            future: asyncio.Future[None] = self._loop.create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)

    def pause(self) -> None:
        """The transport holds more than the high-water mark."""
        self._full = True

    def resume(self) -> None:
        """There is room again, or it does not matter any more."""
        self._full = False
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
