"""What we write, read back by pamqp."""

from __future__ import annotations

import struct

import pytest
from pamqp import body, commands, frame, header
from pamqp.base import Frame

from delayer.amqp import framing
from delayer.amqp.framing import OVERHEAD
from delayer.amqp.properties import encode_headers
from delayer.core.message import Outgoing
from tests.unit.amqp.tables import table_of_everything

FRAME_MAX = 4096


def frames(wire: bytes) -> list[tuple[int, object]]:
    found: list[tuple[int, object]] = []
    while wire:
        used, channel, one = frame.unmarshal(wire)
        found.append((channel, one))
        wire = wire[used:]
    return found


@pytest.mark.parametrize("tag", [1, 1 << 40, (1 << 63) - 1])
@pytest.mark.parametrize("multiple", [False, True])
def test_settling(tag: int, multiple: bool) -> None:
    ack = commands.Basic.Ack(tag, multiple)
    assert framing.ack(7, tag, multiple=multiple) == frame.marshal(ack, 7)
    for requeue in (False, True):
        nack = commands.Basic.Nack(tag, multiple, requeue)
        assert framing.nack(7, tag, multiple=multiple, requeue=requeue) == frame.marshal(nack, 7)


def test_consume() -> None:
    expected = frame.marshal(commands.Basic.Consume(0, "delays.in", "tag"), 3)
    assert framing.consume(3, b"delays.in", b"tag") == expected
    odd = framing.consume(3, "grün? ja!".encode(), b"tag")  # pamqp would refuse to send it
    channel, one = frames(odd.replace("grün? ja!".encode(), b"a" * len("grün? ja!".encode())))[0]
    assert isinstance(one, commands.Basic.Consume)
    assert (channel, one.queue, one.no_ack) == (3, "a" * 10, False)
    with pytest.raises(ValueError, match="255 bytes"):
        framing.consume(3, b"q" * 256, b"tag")


def wire_of(batch: list[Outgoing], enough: int = 1 << 30) -> bytes:
    parts, end = framing.publish(5, FRAME_MAX, batch, 0, enough)
    assert end == len(batch)
    return b"".join(parts)


@pytest.mark.parametrize(
    "size", [0, 1, FRAME_MAX - 9, FRAME_MAX - 8, FRAME_MAX - 7, 2 * (FRAME_MAX - 8), 2 * (FRAME_MAX - 8) + 1, 100_000]
)
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
        assert all(isinstance(piece, body.ContentBody) and 0 < len(piece) <= FRAME_MAX - 8 for piece in pieces)
        assert b"".join(piece.value for piece in pieces if isinstance(piece, body.ContentBody)) == payload


def test_properties_go_out_as_they_are() -> None:
    properties = encode_headers(table_of_everything())
    assert struct.pack(">HHQ", 60, 0, 3) + properties + b"\xce" in wire_of(
        [Outgoing(b"", b"q", properties, b"abc", b"")]
    )


def test_a_batch_in_runs() -> None:
    """Each run ends between two messages, and their bytes are those of the whole."""
    batch = [Outgoing(b"e", b"%d" % at, b"\0\0", bytes(1000 * at), b"%d" % at) for at in range(10)]
    wire, at, runs = b"", 0, 0
    while at < len(batch):
        parts, at = framing.publish(5, FRAME_MAX, batch, at, 6000)
        wire += b"".join(parts)
        runs += 1
    assert wire == wire_of(batch)
    assert runs == 6


def test_the_longest_header_that_fits() -> None:
    longest = bytes(framing.header_limit(FRAME_MAX))
    wire = wire_of([Outgoing(b"", b"q", longest, b"", b"")])
    start = len(frame.marshal(commands.Basic.Publish(0, "", "q", True), 5))
    assert len(wire) - start == FRAME_MAX
    assert struct.unpack_from(">BHI", wire, start) == (2, 5, FRAME_MAX - OVERHEAD)


ASKED: list[Frame] = [
    commands.Connection.StartOk({"product": "delayer"}, "PLAIN", "\0guest\0guest", "en_US"),
    commands.Connection.TuneOk(2047, 131072, 20),
    commands.Connection.Open("/"),
    commands.Connection.Close(501, "broken", 0, 0),
    commands.Connection.CloseOk(),
    commands.Channel.Open(),
    commands.Channel.Close(200, "bye", 0, 0),
    commands.Channel.CloseOk(),
    commands.Basic.Qos(0, 5000, False),
    commands.Basic.Cancel("tag", False),
    commands.Basic.CancelOk("tag"),
    commands.Confirm.Select(),
]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: asked.name)
def test_every_method_that_we_send(asked: Frame) -> None:
    wire = framing.marshal(asked, 4)
    assert dict(framing.unmarshal(wire)) == dict(asked)
    assert frames(wire)[0][0] == 4
