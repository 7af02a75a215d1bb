"""AMQP frames: bytes to events and events to bytes, without I/O, and the matching of replies to requests.

The parser accepts the socket's bytes in any pieces and calls the receiver of each frame's channel. It reads deliveries,
returns and confirms by hand. Other methods reach their receiver as whole frames, which pamqp reads and writes.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from pamqp import commands, frame
from pamqp.base import Frame
from pamqp.exceptions import UnmarshalingException

from delayer.amqp.errors import ChannelClosed, ConnectionLost, ProtocolError, ReplyCode, fresh_copy
from delayer.amqp.values import Delivery, Outgoing

_Method = TypeVar("_Method", bound=Frame)

PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
FRAME_END = 0xCE
OVERHEAD = 8
"""Bytes of a frame around its payload: type, channel and size before it, and the end byte after it."""
DEFAULT_FRAME_MAX = 131072
MIN_FRAME_MAX = 4096
MAX_HEADER = 16 << 20
"""Maximum bytes of a content header. RabbitMQ adds headers (``x-death``), so it sends longer ones than a frame may
have. 16 MiB is its default limit for a whole message."""
CLASS_BASIC = 60

# Methods: class and number in one integer, as in a method frame.
BASIC_PUBLISH = CLASS_BASIC << 16 | 40
BASIC_RETURN = CLASS_BASIC << 16 | 50
BASIC_DELIVER = CLASS_BASIC << 16 | 60
BASIC_ACK = CLASS_BASIC << 16 | 80
BASIC_NACK = CLASS_BASIC << 16 | 120

FRAME_HEAD = struct.Struct(">BHI")
_U32 = struct.Struct(">I")
_TAG_AND_BIT = struct.Struct(">QB")
_CONTENT = struct.Struct(">HHQ")  # The fields: class, weight, body size.
_CONTENT_BYTES = _CONTENT.size
_LEAST_CONTENT = OVERHEAD + _CONTENT_BYTES + 2 + OVERHEAD


class ReturnedMessage(NamedTuple):
    """A publish that the broker returned: the reason and the content."""

    code: int
    text: str
    properties: bytes
    body: bytes


class Receiver(Protocol):
    """The channel as the parser sees it."""

    @property
    def consumers(self) -> Mapping[bytes, Callable[[Delivery], None]]: ...

    def on_method(self, frame: bytes) -> None:
        """Handle a method without content, except confirms. ``frame`` is the whole frame with its end byte."""

    def on_confirm(self, tag: int, *, multiple: bool, positive: bool) -> None: ...

    def on_returned(self, returned: ReturnedMessage) -> None: ...


@dataclass(slots=True)
class _Content:
    """A delivery or return with incomplete content. Pieces of large bodies are joined once."""

    complete: Callable[[bytes, bytes], None]
    """Called with properties and body."""
    properties: bytes | None = None
    missing: int = 0
    pieces: list[bytes] = field(default_factory=list)


class Parser:
    """A parser of frames, fed with pieces of a byte stream. It looks up ``receivers`` for every frame, so a callback
    may add and remove channels. Raises ProtocolError for a frame of more than ``frame_max`` bytes (a content header:
    MAX_HEADER), for a channel without a receiver, and for bytes that are not AMQP. Do not feed it after that."""

    def __init__(self, receivers: Mapping[int, Receiver], frame_max: int = DEFAULT_FRAME_MAX) -> None:
        self.receivers = receivers
        self.frame_max = frame_max
        self.stopped = False
        """Whether to ignore all further frames, including those in the current piece."""
        self.read_at = 0.0
        """When the bytes of the next call were read, for their deliveries."""
        self._contents: dict[int, _Content] = {}
        # The pieces of an incomplete frame, joined once it is complete.
        self._pieces: list[bytes] = []
        self._held = 0
        self._wanted = 0

    def feed(self, data: bytes) -> None:
        """Parse ``data`` and call the receivers. Raises ProtocolError, and the exceptions of callbacks."""
        if self._pieces:
            self._pieces.append(data)
            self._held += len(data)
            if self._held < self._wanted:
                return
            data = b"".join(self._pieces)
            self._pieces = []
        end = len(data)
        at = 0
        receivers = self.receivers
        head = FRAME_HEAD.unpack_from
        while end - at >= OVERHEAD and not self.stopped:
            kind, channel, size = head(data, at)
            if size > self.frame_max - OVERHEAD and (kind != HEADER or size > MAX_HEADER):
                raise self._not_amqp(data, at, size)
            stop = at + 7 + size
            if stop >= end:
                break
            if data[stop] != FRAME_END:
                raise ProtocolError(ReplyCode.FRAME_ERROR, f"frame end is {data[stop]:#04x} on channel {channel}")
            receiver = receivers.get(channel)
            if receiver is None:
                raise ProtocolError(
                    ReplyCode.UNEXPECTED_FRAME, f"frame of type {kind} for the closed channel {channel}"
                )
            if kind == METHOD:
                at = self._method(data, at, stop, channel, receiver)
                continue
            if kind == BODY:
                self._body(data[at + 7 : stop], channel)
            elif kind == HEADER:
                self._header(data, at + 7, stop, channel)
            elif kind != HEARTBEAT or channel or size:
                raise ProtocolError(ReplyCode.FRAME_ERROR, f"frame type {kind} with {size} bytes on channel {channel}")
            at = stop + 1
        if at < end and not self.stopped:
            self._hold_back(data, at, end)

    def _hold_back(self, data: bytes, at: int, end: int) -> None:
        self._pieces = [data[at:] if at else data]
        self._held = end - at
        self._wanted = FRAME_HEAD.unpack_from(data, at)[2] + OVERHEAD if self._held >= OVERHEAD else OVERHEAD

    def _not_amqp(self, data: bytes, at: int, size: int) -> ProtocolError:
        if data[at : at + 4] == PROTOCOL_HEADER[:4]:
            version = ".".join(map(str, data[at + 5 : at + 8]))
            return ProtocolError(ReplyCode.FRAME_ERROR, f"the server speaks AMQP {version}, expected 0.9.1")
        return ProtocolError(ReplyCode.FRAME_ERROR, f"frame of {size + OVERHEAD} bytes, the limit is {self.frame_max}")

    def _method(self, data: bytes, at: int, stop: int, channel: int, receiver: Receiver) -> int:
        """Read the method frame at ``at``, and the content that follows a delivery. Returns the next offset."""
        if channel in self._contents:
            raise ProtocolError(ReplyCode.UNEXPECTED_FRAME, f"a method on channel {channel} where content was expected")
        if stop - at < 11:
            raise ProtocolError(ReplyCode.FRAME_ERROR, f"method frame of {stop - at - 7} bytes on channel {channel}")
        method = _U32.unpack_from(data, at + 7)[0]
        if method == BASIC_DELIVER:
            return self._deliver(data, at, stop, channel, receiver)
        if method in (BASIC_ACK, BASIC_NACK):
            if stop - at != 20:
                raise ProtocolError(ReplyCode.FRAME_ERROR, f"confirm of {stop - at - 7} bytes on channel {channel}")
            tag, bits = _TAG_AND_BIT.unpack_from(data, at + 11)
            receiver.on_confirm(tag, multiple=bits & 1 == 1, positive=method == BASIC_ACK)
        elif method == BASIC_RETURN:
            self._contents[channel] = _Content(_returned(receiver, data[at + 11 : stop]))
        else:
            receiver.on_method(data[at : stop + 1])
        return stop + 1

    def _deliver(self, data: bytes, at: int, stop: int, channel: int, receiver: Receiver) -> int:
        try:
            name_end = at + 12 + data[at + 11]
            callback = receiver.consumers.get(data[at + 12 : name_end])
            tag, redelivered = _TAG_AND_BIT.unpack_from(data, name_end)
            exchange_at = name_end + 10
            key_at = exchange_at + data[name_end + 9] + 1
            key_end = key_at + data[key_at - 1]
        except (IndexError, struct.error) as cut:
            raise ProtocolError(ReplyCode.FRAME_ERROR, f"delivery cut short on channel {channel}") from cut
        if key_end != stop:
            raise ProtocolError(ReplyCode.FRAME_ERROR, f"delivery of the wrong length on channel {channel}")
        if callback is None:
            name = data[at + 12 : name_end].decode("utf-8", "replace")
            raise ProtocolError(ReplyCode.UNEXPECTED_FRAME, f"delivery for the unknown consumer {name!r}")
        exchange, routing_key = data[exchange_at : key_at - 1], data[key_at:key_end]

        whole = self._whole_content(data, stop + 1, channel)
        if whole is not None:
            header_end, body_end = whole
            properties = data[stop + 8 + _CONTENT_BYTES : header_end]
            body = data[header_end + OVERHEAD : body_end]
            callback(Delivery(tag, redelivered & 1 == 1, exchange, routing_key, properties, body, self.read_at))
            return body_end + 1

        # The content is in several pieces, empty or malformed, so read it frame by frame.
        def complete(properties: bytes, body: bytes) -> None:
            callback(Delivery(tag, redelivered & 1 == 1, exchange, routing_key, properties, body, self.read_at))

        self._contents[channel] = _Content(complete)
        return stop + 1

    def _whole_content(self, data: bytes, at: int, channel: int) -> tuple[int, int] | None:
        """Find the ends of the header frame at ``at`` and its only body frame; None unless both arrived and are valid.
        In this usual case a delivery needs no state. The caller reads other content frame by frame."""
        end = len(data)
        if end - at < _LEAST_CONTENT:
            return None
        kind, header_channel, size = FRAME_HEAD.unpack_from(data, at)
        header_end: int = at + 7 + size
        if kind != HEADER or header_channel != channel or size < _CONTENT_BYTES + 2 or header_end + OVERHEAD >= end:
            return None
        basic, _, body_size = _CONTENT.unpack_from(data, at + 7)
        kind, body_channel, size = FRAME_HEAD.unpack_from(data, header_end + 1)
        body_end: int = header_end + OVERHEAD + size
        if (
            kind == BODY
            and body_channel == channel
            and basic == CLASS_BASIC
            and 0 < size == body_size
            and body_end < end
            and data[header_end] == FRAME_END == data[body_end]
            and size <= self.frame_max - OVERHEAD
            and header_end - at < self.frame_max
        ):
            return header_end, body_end
        return None

    def _header(self, data: bytes, at: int, stop: int, channel: int) -> None:
        content = self._contents.get(channel)
        if content is None or content.properties is not None:
            raise ProtocolError(ReplyCode.UNEXPECTED_FRAME, f"unexpected content header on channel {channel}")
        if stop - at < _CONTENT_BYTES + 2:
            raise ProtocolError(ReplyCode.FRAME_ERROR, f"content header of {stop - at} bytes on channel {channel}")
        basic, _, content.missing = _CONTENT.unpack_from(data, at)
        if basic != CLASS_BASIC:
            raise ProtocolError(
                ReplyCode.FRAME_ERROR, f"content of class {basic} on channel {channel}, expected {CLASS_BASIC}"
            )
        content.properties = data[at + _CONTENT_BYTES : stop]
        if not content.missing:
            del self._contents[channel]
            content.complete(content.properties, b"")

    def _body(self, piece: bytes, channel: int) -> None:
        content = self._contents.get(channel)
        if content is None or content.properties is None:
            raise ProtocolError(ReplyCode.UNEXPECTED_FRAME, f"body on channel {channel} where none was expected")
        content.missing -= len(piece)
        if content.missing < 0:
            raise ProtocolError(ReplyCode.FRAME_ERROR, f"{-content.missing} bytes too many on channel {channel}")
        content.pieces.append(piece)
        if not content.missing:
            del self._contents[channel]
            content.complete(content.properties, b"".join(content.pieces) if len(content.pieces) > 1 else piece)


def _returned(receiver: Receiver, arguments: bytes) -> Callable[[bytes, bytes], None]:
    """Build the callback for a basic.return's content, from its arguments: code, text, exchange and routing key."""
    try:
        code = int.from_bytes(arguments[:2], "big")
        text_end = 3 + arguments[2]
        key_at = text_end + 1 + arguments[text_end]
        if key_at + 1 + arguments[key_at] != len(arguments):
            raise ProtocolError(ReplyCode.FRAME_ERROR, "basic.return of the wrong length")
    except IndexError as cut:
        raise ProtocolError(ReplyCode.FRAME_ERROR, "basic.return cut short") from cut
    text = arguments[3:text_end].decode("utf-8", "replace")

    def complete(properties: bytes, body: bytes) -> None:
        receiver.on_returned(ReturnedMessage(code, text, properties, body))

    return complete


_END = bytes((FRAME_END,))
_SETTLE = struct.Struct(">BHIIQBB")  # A whole ack or nack frame.
_PUBLISH_HEAD = struct.Struct(">BHIIHB")  # The frame head, method, reserved, length of the exchange's name.
_HEADER_HEAD = struct.Struct(">BBBHIHHQ")  # The mandatory bit and frame end; frame head, class, weight, size.
_BODY_HEAD = struct.Struct(">BBHI")  # The end of the header frame; frame head.
_PUBLISH_ARGUMENTS = 4 + 2 + 1 + 1 + 1
_MULTIPLE, _REQUEUE = 1, 2
HEARTBEAT_FRAME = b"\x08\x00\x00\x00\x00\x00\x00\xce"


def ack(channel: int, tag: int, *, multiple: bool) -> bytes:
    return _SETTLE.pack(METHOD, channel, 13, BASIC_ACK, tag, _MULTIPLE * multiple, FRAME_END)


def nack(channel: int, tag: int, *, multiple: bool, requeue: bool) -> bytes:
    bits = _MULTIPLE * multiple | _REQUEUE * requeue
    return _SETTLE.pack(METHOD, channel, 13, BASIC_NACK, tag, bits, FRAME_END)


def unchecked(method: type[_Method]) -> type[_Method]:
    """The method without pamqp's check of names, which accepts only those that AMQP 0-9-1 allows. RabbitMQ accepts any
    255 bytes of UTF-8, and users need them, so leave the check to the broker."""
    return type(method.__name__, (method,), {"validate": lambda _: None})


Consume = unchecked(commands.Basic.Consume)


def header_limit(frame_max: int) -> int:
    """Maximum bytes of properties in a content-header frame."""
    return frame_max - OVERHEAD - _CONTENT_BYTES


def publish(
    channel: int, frame_max: int, batch: Sequence[Outgoing], which: range, enough: int
) -> tuple[list[bytes | memoryview], int]:
    """Build the frames of mandatory publishes for the indexes ``which`` of the batch, until they have ``enough`` bytes.
    Returns the pieces and the next index. Write the pieces without other frames of this channel in between. The caller
    must have checked the lengths of names and headers."""
    parts: list[bytes | memoryview] = []
    size = 0
    body_max = frame_max - OVERHEAD
    add = parts.append
    index = which.start
    while index < which.stop and size < enough:
        exchange, routing_key, properties, body, _ = batch[index]
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


# About this many bytes go to the transport in one write; between writes, the writer checks the buffer's limit. That
# makes writes few enough to be cheap, and small enough that a blocked broker costs little memory.
WRITE_BYTES = 1 << 18


def fail(future: asyncio.Future[Any], loss: ChannelClosed | ConnectionLost) -> None:
    """Fail a waiting call."""
    if not future.done():
        future.set_exception(fresh_copy(loss))


class Replies:
    """The replies that calls wait for. The broker answers in order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[type[Frame], asyncio.Future[Frame]]] = deque()

    async def next(self, kind: type[_Method]) -> _Method:
        """Wait for the reply to the request just written. Raises the loss of :meth:`fail`."""
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiting.append((kind, future))
        answer = await future
        assert isinstance(answer, kind)  # Certain, because resolve() compared the types.
        return answer

    def resolve(self, method: Frame) -> bool:
        """Accept a method if it is the next reply. Returns whether it was."""
        if not self._waiting or not isinstance(method, self._waiting[0][0]):
            return False
        _, future = self._waiting.popleft()
        if not future.done():
            future.set_result(method)
        return True

    def fail(self, loss: ChannelClosed | ConnectionLost) -> None:
        """Fail all waiting calls, because no reply will come."""
        for _, future in self._waiting:
            fail(future, loss)
        self._waiting.clear()


_CLOSES = {close.index: close for close in (commands.Connection.Close, commands.Channel.Close)}
_UNREADABLE = (UnmarshalingException, ValueError, TypeError, LookupError, ArithmeticError, RecursionError, struct.error)

_ORIGIN = struct.Struct(">HH")


def clipped(text: str) -> str:
    """Cut the text to the length of a short string: 255 bytes of UTF-8."""
    return text.encode()[:255].decode("utf-8", "ignore")


def unmarshal(whole: bytes) -> Frame:
    """Read the method in a method frame. Raises ProtocolError for an unreadable frame."""
    index = int.from_bytes(whole[7:11], "big")
    if index == commands.Basic.RecoverAsync.index:  # Rejected here, because pamqp would warn of a deprecation.
        raise ProtocolError(ReplyCode.UNEXPECTED_FRAME, "Basic.RecoverAsync, which only clients send")
    close = _CLOSES.get(index)
    if close is not None and len(whole) > 13:
        # Brokers cut the text at 255 bytes, perhaps inside a character, which pamqp could not read.
        text_end = 14 + whole[13]
        if len(whole) != text_end + 5:
            raise ProtocolError(ReplyCode.SYNTAX_ERROR, f"close of {len(whole) - 12} bytes")
        text = whole[14:text_end].decode("utf-8", "replace")
        class_id, method_id = _ORIGIN.unpack_from(whole, text_end)
        return close(int.from_bytes(whole[11:13], "big"), text, class_id, method_id)
    try:
        _, _, method = frame.unmarshal(whole)
    except _UNREADABLE as broken:
        raise ProtocolError(ReplyCode.SYNTAX_ERROR, f"unreadable method {whole[7:11].hex()}: {broken}") from broken
    if not isinstance(method, Frame):
        raise ProtocolError(ReplyCode.SYNTAX_ERROR, f"expected a method, found {type(method).__name__}")
    return method
