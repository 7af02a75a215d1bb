"""What a connection does when the broker does this or that: every case against a scripted one."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest
from pamqp import body, commands, header
from pamqp import heartbeat as heartbeats

from delayer.core.errors import BrokerLost
from delayer.core.message import CONFIRMED, Delivery, Outgoing, Returned
from delayer.wire.address import Address
from delayer.wire.connection import Connection
from delayer.wire.errors import (
    AccessRefused,
    ChannelClosed,
    ConfirmTimeout,
    ConnectionLost,
    HeaderTooLarge,
    NoFreeChannel,
    ProtocolError,
)
from delayer.wire.properties import encode_headers, entry, long_string
from tests.unit.wire.recorded import content, deliver, returned
from tests.unit.wire.scripted import Peer, scripted


def message(token: str, payload: bytes = b"body") -> Outgoing:
    properties = encode_headers(entry(b"x-delayer-id", long_string(token.encode())))
    return Outgoing(b"", b"q", properties, payload, token.encode())


async def publishes(peer: Peer, count: int) -> None:
    """Wait until that many whole publishes (of one body frame each) arrived."""
    for _ in range(count):
        await peer.expect(commands.Basic.Publish)
        await peer.expect(header.ContentHeader)
        await peer.expect(body.ContentBody)


async def say_goodbye(connection: Connection, peer: Peer) -> None:
    closing = asyncio.create_task(connection.close())
    while not isinstance((await peer.next_frame())[1], commands.Connection.Close):
        pass
    peer.send(commands.Connection.CloseOk())
    await closing


# Coming and going.


async def test_certificates_instead_of_a_password() -> None:
    async with scripted() as script:
        address = Address.parse(f"amqp://127.0.0.1:{script.port}?auth_mechanism=external")
        opening = asyncio.create_task(Connection.open(address, name="test"))
        peer = await script.peer()
        hello = await peer.log_in()
        assert (hello.mechanism, hello.response) == ("EXTERNAL", "")
        await say_goodbye(await opening, peer)


async def test_who_we_say_we_are() -> None:
    async with scripted() as script:
        opening = asyncio.create_task(Connection.open(script.address, name="delayer@host", heartbeat=7))
        peer = await script.peer()
        hello = await peer.log_in()
        connection = await opening
        assert hello.client_properties is not None
        assert hello.client_properties["product"] == "delayer"
        assert hello.client_properties["connection_name"] == "delayer@host"
        assert hello.client_properties["capabilities"] == dict.fromkeys(
            ("publisher_confirms", "consumer_cancel_notify", "connection.blocked", "basic.nack",
             "authentication_failure_close"), True,
        )  # fmt: skip
        assert (hello.mechanism, hello.response) == ("PLAIN", "\0guest\0guest")
        assert connection.frame_max == 131072
        await say_goodbye(connection, peer)
        assert connection.closed.result().code == 200
        await connection.close()
        await peer.hung_up()


@pytest.mark.parametrize(
    ("after", "close", "expected"),
    [
        ("start", commands.Connection.Close(403, "ACCESS_REFUSED - who?", 0, 0), AccessRefused),
        ("tune", commands.Connection.Close(530, "NOT_ALLOWED - no such vhost", 10, 40), AccessRefused),
        ("tune", commands.Connection.Close(541, "INTERNAL_ERROR", 0, 0), ConnectionLost),
    ],
)
async def test_turned_away(after: str, close: commands.Connection.Close, expected: type[ConnectionLost]) -> None:
    async with scripted() as script:
        opening = asyncio.create_task(Connection.open(script.address, name="test"))
        peer = await script.peer()
        await peer.reader.readexactly(8)
        peer.send(commands.Connection.Start(0, 9, {}, "PLAIN", "en_US"))
        await peer.expect(commands.Connection.StartOk)
        if after == "tune":
            peer.send(commands.Connection.Tune(0, 0, 0))
            await peer.expect(commands.Connection.TuneOk)
            await peer.expect(commands.Connection.Open)
        peer.send(close)
        with pytest.raises(ConnectionLost) as found:
            await opening
        assert type(found.value) is expected
        assert (found.value.code, found.value.text) == (close.reply_code, close.reply_text)
        await peer.hung_up()


async def test_no_way_to_log_in() -> None:
    async with scripted() as script:
        opening = asyncio.create_task(Connection.open(script.address, name="test"))
        peer = await script.peer()
        await peer.reader.readexactly(8)
        peer.send(commands.Connection.Start(0, 9, {}, "EXTERNAL AMQPLAIN", "en_US"))
        with pytest.raises(AccessRefused, match="offers EXTERNAL AMQPLAIN, expected PLAIN"):
            await opening
        await peer.hung_up()


@pytest.mark.parametrize("greeting", [b"AMQP\0\1\0\0", b"SSH-2.0-OpenSSH_9.2\r\n", b"\x15\x03\x01\0\x02\x02\x0a\0"])
async def test_no_amqp_server(greeting: bytes) -> None:
    async with scripted() as script:
        opening = asyncio.create_task(Connection.open(script.address, name="test"))
        peer = await script.peer()
        peer.send_raw(greeting)
        with pytest.raises(ProtocolError):
            await opening
        await peer.hung_up()


async def test_a_server_that_says_nothing() -> None:
    async with scripted() as script:
        with pytest.raises(ConnectionLost, match=r"within 0\.05 s") as found:
            await Connection.open(script.address, name="test", timeout=0.05)
        assert isinstance(found.value.__cause__, TimeoutError)
        await (await script.peer()).hung_up()


async def test_a_server_that_hangs_up() -> None:
    async with scripted() as script:
        opening = asyncio.create_task(Connection.open(script.address, name="test"))
        peer = await script.peer()
        await peer.reader.readexactly(8)
        peer.writer.close()
        with pytest.raises(ConnectionLost, match="hung up"):
            await opening


async def test_nobody_listens() -> None:
    async with scripted() as script:
        address = script.address
    with pytest.raises(ConnectionLost, match="no connection to amqp://guest@127") as found:
        await Connection.open(address, name="test")
    assert isinstance(found.value.__cause__, ConnectionRefusedError)
    assert isinstance(found.value, BrokerLost)


async def test_a_cancelled_open_leaves_no_socket() -> None:
    async with scripted() as script:
        opening = asyncio.create_task(Connection.open(script.address, name="test"))
        peer = await script.peer()
        await peer.reader.readexactly(8)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await peer.hung_up()


async def test_close_does_not_hang_on_a_dead_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayer.wire.connection._CLOSE_SECONDS", 0.05)
    async with scripted() as script:
        connection, peer = await script.connect()
        await connection.close()
        await peer.hung_up()


async def test_two_close_at_once() -> None:
    async with scripted() as script:
        connection, peer = await script.connect()
        closing = [asyncio.create_task(connection.close()) for _ in range(2)]
        await peer.expect(commands.Connection.Close)
        peer.send(commands.Connection.Close(320, "at the same time", 0, 0))
        await asyncio.gather(*closing)
        assert connection.closed.result().text == "closed by us"


# What ends a connection.


async def test_closed_by_the_broker() -> None:
    async with scripted() as script:
        connection, channel, peer = await script.channel(confirms=True)
        publishing = asyncio.create_task(channel.publish([message("1")], timeout=30))
        await publishes(peer, 1)
        asking = asyncio.create_task(channel.qos(1))
        await peer.expect(commands.Basic.Qos)
        peer.send(commands.Connection.Close(320, "CONNECTION_FORCED - node is going down", 0, 0))
        for waiting in (publishing, asking):
            with pytest.raises(ConnectionLost, match="320 CONNECTION_FORCED"):
                await waiting
        await peer.expect(commands.Connection.CloseOk)
        await peer.hung_up()
        loss = connection.closed.result()
        assert (loss.code, channel.closed.result()) == (320, loss)
        for use in (connection.channel, lambda: channel.qos(1), lambda: channel.publish([message("2")], timeout=1)):
            with pytest.raises(ConnectionLost, match="320"):
                await use()
        with pytest.raises(ConnectionLost, match="320"):
            channel.ack(1)
        with pytest.raises(ConnectionLost, match="320"):
            await connection.unblocked
        await channel.close()
        await connection.close()


async def test_cut() -> None:
    async with scripted() as script:
        connection, channel, peer = await script.channel(confirms=True)
        publishing = asyncio.create_task(channel.publish([message("1")], timeout=30))
        await publishes(peer, 1)
        peer.writer.transport.abort()
        with pytest.raises(ConnectionLost):
            await publishing
        await asyncio.wait({connection.closed, channel.closed})


BROKEN: list[tuple[bytes, int]] = [
    (b"\x01\0\1\0\0\0\4\0\x3c\0\x50\0", 501),  # an ack without arguments, and a bad frame end
    (b"\x02\0\1\0\0\0\x0e" + struct.pack(">HHQH", 60, 0, 1, 0) + b"\xce", 505),  # a header out of the blue
    (b"\x01\0\7\0\0\0\4\0\x3c\0\x50\xce", 505),  # for a channel that is not open
    (deliver(1, b"x"), 505),  # for nobody
    (returned(b"1", b""), 505),  # of nothing
    (b"\x01\0\1\0\0\0\x0d\0\x3c\0\x50" + bytes(9) + b"\xce", 505),  # a confirm that nobody asked for
    (b"\x01\0\0\0\0\0\x0d\0\x3c\0\x50" + bytes(9) + b"\xce", 505),  # a confirm on channel 0
    (b"\x01\0\1\0\0\0\5\0\x14\0\x0b\0\xce", 505),  # channel.open-ok again: arguments too short for pamqp's taste
    (b"\x01\0\0\0\0\0\5\0\x0a\0\x29\0\xce", 505),  # connection.open-ok again
    (b"\x01\0\1\0\0\0\4\0\x63\0\x01\xce", 502),  # a class that AMQP does not have
    (b"\x01\0\1\0\0\0\4\0\x3c\0\x3c\xce", 501),  # a delivery without arguments
]


@pytest.mark.parametrize(("wire", "code"), BROKEN)
async def test_protocol_errors_close_the_connection_loudly(wire: bytes, code: int) -> None:
    async with scripted() as script:
        connection, channel, peer = await script.channel()
        asking = asyncio.create_task(channel.qos(1))
        await peer.expect(commands.Basic.Qos)
        peer.send_raw(wire)
        with pytest.raises(ProtocolError):
            await asking
        close = await peer.expect(commands.Connection.Close)
        loss = connection.closed.result()
        assert isinstance(loss, ProtocolError)
        assert close.reply_code == loss.code
        assert loss.code in (code, 502)
        peer.send_raw(b"and more noise")
        peer.writer.close()
        await connection.close()


async def test_a_callback_that_raises_ends_the_connection() -> None:
    heard: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: heard.append(context))
    async with scripted() as script:
        connection, channel, peer = await script.channel()

        def broken(_: Delivery) -> None:
            raise KeyError("a bug of ours")

        await consume(channel, peer, broken)
        peer.send_raw(deliver(1, b"x").replace(b"\x04ctag", b"\x09delayer.1"))
        # The frame's length no longer fits: this is a protocol error, not the callback's.
        await asyncio.wait({connection.closed})
        assert isinstance(connection.closed.result(), ProtocolError)
        peer.writer.close()
        await connection.close()
        connection, channel, peer = await script.channel()
        await consume(channel, peer, broken)
        peer.send(commands.Basic.Deliver("delayer.1", 1, False, "", "q"), 1)
        peer.send_raw(content(b"\0\0", b"x"))
        await asyncio.wait({connection.closed})
        assert isinstance(connection.closed.result().__cause__, KeyError)
        assert len(heard) == 1
    loop.set_exception_handler(before)


async def consume(channel: Any, peer: Peer, on_delivery: Any, on_cancelled: Any = lambda: None) -> None:
    consuming = asyncio.create_task(channel.consume("q", on_delivery, on_cancelled))
    asked = await peer.expect(commands.Basic.Consume)
    peer.send(commands.Basic.ConsumeOk(asked.consumer_tag), 1)
    assert await consuming == asked.consumer_tag


# Heartbeats.


async def test_a_silent_peer_is_lost() -> None:
    async with scripted() as script:
        connection, peer = await script.connect(heartbeat=0.05)
        await peer.expect(heartbeats.Heartbeat)
        await asyncio.wait({connection.closed})
        assert "nothing was heard" in connection.closed.result().text
        await peer.hung_up()


async def test_a_peer_that_beats_is_not_lost() -> None:
    async with scripted() as script:
        connection, peer = await script.connect(heartbeat=0.1)
        for _ in range(12):  # 0.6 s of nothing but heartbeats
            await peer.expect(heartbeats.Heartbeat)
            peer.send_raw(heartbeats.Heartbeat.marshal())
        assert not connection.closed.done()
        await say_goodbye(connection, peer)


async def test_silence_is_no_loss_while_we_do_not_read() -> None:
    async with scripted() as script:
        connection, peer = await script.connect(heartbeat=0.05)
        connection.pause_reading()
        connection.pause_reading()
        for _ in range(12):  # we go on beating
            await peer.expect(heartbeats.Heartbeat)
        assert not connection.closed.done()
        connection.resume_reading()
        connection.resume_reading()
        await asyncio.wait({connection.closed})
        assert "nothing was heard" in connection.closed.result().text


# Alarms and full buffers.


async def test_blocked_and_unblocked() -> None:
    async with scripted() as script:
        connection, channel, peer = await script.channel()
        heard: list[str] = []
        connection.on_alarm(heard.append)
        await connection.unblocked
        peer.send(commands.Connection.Blocked("low on memory"))
        await round_trip(channel, peer)
        assert (connection.blocked, connection.blocked_reason) == (True, "low on memory")
        waiting = [asyncio.ensure_future(connection.unblocked) for _ in range(3)]
        waiting[0].cancel()
        await round_trip(channel, peer)
        assert not any(one.done() for one in waiting[1:])
        peer.send(commands.Connection.Unblocked())
        await asyncio.gather(*waiting[1:])
        assert connection.blocked is False
        await connection.unblocked
        peer.send(commands.Connection.Blocked("low on disk"))
        await round_trip(channel, peer)
        assert heard == ["low on memory", "", "low on disk"]
        connection.on_alarm(heard.append)
        assert heard[3:] == ["low on disk"], "whoever comes later hears of it too"
        waiting = [asyncio.ensure_future(connection.unblocked)]
        peer.writer.transport.abort()
        with pytest.raises(ConnectionLost):
            await waiting[0]


async def round_trip(channel: Any, peer: Peer) -> None:
    """When this returns, everything that the peer sent before was read."""
    asking = asyncio.create_task(channel.qos(1))
    await peer.expect(commands.Basic.Qos)
    peer.send(commands.Basic.QosOk(), 1)
    await asking


def watch_buffer(connection: Connection) -> asyncio.Event:
    """Set when the transport's buffer is above its high-water mark."""
    full = asyncio.Event()
    pause_writing = connection.pause_writing

    def paused() -> None:
        pause_writing()
        full.set()

    connection.pause_writing = paused  # type: ignore[method-assign]
    return full


async def test_a_full_buffer_holds_publishes_back() -> None:
    """The peer reads nothing: what we take into memory is bounded, and it all arrives in order once it reads."""
    async with scripted() as script:
        connection, channel, peer = await script.channel(confirms=True)
        peer.reader._transport.pause_reading()  # type: ignore[attr-defined]
        batch = [message(f"{at}", bytes(100_000)) for at in range(400)]
        full = watch_buffer(connection)
        publishing = asyncio.create_task(channel.publish(batch, timeout=30))
        await full.wait()
        assert connection._transport is not None
        assert connection._transport.get_write_buffer_size() < 3 << 20
        peer.reader._transport.resume_reading()  # type: ignore[attr-defined]
        await publishes(peer, len(batch))
        peer.send(commands.Basic.Ack(len(batch), True), 1)
        assert await publishing == [CONFIRMED] * len(batch)


@pytest.mark.parametrize("ending", ["cut", "cancel", "timeout"])
async def test_an_ending_while_the_buffer_is_full(ending: str) -> None:
    async with scripted() as script:
        connection, channel, peer = await script.channel(confirms=True)
        peer.reader._transport.pause_reading()  # type: ignore[attr-defined]
        batch = [message(f"{at}", bytes(100_000)) for at in range(400)]
        full = watch_buffer(connection)
        publishing = asyncio.create_task(channel.publish(batch, timeout=0.2 if ending == "timeout" else 30))
        await full.wait()
        if ending == "cut":
            peer.writer.transport.abort()
            with pytest.raises(ConnectionLost):
                await publishing
        elif ending == "timeout":
            with pytest.raises(ConfirmTimeout):
                await publishing
            peer.writer.transport.abort()
        else:
            publishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publishing
            written = channel._confirms.in_flight  # type: ignore[union-attr]
            assert 0 < written < len(batch)
            peer.reader._transport.resume_reading()  # type: ignore[attr-defined]
            await publishes(peer, written)
            another = asyncio.create_task(channel.publish([message("another")], timeout=30))
            await publishes(peer, 1)
            peer.send(commands.Basic.Ack(written + 1, True), 1)
            assert await another == [CONFIRMED]
            return
        await asyncio.wait({channel.closed})


# Publishing.


async def test_several_publishes_in_flight() -> None:
    async with scripted() as script:
        _, channel, peer = await script.channel(confirms=True)
        first = asyncio.create_task(channel.publish([message("1"), message("2")], timeout=30))
        second = asyncio.create_task(channel.publish([message("3"), message("4")], timeout=30))
        await publishes(peer, 4)
        peer.send_raw(returned(b"3", b"body"))
        peer.send(commands.Basic.Ack(3, False), 1)
        peer.send(commands.Basic.Ack(4, False), 1)
        assert await second == [Returned(312, "NO_ROUTE"), CONFIRMED]
        assert not first.done()
        peer.send(commands.Basic.Ack(2, True), 1)
        assert await first == [CONFIRMED, CONFIRMED]
        assert await channel.publish([], timeout=30) == []


async def test_a_return_of_a_stranger_is_a_protocol_error() -> None:
    async with scripted() as script:
        _, channel, peer = await script.channel(confirms=True)
        publishing = asyncio.create_task(channel.publish([message("1")], timeout=30))
        await publishes(peer, 1)
        peer.send_raw(returned(b"2", b"body"))
        with pytest.raises(ProtocolError, match="0 publishes in flight"):
            await publishing
        assert (await peer.expect(commands.Connection.Close)).reply_code == 505


async def test_confirms_that_do_not_come() -> None:
    async with scripted() as script:
        connection, channel, peer = await script.channel(confirms=True)
        other = asyncio.create_task(channel.publish([message("1")], timeout=30))
        late = asyncio.create_task(channel.publish([message("2"), message("3"), message("4")], timeout=0.5))
        await publishes(peer, 4)
        peer.send(commands.Basic.Ack(3, False), 1)
        with pytest.raises(ConfirmTimeout, match=r"3 confirms were missing after 0\.5 s") as missing:
            await late
        assert missing.value.outcomes == [None, CONFIRMED, None]
        with pytest.raises(ConfirmTimeout) as too:
            await other
        assert too.value.outcomes == [None]
        assert isinstance(channel.closed.result(), ConfirmTimeout)
        await peer.expect(commands.Channel.Close)
        # Until the broker agrees, what it says about that channel is ignored, and the number is not used again.
        peer.send(commands.Basic.Ack(3, True), 1)
        peer.send_raw(returned(b"nobody's", b"x"))
        opening = asyncio.create_task(connection.channel())
        await peer.open_channel(2)
        second = await opening
        assert second.number == 2
        peer.send(commands.Channel.CloseOk(), 1)
        asking = asyncio.create_task(second.qos(1))
        await peer.expect(commands.Basic.Qos)
        peer.send(commands.Basic.QosOk(), 2)
        await asking
        opening = asyncio.create_task(connection.channel())
        await peer.open_channel(1)
        assert (await opening).number == 1


async def test_a_cancelled_publish_leaves_the_channel_in_order() -> None:
    async with scripted() as script:
        _, channel, peer = await script.channel(confirms=True)
        given_up = asyncio.create_task(channel.publish([message("1"), message("2")], timeout=30))
        await publishes(peer, 2)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        publishing = asyncio.create_task(channel.publish([message("3")], timeout=30))
        await publishes(peer, 1)
        peer.send_raw(returned(b"2", b"body"))
        peer.send(commands.Basic.Nack(2, True, False), 1)
        peer.send(commands.Basic.Ack(3, False), 1)
        assert await publishing == [CONFIRMED]


async def test_what_cannot_be_published_is_refused_before_anything_is_written() -> None:
    async with scripted() as script:
        _, channel, peer = await script.channel()
        with pytest.raises(RuntimeError, match="confirm_select"):
            await channel.publish([message("1")], timeout=1)
        await asyncio.gather(channel.confirm_select(), peer.select())
        await channel.confirm_select()
        large = message("2")._replace(properties=encode_headers(entry(b"h", long_string(bytes(131072)))))
        with pytest.raises(HeaderTooLarge) as found:
            await channel.publish([message("1"), large], timeout=1)
        assert (found.value.index, found.value.limit) == (1, 131072 - 20)
        assert not isinstance(found.value, BrokerLost)
        with pytest.raises(ValueError, match="message 0 of the batch"):
            await channel.publish([message("1")._replace(routing_key=bytes(256))], timeout=1)
        with pytest.raises(ValueError, match="unique"):
            await channel.publish([message("1"), message("1")], timeout=1)
        publishing = asyncio.create_task(channel.publish([message("1")], timeout=30))
        await publishes(peer, 1)
        peer.send(commands.Basic.Ack(1, False), 1)
        assert await publishing == [CONFIRMED]


# Channels.


async def test_a_channel_closed_by_the_broker() -> None:
    async with scripted() as script:
        connection, channel, peer = await script.channel(confirms=True)
        publishing = asyncio.create_task(channel.publish([message("1")], timeout=30))
        await publishes(peer, 1)
        asking = asyncio.create_task(channel.qos(1))
        await peer.expect(commands.Basic.Qos)
        peer.send(commands.Channel.Close(404, "NOT_FOUND - no exchange", 60, 40), 1)
        for waiting in (publishing, asking):
            with pytest.raises(ChannelClosed) as found:
                await waiting
            assert (found.value.code, found.value.text) == (404, "NOT_FOUND - no exchange")
        await peer.expect(commands.Channel.CloseOk)
        assert channel.closed.result().code == 404
        with pytest.raises(ChannelClosed, match="404 NOT_FOUND"):
            channel.nack(1)
        await channel.close()
        assert not connection.closed.done()
        opening = asyncio.create_task(connection.channel())
        await peer.open_channel(1)  # the number is free
        assert (await opening).number == 1


async def test_both_sides_close_a_channel() -> None:
    async with scripted() as script:
        connection, channel, peer = await script.channel()
        closing = asyncio.create_task(channel.close())
        await peer.expect(commands.Channel.Close)
        peer.send(commands.Channel.Close(406, "PRECONDITION_FAILED", 60, 80), 1)
        await peer.expect(commands.Channel.CloseOk)
        peer.send(commands.Channel.CloseOk(), 1)
        await closing
        assert channel.closed.result().code == 200
        await channel.close()
        assert not connection.closed.done()


async def test_a_channel_that_the_broker_refuses() -> None:
    async with scripted() as script:
        connection, peer = await script.connect()
        opening = asyncio.create_task(connection.channel())
        await peer.expect(commands.Channel.Open)
        peer.send(commands.Channel.Close(506, "RESOURCE_ERROR", 20, 10), 1)
        with pytest.raises(ChannelClosed, match="506"):
            await opening


async def test_channel_numbers_run_out() -> None:
    async with scripted() as script:
        connection, peer = await script.connect(tune=commands.Connection.Tune(2, 8192, 0))
        assert connection.frame_max == 8192
        for number in (1, 2):
            opening = asyncio.create_task(connection.channel())
            await peer.open_channel(number)
            await opening
        with pytest.raises(NoFreeChannel, match="all 2"):
            await connection.channel()


# Consumers.


async def test_the_first_delivery_stands_right_behind_the_answer() -> None:
    async with scripted() as script:
        _, channel, peer = await script.channel()
        seen: asyncio.Queue[Delivery] = asyncio.Queue()
        consuming = asyncio.create_task(channel.consume("q", seen.put_nowait, lambda: None))
        asked = await peer.expect(commands.Basic.Consume)
        tag = asked.consumer_tag
        peer.send(commands.Basic.ConsumeOk(tag), 1)
        peer.send(commands.Basic.Deliver(tag, 1, True, "e", "k"), 1)
        peer.send_raw(content(b"\0\0", b"first"))
        assert await consuming == tag
        assert await seen.get() == Delivery(1, True, b"e", b"k", b"\0\0", b"first")
        channel.ack(1, multiple=True)
        channel.nack(2, requeue=False)
        ack, nack = await peer.expect(commands.Basic.Ack), await peer.expect(commands.Basic.Nack)
        assert (ack.delivery_tag, ack.multiple) == (1, True)
        assert (nack.delivery_tag, nack.multiple, nack.requeue) == (2, False, False)
        cancelling = asyncio.create_task(channel.cancel(tag))
        await peer.expect(commands.Basic.Cancel)
        peer.send(commands.Basic.Deliver(tag, 2, False, "e", "k"), 1)
        peer.send_raw(content(b"\0\0", b"last"))
        peer.send(commands.Basic.CancelOk(tag), 1)
        await cancelling
        assert seen.get_nowait().body == b"last"


@pytest.mark.parametrize("nowait", [True, False])
async def test_cancelled_by_the_broker(nowait: bool) -> None:
    async with scripted() as script:
        _, channel, peer = await script.channel()
        cancelled = asyncio.Event()
        await consume(channel, peer, lambda _: None, cancelled.set)
        peer.send(commands.Basic.Cancel("delayer.1", nowait), 1)
        await cancelled.wait()
        if not nowait:
            assert (await peer.expect(commands.Basic.CancelOk)).consumer_tag == "delayer.1"
        channel.ack(1)  # what was delivered can still be settled
        await peer.expect(commands.Basic.Ack)


async def test_an_answer_to_somebody_who_went_away() -> None:
    async with scripted() as script:
        _, channel, peer = await script.channel()
        asking = asyncio.create_task(channel.qos(5))
        await peer.expect(commands.Basic.Qos)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        peer.send(commands.Basic.QosOk(), 1)
        await round_trip(channel, peer)


async def test_connections_do_not_know_each_other() -> None:
    async with scripted() as script:
        (one, first, peer), (two, second, other) = await script.channel(), await script.channel()
        peer.writer.transport.abort()
        await asyncio.wait({one.closed, first.closed})
        await round_trip(second, other)
        assert not two.closed.done()
