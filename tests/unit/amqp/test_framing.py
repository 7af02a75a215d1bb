"""Frames, read and written. Every cut of the bytes gives the same events. Bytes that are not AMQP raise only
ProtocolError. pamqp reads our frames."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pamqp import body, commands, frame, header

from delayer.amqp import framing
from delayer.amqp.errors import ProtocolError, ReplyCode
from delayer.amqp.framing import OVERHEAD, ReturnedMessage
from delayer.amqp.values import Delivery, Outgoing
from tests.unit.amqp.recorded import EVERYTHING, FRAME_MAX, TAG, content, conversation, deliver, method, reading

WHOLE = conversation()


def events_of(*pieces: bytes) -> list[object]:
    parser, events = reading()
    for piece in pieces:
        parser.feed(piece)
    return events


EXPECTED = events_of(WHOLE)


def test_the_parser_reads_the_whole_conversation() -> None:
    deliveries = [event[1] for event in EXPECTED if isinstance(event, tuple) and isinstance(event[1], Delivery)]
    assert [(one.tag, one.redelivered, len(one.body)) for one in deliveries] == [
        (1, False, 0), (2, True, 1), (3, False, FRAME_MAX - 8), (4, True, FRAME_MAX - 7), (5, False, 2560),
        (2, True, 20), (1, False, 30), (9, True, 4),
    ]  # fmt: skip
    assert deliveries[2] == Delivery(3, False, b"exchange", b"k", EVERYTHING, b"y" * (FRAME_MAX - 8))
    assert deliveries[3].routing_key == b""
    assert deliveries[4].body == bytes(range(256)) * 10
    rest = [event for event in EXPECTED if not (isinstance(event, tuple) and isinstance(event[1], Delivery))]
    assert next(event[:2] for event in rest if isinstance(event, tuple)) == (0, "Connection.Blocked")
    assert (1, 7, True, True) in rest
    assert (2, (1 << 63) - 1, False, True) in rest
    assert (1, 9, True, False) in rest
    back = [event[1] for event in rest if isinstance(event, tuple) and isinstance(event[1], ReturnedMessage)]
    assert [(one.code, one.text, one.body) for one in back] == [(312, "NO_ROUTE", b"came back"), (312, "NO_ROUTE", b"")]


def test_a_cut_at_every_byte_gives_the_same_events() -> None:
    for at in range(1, len(WHOLE)):
        assert events_of(WHOLE[:at], WHOLE[at:]) == EXPECTED, f"cut at {at}"
    assert events_of(*(WHOLE[at : at + 1] for at in range(len(WHOLE)))) == EXPECTED


@given(st.lists(st.integers(0, len(WHOLE)), max_size=40))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(WHOLE)]
    assert events_of(*(WHOLE[a:b] for a, b in itertools.pairwise(edges))) == EXPECTED


def test_names_of_255_bytes() -> None:
    names = b"e" * 255, b"\xff" * 255
    payload = struct.pack(">HHB", 60, 60, 4) + TAG.encode() + struct.pack(">QB", 1, 0)
    payload += b"\xff" + names[0] + b"\xff" + names[1]
    start = struct.pack(">BHI", 1, 1, len(payload)) + payload + b"\xce"
    assert events_of(start + content(b"\0\0", b"b")) == [(1, Delivery(1, False, *names, b"\0\0", b"b"))]


def test_a_text_cut_in_the_middle_of_a_character() -> None:
    text = "ü".encode()[:1]
    wire = frame_of(1, 1, struct.pack(">HHHB", 20, 40, 404, 255) + b"n" * 254 + text + struct.pack(">HH", 50, 10))
    arguments = {"reply_code": 404, "reply_text": "n" * 254 + "\ufffd", "class_id": 50, "method_id": 10}
    assert events_of(wire) == [(1, "Channel.Close", arguments)]
    long = "ü" * 200
    assert framing.unmarshal(frame.marshal(commands.Channel.Close(1, framing.clipped(long), 0, 0), 1))
    assert framing.clipped(long) == "ü" * 127


def frame_of(kind: int, channel: int, payload: bytes, end: bytes = b"\xce") -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + end


def test_a_content_header_may_be_longer_than_a_frame() -> None:
    """RabbitMQ adds x-death to a message and cannot split its header. The parser also reads the next delivery."""
    properties = bytes(3 * FRAME_MAX)
    long = frame_of(2, 1, struct.pack(">HHQ", 60, 0, 3) + properties)
    wire = DELIVER + long + BODY + DELIVER + HEADER + BODY
    for cut in (0, 1, len(DELIVER) + 3, len(DELIVER) + FRAME_MAX):
        first, second = (event[1] for event in events_of(wire[:cut], wire[cut:]))
        assert (first.properties, first.body, second.body) == (properties, b"abc", b"abc")


DELIVER = method(commands.Basic.Deliver(TAG, 1, False, "", "q"))
HEADER = frame_of(2, 1, struct.pack(">HHQH", 60, 0, 3, 0))
BODY = frame.marshal(body.ContentBody(b"abc"), 1)


@pytest.mark.parametrize(
    ("wire", "code", "why"),
    [
        (DELIVER[:-1] + b"\0", ReplyCode.FRAME_ERROR, "frame end"),
        (DELIVER + HEADER[:-1] + b"\0" + BODY, ReplyCode.FRAME_ERROR, "frame end"),
        (DELIVER + HEADER + BODY[:-1] + b"\0", ReplyCode.FRAME_ERROR, "frame end"),
        (DELIVER + frame_of(2, 1, struct.pack(">HHQH", 50, 0, 3, 0)) + BODY, ReplyCode.FRAME_ERROR, "class 50"),
        (DELIVER + frame_of(2, 1, struct.pack(">HHQ", 60, 0, 3)) + BODY, ReplyCode.FRAME_ERROR, "header of 12 bytes"),
        (DELIVER + HEADER + HEADER, ReplyCode.UNEXPECTED_FRAME, "header"),
        (DELIVER + BODY, ReplyCode.UNEXPECTED_FRAME, "body"),
        (DELIVER + DELIVER, ReplyCode.UNEXPECTED_FRAME, "content was expected"),
        (DELIVER + HEADER + DELIVER, ReplyCode.UNEXPECTED_FRAME, "content was expected"),
        (DELIVER + HEADER + method(commands.Basic.Ack(1)), ReplyCode.UNEXPECTED_FRAME, "content was expected"),
        (DELIVER + HEADER + frame.marshal(body.ContentBody(b"abcd"), 1), ReplyCode.FRAME_ERROR, "1 bytes too many"),
        (HEADER, ReplyCode.UNEXPECTED_FRAME, "header"),
        (BODY, ReplyCode.UNEXPECTED_FRAME, "body"),
        (frame_of(1, 1, b"\0\x3c\0"), ReplyCode.FRAME_ERROR, "method frame of 3"),
        (frame_of(1, 1, b"\0\x3c\0\x50\0"), ReplyCode.FRAME_ERROR, "confirm of 5"),
        (frame_of(1, 1, b"\0\x3c\0\x3c\x05abc"), ReplyCode.FRAME_ERROR, "delivery cut short"),
        (frame_of(1, 1, DELIVER[7:-1] + b"\0") + HEADER, ReplyCode.FRAME_ERROR, "wrong length"),
        (frame_of(1, 1, DELIVER[7:-3] + b"\x09q") + HEADER, ReplyCode.FRAME_ERROR, "wrong length"),
        (
            method(commands.Basic.Deliver("other", 1, False, "", "q")),
            ReplyCode.UNEXPECTED_FRAME,
            "unknown consumer 'other'",
        ),
        (frame_of(1, 1, b"\0\x3c\0\x32\x01\x38\x09abc"), ReplyCode.FRAME_ERROR, "return cut short"),
        (frame_of(1, 1, b"\0\x3c\0\x32\x01\x38\0\0\0\0"), ReplyCode.FRAME_ERROR, "return of the wrong length"),
        (frame_of(1, 1, b"\0\x63\0\x01"), 502, "unreadable method 00630001"),
        (frame_of(1, 1, b"\0\x3c\0\x15\x01\xff"), 502, "unreadable method 003c0015"),
        (frame_of(1, 1, b"\0\x14\0\x28"), 502, "unreadable method 00140028"),
        (frame_of(1, 1, b"\0\x14\0\x28\x01\x94\5abcd\0\0\0"), 502, "close of"),
        (frame_of(4, 1, b""), ReplyCode.FRAME_ERROR, "frame type 4"),
        (frame_of(8, 1, b""), ReplyCode.FRAME_ERROR, "frame type 8"),
        (frame_of(8, 0, b"a"), ReplyCode.FRAME_ERROR, "frame type 8"),
        (frame_of(1, 9, b"\0\x3c\0\x50"), ReplyCode.UNEXPECTED_FRAME, "channel 9"),
        (b"AMQP\0\1\0\0", ReplyCode.FRAME_ERROR, r"speaks AMQP 1\.0\.0"),
        (b"HTTP/1.1 400 Bad Request\r\n", ReplyCode.FRAME_ERROR, "frame of"),
        (struct.pack(">BHI", 3, 1, FRAME_MAX - 7) + b"a", ReplyCode.FRAME_ERROR, "frame of 1025 bytes"),
        (
            DELIVER + struct.pack(">BHI", 2, 1, framing.MAX_HEADER + 1) + b"a",
            ReplyCode.FRAME_ERROR,
            "frame of 16777225 bytes",
        ),
    ],
)
def test_bytes_that_are_not_amqp_are_an_error(wire: bytes, code: int, why: str) -> None:
    """The whole bytes, and every cut of them, give the same error."""
    for at in range(len(wire)):
        parser, _ = reading()
        with pytest.raises(ProtocolError, match=why) as found:
            for piece in (wire[:at], wire[at:]):
                parser.feed(piece)
        assert found.value.code == code


def test_a_too_large_content_frame_after_a_delivery_is_rejected() -> None:
    """The fast path for whole contents also checks the frame limit."""
    parser, events = reading(frame_max=64)
    with pytest.raises(ProtocolError, match="frame of 108 bytes"):
        parser.feed(deliver(1, bytes(100)))
    assert events == []


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@example([(171, 100)])  # a deprecated method that only clients send: pamqp warns when it reads one
@settings(max_examples=500)
def test_a_damaged_conversation_raises_protocol_errors_only(damage: list[tuple[int, int]]) -> None:
    wire = bytearray(WHOLE)
    for at, value in damage:
        wire[at] = value
    parser, _ = reading()
    try:
        parser.feed(bytes(wire))
    except ProtocolError as error:
        assert error.code in (501, 502, 505)


def test_stopped_in_the_middle_of_a_piece() -> None:
    parser, events = reading()
    receiver = parser.receivers[1]
    receiver.consumers[TAG.encode()] = lambda _: setattr(parser, "stopped", True)  # type: ignore[index]
    parser.feed(deliver(1, b"a") + deliver(2, b"b", channel=2) + b"no frame at all")
    assert events == []


def test_a_callback_may_close_the_channel() -> None:
    parser, events = reading()
    receivers = dict(parser.receivers)
    parser.receivers = receivers
    receivers[1].consumers[TAG.encode()] = lambda _: receivers.pop(1)  # type: ignore[index]
    with pytest.raises(ProtocolError, match="for the closed channel 1"):
        parser.feed(deliver(1, b"a") + deliver(2, b"b", channel=2) + deliver(3, b"c"))
    assert len(events) == 1


@pytest.mark.parametrize("piece", [1448, 100_000])
def test_a_body_of_many_frames_in_any_pieces(piece: int) -> None:
    frames, frame_max = 128, 131_072
    parser, events = reading(frame_max)
    whole = frame_of(3, 1, bytes(frame_max - 8))
    parser.feed(DELIVER + frame_of(2, 1, struct.pack(">HHQH", 60, 0, frames * (frame_max - 8), 0)))
    for _ in range(frames):
        for at in range(0, len(whole), piece):
            parser.feed(whole[at : at + piece])
    (_, delivery), *_ = events  # type: ignore[misc]
    assert len(delivery.body) == frames * (frame_max - 8)


def test_a_frame_of_16_mb_in_small_pieces() -> None:
    """The parser joins the pieces once. Joining at every arrival would copy 97 GB here, and take half a minute."""
    size = 16 << 20
    parser, events = reading(size + 8)
    one = DELIVER + frame_of(2, 1, struct.pack(">HHQH", 60, 0, size, 0)) + frame_of(3, 1, bytes(size))
    for at in range(0, len(one), 1448):
        parser.feed(one[at : at + 1448])
    assert len(events) == 1


# Our frames, read back by pamqp.

WRITTEN_MAX = 4096


def frames(wire: bytes) -> list[tuple[int, object]]:
    found: list[tuple[int, object]] = []
    while wire:
        used, channel, one = frame.unmarshal(wire)
        found.append((channel, one))
        wire = wire[used:]
    return found


@pytest.mark.parametrize("tag", [1, (1 << 63) - 1])
@pytest.mark.parametrize("multiple", [False, True])
@pytest.mark.parametrize("requeue", [False, True])
def test_settling(tag: int, multiple: bool, requeue: bool) -> None:
    assert framing.ack(7, tag, multiple=multiple) == method(commands.Basic.Ack(tag, multiple), 7)
    nack = commands.Basic.Nack(tag, multiple, requeue)
    assert framing.nack(7, tag, multiple=multiple, requeue=requeue) == method(nack, 7)


def test_consume() -> None:
    expected = method(commands.Basic.Consume(0, "delays.in", "tag"), 3)
    assert frame.marshal(framing.Consume(queue="delays.in", consumer_tag="tag"), 3) == expected
    odd = frame.marshal(framing.Consume(queue="grün? ja!", consumer_tag="tag"), 3)  # pamqp would refuse to send it
    channel, one = frames(odd.replace("grün? ja!".encode(), b"a" * len("grün? ja!".encode())))[0]
    assert isinstance(one, commands.Basic.Consume)
    assert (channel, one.queue, one.no_ack) == (3, "a" * 10, False)


def wire_of(batch: list[Outgoing], enough: int = 1 << 30) -> bytes:
    parts, end = framing.publish(5, WRITTEN_MAX, batch, range(len(batch)), enough)
    assert end == len(batch)
    return b"".join(parts)


PIECE = WRITTEN_MAX - 8


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 1, 100_000])
@pytest.mark.parametrize("names", [("", ""), ("exchange", "key"), ("e" * 255, "k" * 255)])
def test_publish(size: int, names: tuple[str, str]) -> None:
    payload = bytes(at % 251 for at in range(size))
    properties = commands.Basic.Properties(headers={"x-delayer-id": "7"}, app_id="shop").marshal()
    exchange, key = names
    message = Outgoing(exchange.encode(), key.encode(), properties, payload, b"7")
    found = frames(wire_of([message, message]))
    assert {channel for channel, _ in found} == {5}
    half = len(found) // 2
    for one in (found[:half], found[half:]):
        start, head, *pieces = [value for _, value in one]
        assert isinstance(start, commands.Basic.Publish)
        assert (start.exchange, start.routing_key, start.mandatory, start.immediate) == (exchange, key, True, False)
        assert isinstance(head, header.ContentHeader)
        assert (head.body_size, head.class_id, head.weight) == (size, 60, 0)
        assert head.properties.app_id == "shop"
        assert head.properties.headers == {"x-delayer-id": "7"}
        assert all(isinstance(piece, body.ContentBody) and 0 < len(piece) <= WRITTEN_MAX - 8 for piece in pieces)
        assert b"".join(piece.value for piece in pieces if isinstance(piece, body.ContentBody)) == payload


def test_a_batch_in_runs() -> None:
    """Each run ends between two messages, and together they contain the bytes of the whole batch."""
    batch = [Outgoing(b"e", b"%d" % at, b"\0\0", bytes(1000 * at), b"%d" % at) for at in range(10)]
    wire, at, runs = b"", 0, 0
    while at < len(batch):
        parts, at = framing.publish(5, WRITTEN_MAX, batch, range(at, len(batch)), 6000)
        wire += b"".join(parts)
        runs += 1
    assert wire == wire_of(batch)
    assert runs == 6


def test_the_longest_header_that_fits() -> None:
    longest = bytes(framing.header_limit(WRITTEN_MAX))
    wire = wire_of([Outgoing(b"", b"q", longest, b"", b"")])
    start = len(method(commands.Basic.Publish(0, "", "q", True), 5))
    assert len(wire) - start == WRITTEN_MAX
    assert struct.unpack_from(">BHI", wire, start) == (2, 5, WRITTEN_MAX - OVERHEAD)
