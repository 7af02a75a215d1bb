"""A recorded conversation, made by pamqp, and a receiver that records the parser's events."""

from __future__ import annotations

import struct
from collections.abc import Callable

from pamqp import body, commands, frame, header, heartbeat
from pamqp.base import Frame

from delayer.amqp import framing
from delayer.amqp.framing import Parser, ReturnedMessage
from delayer.amqp.values import Delivery
from tests.unit.amqp.tables import table_of_every_type

TOKEN_HEADER = b"x-token"
FRAME_MAX = 1024
EVERYTHING = struct.pack(">HI", 0x3000, len(table_of_every_type())) + table_of_every_type() + b"\x02"
TAG = "ctag"


def method(value: Frame, channel: int = 1) -> bytes:
    return frame.marshal(value, channel)


def content(raw_properties: bytes, payload: bytes, channel: int = 1, piece: int = FRAME_MAX - 8) -> bytes:
    """Header frame (with exactly these property bytes, which pamqp's class cannot keep) and body frames."""
    head = struct.pack(">HHQ", 60, 0, len(payload)) + raw_properties
    frames = [struct.pack(">BHI", 2, channel, len(head)) + head + b"\xce"]
    frames += [
        frame.marshal(body.ContentBody(payload[at : at + piece]), channel) for at in range(0, len(payload), piece)
    ]
    return b"".join(frames)


def deliver(tag: int, payload: bytes, *, raw_properties: bytes = b"\0\0", channel: int = 1, key: str = "k") -> bytes:
    start = commands.Basic.Deliver(TAG, tag, tag % 2 == 0, "exchange", key)
    return method(start, channel) + content(raw_properties, payload, channel)


def returned(token: bytes, payload: bytes, channel: int = 1) -> bytes:
    table = b"%c%bS" % (len(TOKEN_HEADER), TOKEN_HEADER) + struct.pack(">I", len(token)) + token
    properties = struct.pack(">HI", 0x2000, len(table)) + table
    return method(commands.Basic.Return(312, "NO_ROUTE", "exchange", "key"), channel) + content(
        properties, payload, channel
    )


def conversation() -> bytes:
    """Frames of every kind; the contents of two channels are interleaved."""
    first, second = deliver(1, b"a" * 30, channel=1), deliver(2, b"b" * 20, channel=2)
    cut = len(method(commands.Basic.Deliver(TAG, 1, False, "exchange", "k")))
    pamqp_header = header.ContentHeader(body_size=4, properties=commands.Basic.Properties(app_id="pamqp", priority=3))
    return b"".join(
        (
            method(commands.Connection.Blocked("low on memory"), 0),
            heartbeat.Heartbeat.marshal(),
            deliver(1, b""),
            deliver(2, b"x"),
            deliver(3, b"y" * (FRAME_MAX - 8), raw_properties=EVERYTHING),
            deliver(4, b"z" * (FRAME_MAX - 7), raw_properties=b"\x10\x00\x02", key=""),
            deliver(5, bytes(range(256)) * 10, channel=2),
            # Two channels taking turns, frame by frame.
            first[:cut],
            second[:cut],
            first[cut : cut + 22],
            second[cut : cut + 22],
            heartbeat.Heartbeat.marshal(),
            second[cut + 22 :],
            first[cut + 22 :],
            method(commands.Basic.Deliver(TAG, 9, True, "", "q")),
            frame.marshal(pamqp_header, 1),
            frame.marshal(body.ContentBody(b"ab"), 1),
            b"\x03\0\1\0\0\0\0\xce",  # an empty piece: unusual, but allowed
            frame.marshal(body.ContentBody(b"cd"), 1),
            method(commands.Basic.Ack(7, True)),
            method(commands.Basic.Ack((1 << 63) - 1, False), 2),
            method(commands.Basic.Nack(9, True, False)),
            returned(b"token", b"came back"),
            returned(b"empty", b""),
            method(commands.Basic.Cancel(TAG, True)),
            method(commands.Channel.Close(404, "NOT_FOUND - no queue", 60, 20), 2),
            method(commands.Connection.Unblocked(), 0),
        )
    )


class Recorder:
    """A receiver for one channel. Every consumer tag is known."""

    def __init__(self, channel: int, events: list[object]) -> None:
        self.channel = channel
        self.events = events
        self.consumers: dict[bytes, Callable[[Delivery], None]] = {TAG.encode(): self._delivered}

    def _delivered(self, delivery: Delivery) -> None:
        self.events.append((self.channel, delivery))

    def on_method(self, whole: bytes) -> None:
        found = framing.unmarshal(whole)
        self.events.append((self.channel, found.name, dict(found)))

    def on_confirm(self, tag: int, *, multiple: bool, positive: bool) -> None:
        self.events.append((self.channel, tag, multiple, positive))

    def on_returned(self, message: ReturnedMessage) -> None:
        self.events.append((self.channel, message))


def reading(frame_max: int = FRAME_MAX) -> tuple[Parser, list[object]]:
    """A parser for channels 0, 1 and 2, and the list of its events."""
    events: list[object] = []
    return Parser({number: Recorder(number, events) for number in range(3)}, frame_max), events
