"""The parser: the same events however the bytes are cut, and nothing but ProtocolError for bytes that are not AMQP."""

from __future__ import annotations

import contextlib
import itertools
import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pamqp import body, commands, frame
from pamqp.base import Frame

from delayer.amqp import framing
from delayer.amqp.errors import FRAME_ERROR, UNEXPECTED_FRAME, ProtocolError
from delayer.amqp.framing import ReturnedMessage
from delayer.core.message import Delivery
from tests.unit.amqp.recorded import (
    EVERYTHING,
    FRAME_MAX,
    TAG,
    content,
    conversation,
    deliver,
    method,
    reading,
)

WHOLE = conversation()


def events_of(*pieces: bytes) -> list[object]:
    parser, events = reading()
    for piece in pieces:
        parser.feed(piece)
    return events


EXPECTED = events_of(WHOLE)


def test_the_conversation_as_a_whole() -> None:
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
    assert (2, 8, False, True) in rest
    assert (1, 9, True, False) in rest
    back = [event[1] for event in rest if isinstance(event, tuple) and isinstance(event[1], ReturnedMessage)]
    assert [(one.code, one.text, one.body) for one in back] == [(312, "NO_ROUTE", b"came back"), (312, "NO_ROUTE", b"")]


def test_cut_at_every_byte() -> None:
    for at in range(1, len(WHOLE)):
        assert events_of(WHOLE[:at], WHOLE[at:]) == EXPECTED, f"cut at {at}"


def test_byte_by_byte() -> None:
    assert events_of(*(WHOLE[at : at + 1] for at in range(len(WHOLE)))) == EXPECTED


@given(st.lists(st.integers(0, len(WHOLE)), max_size=40))
def test_cut_anywhere(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(WHOLE)]
    assert events_of(*(WHOLE[a:b] for a, b in itertools.pairwise(edges))) == EXPECTED


def test_cut_short_says_nothing_of_what_is_missing() -> None:
    for at in range(len(WHOLE)):
        events = events_of(WHOLE[:at])
        assert events == EXPECTED[: len(events)]


ANSWERS: list[Frame] = [
    commands.Connection.Start(0, 9, {"product": "RabbitMQ", "capabilities": {"basic.nack": True}}, "PLAIN", "en_US"),
    commands.Connection.Tune(2047, 131072, 60),
    commands.Connection.OpenOk(""),
    commands.Connection.Close(320, "CONNECTION_FORCED", 0, 0),
    commands.Connection.CloseOk(),
    commands.Connection.Blocked("low on disk"),
    commands.Connection.Unblocked(),
    commands.Channel.OpenOk("0"),
    commands.Channel.Close(404, "NOT_FOUND - " + "q" * 200, 60, 20),
    commands.Channel.CloseOk(),
    commands.Basic.QosOk(),
    commands.Basic.ConsumeOk(TAG),
    commands.Basic.Cancel(TAG, True),
    commands.Basic.CancelOk(TAG),
    commands.Confirm.SelectOk(),
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name)
def test_every_method_the_broker_sends(answer: Frame) -> None:
    channel = 0 if answer.name.startswith("Connection") else 1
    assert events_of(method(answer, channel)) == [(channel, answer.name, dict(answer))]


@pytest.mark.parametrize("multiple", [False, True])
@pytest.mark.parametrize("tag", [1, 255, 1 << 32, (1 << 63) - 1])
def test_confirms(tag: int, multiple: bool) -> None:
    assert events_of(method(commands.Basic.Ack(tag, multiple))) == [(1, tag, multiple, True)]
    assert events_of(method(commands.Basic.Nack(tag, multiple, False))) == [(1, tag, multiple, False)]


@pytest.mark.parametrize("size", [0, 1, FRAME_MAX - 9, FRAME_MAX - 8, FRAME_MAX - 7, 5 * FRAME_MAX])
def test_body_sizes(size: int) -> None:
    payload = bytes(size)
    assert events_of(deliver(1, payload)) == [(1, Delivery(1, False, b"exchange", b"k", b"\0\0", payload))]


def test_names_of_255_bytes() -> None:
    names = b"e" * 255, b"\xff" * 255
    payload = struct.pack(">HHB", 60, 60, 4) + TAG.encode() + struct.pack(">QB", 1, 0)
    payload += b"\xff" + names[0] + b"\xff" + names[1]
    start = struct.pack(">BHI", 1, 1, len(payload)) + payload + b"\xce"
    assert events_of(start + content(b"\0\0", b"b")) == [(1, Delivery(1, False, *names, b"\0\0", b"b"))]


def test_a_text_clipped_in_the_middle_of_a_letter() -> None:
    text = "ü".encode()[:1]
    wire = frame_of(1, 1, struct.pack(">HHHB", 20, 40, 404, 255) + b"n" * 254 + text + struct.pack(">HH", 50, 10))
    arguments = {"reply_code": 404, "reply_text": "n" * 254 + "\ufffd", "class_id": 50, "method_id": 10}
    assert events_of(wire) == [(1, "Channel.Close", arguments)]
    long = "ü" * 200
    assert framing.unmarshal(framing.marshal(commands.Channel.Close(1, framing.clipped(long), 0, 0), 1))
    assert framing.clipped(long) == "ü" * 127


def frame_of(kind: int, channel: int, payload: bytes, end: bytes = b"\xce") -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + end


DELIVER = method(commands.Basic.Deliver(TAG, 1, False, "", "q"))
HEADER = frame_of(2, 1, struct.pack(">HHQH", 60, 0, 3, 0))
BODY = frame.marshal(body.ContentBody(b"abc"), 1)


@pytest.mark.parametrize(
    ("wire", "code", "why"),
    [
        (DELIVER[:-1] + b"\0", FRAME_ERROR, "frame end"),
        (DELIVER + HEADER[:-1] + b"\0" + BODY, FRAME_ERROR, "frame end"),
        (DELIVER + HEADER + BODY[:-1] + b"\0", FRAME_ERROR, "frame end"),
        (DELIVER + frame_of(2, 1, struct.pack(">HHQH", 50, 0, 3, 0)) + BODY, FRAME_ERROR, "class 50"),
        (DELIVER + frame_of(2, 1, struct.pack(">HHQ", 60, 0, 3)) + BODY, FRAME_ERROR, "header of 12 bytes"),
        (DELIVER + HEADER + HEADER, UNEXPECTED_FRAME, "header"),
        (DELIVER + BODY, UNEXPECTED_FRAME, "body"),
        (DELIVER + DELIVER, UNEXPECTED_FRAME, "content was expected"),
        (DELIVER + HEADER + DELIVER, UNEXPECTED_FRAME, "content was expected"),
        (DELIVER + HEADER + method(commands.Basic.Ack(1)), UNEXPECTED_FRAME, "content was expected"),
        (DELIVER + HEADER + frame.marshal(body.ContentBody(b"abcd"), 1), FRAME_ERROR, "1 bytes too many"),
        (HEADER, UNEXPECTED_FRAME, "header"),
        (BODY, UNEXPECTED_FRAME, "body"),
        (frame_of(1, 1, b"\0\x3c\0"), FRAME_ERROR, "method frame of 3"),
        (frame_of(1, 1, b"\0\x3c\0\x50\0"), FRAME_ERROR, "confirm of 5"),
        (frame_of(1, 1, b"\0\x3c\0\x3c\x05abc"), FRAME_ERROR, "delivery cut short"),
        (frame_of(1, 1, DELIVER[7:-1] + b"\0") + HEADER, FRAME_ERROR, "wrong length"),
        (frame_of(1, 1, DELIVER[7:-3] + b"\x09q") + HEADER, FRAME_ERROR, "wrong length"),
        (method(commands.Basic.Deliver("other", 1, False, "", "q")), UNEXPECTED_FRAME, "unknown consumer 'other'"),
        (frame_of(1, 1, b"\0\x3c\0\x32\x01\x38\x09abc"), FRAME_ERROR, "return cut short"),
        (frame_of(1, 1, b"\0\x3c\0\x32\x01\x38\0\0\0\0"), FRAME_ERROR, "return of the wrong length"),
        (frame_of(1, 1, b"\0\x63\0\x01"), 502, "unreadable method 00630001"),
        (frame_of(1, 1, b"\0\x3c\0\x15\x01\xff"), 502, "unreadable method 003c0015"),
        (frame_of(1, 1, b"\0\x14\0\x28"), 502, "unreadable method 00140028"),
        (frame_of(1, 1, b"\0\x14\0\x28\x01\x94\5abcd\0\0\0"), 502, "close of"),
        (frame_of(4, 1, b""), FRAME_ERROR, "frame type 4"),
        (frame_of(8, 1, b""), FRAME_ERROR, "frame type 8"),
        (frame_of(8, 0, b"a"), FRAME_ERROR, "frame type 8"),
        (frame_of(1, 9, b"\0\x3c\0\x50"), UNEXPECTED_FRAME, "channel 9"),
        (b"AMQP\0\1\0\0", FRAME_ERROR, r"speaks AMQP 1\.0\.0"),
        (b"HTTP/1.1 400 Bad Request\r\n", FRAME_ERROR, "frame of"),
        (struct.pack(">BHI", 3, 1, FRAME_MAX - 7) + b"a", FRAME_ERROR, "frame of 1025 bytes"),
        (DELIVER + struct.pack(">BHI", 2, 1, FRAME_MAX - 7) + b"a", FRAME_ERROR, "frame of 1025 bytes"),
    ],
)
def test_not_amqp(wire: bytes, code: int, why: str) -> None:
    """Whole, and cut at every byte: the same error."""
    for at in range(len(wire)):
        parser, _ = reading()
        with pytest.raises(ProtocolError, match=why) as found:
            for piece in (wire[:at], wire[at:]):
                parser.feed(piece)
        assert found.value.code == code


def test_a_large_content_frame_behind_a_delivery_is_not_taken() -> None:
    """The short cut for whole contents keeps the frame limit too."""
    parser, events = reading(frame_max=64)
    with pytest.raises(ProtocolError, match="frame of 108 bytes"):
        parser.feed(deliver(1, bytes(100)))
    assert events == []


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_random_bytes(noise: bytes) -> None:
    parser, _ = reading()
    with contextlib.suppress(ProtocolError):
        parser.feed(noise)


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@example([(171, 100)])  # a method that only clients send, and deprecated: pamqp warns when it reads one
@settings(max_examples=500)
def test_damaged_conversation(damage: list[tuple[int, int]]) -> None:
    wire = bytearray(WHOLE)
    for at, value in damage:
        wire[at] = value
    parser, _ = reading()
    try:
        parser.feed(bytes(wire))
    except ProtocolError as error:
        assert error.code in (501, 502, 505)


@given(st.sampled_from([(20, 40), (10, 50), (10, 10), (10, 60), (60, 30), (60, 50), (60, 21)]), st.binary(max_size=80))
@settings(max_examples=300)
def test_random_arguments(method_id: tuple[int, int], noise: bytes) -> None:
    parser, _ = reading()
    with contextlib.suppress(ProtocolError):
        parser.feed(frame_of(1, 1, struct.pack(">HH", *method_id) + noise))


def test_stopped_in_the_middle_of_a_piece() -> None:
    parser, events = reading()
    receiver = parser.receivers[1]
    receiver.consumers[TAG.encode()] = lambda _: parser.stop()  # type: ignore[index]
    parser.feed(deliver(1, b"a") + deliver(2, b"b", channel=2) + b"no frame at all")
    assert events == []


def test_a_callback_may_close_the_channel() -> None:
    parser, events = reading()
    receivers = dict(parser.receivers)
    parser.receivers = receivers
    receivers[1].consumers[TAG.encode()] = lambda _: receivers.pop(1)  # type: ignore[index]
    with pytest.raises(ProtocolError, match="channel 1, which is not open"):
        parser.feed(deliver(1, b"a") + deliver(2, b"b", channel=2) + deliver(3, b"c"))
    assert len(events) == 1


def body_read(frames: int, piece: int) -> int:
    """Feed a body of ``frames`` full frames in pieces of ``piece`` bytes; how many bytes came out as one delivery."""
    frame_max = 131_072
    parser, events = reading(frame_max)
    whole = frame_of(3, 1, bytes(frame_max - 8))
    pieces = [whole[at : at + piece] for at in range(0, len(whole), piece)]
    parser.feed(DELIVER + frame_of(2, 1, struct.pack(">HHQH", 60, 0, frames * (frame_max - 8), 0)))
    for _ in range(frames):
        for part in pieces:
            parser.feed(part)
    (_, delivery), *_ = events  # type: ignore[misc]
    return len(delivery.body)


@pytest.mark.parametrize("piece", [1448, 100_000])
def test_a_body_of_many_frames_in_any_pieces(piece: int) -> None:
    assert body_read(128, piece) == 128 * (131_072 - 8)


def test_a_frame_of_16_mb_in_small_pieces() -> None:
    """Joined once, when it is complete: joining at every arrival would copy 97 GB here, and take half a minute."""
    size = 16 << 20
    parser, events = reading(size + 8)
    one = DELIVER + frame_of(2, 1, struct.pack(">HHQH", 60, 0, size, 0)) + frame_of(3, 1, bytes(size))
    for at in range(0, len(one), 1448):
        parser.feed(one[at : at + 1448])
    assert len(events) == 1
