"""A connection from login to close: every case against a scripted broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pamqp import commands
from pamqp import heartbeat as heartbeats

from delayer.amqp.channel import Channel
from delayer.amqp.errors import ConfirmTimeout, ConnectionLost, ProtocolError
from delayer.amqp.values import CONFIRMED, Answer, Delivery
from tests.unit.amqp.recorded import content, returned
from tests.unit.amqp.scripted import (
    Peer,
    asked,
    consume,
    in_flight,
    message,
    publishes,
    round_trip,
    say_goodbye,
    scripted,
    scripted_channel,
)


async def test_close_does_not_hang_on_a_dead_peer() -> None:
    async with scripted() as script:
        connection, peer = await script.connect()
        await connection.close(0.05)
        await peer.hung_up()


async def test_both_sides_close_the_connection_at_once() -> None:
    async with scripted() as script:
        connection, peer = await script.connect()
        closing = [asyncio.create_task(connection.close()) for _ in range(2)]
        await peer.expect(commands.Connection.Close)
        peer.send(commands.Connection.Close(320, "at the same time", 0, 0))
        await asyncio.gather(*closing)
        assert connection.closed.result().text == "closed by us"


# Ways for a connection to end.


async def test_a_close_by_the_broker_ends_every_call() -> None:
    async with scripted_channel(confirms=True) as (connection, channel, peer):
        publishing = await in_flight(channel, peer, "1")
        asking = await asked(channel, peer)
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
            await connection.unblocked()
        await channel.close()
        await connection.close()


BROKEN: list[tuple[bytes, int]] = [
    (b"\x01\0\1\0\0\0\4\0\x3c\0\x50\0", 501),  # an ack without arguments, and a bad frame end
    (returned(b"1", b""), 505),  # a return without a publish
    (b"\x01\0\1\0\0\0\x0d\0\x3c\0\x50" + bytes(9) + b"\xce", 505),  # a confirm outside confirm mode
    (b"\x01\0\0\0\0\0\x0d\0\x3c\0\x50" + bytes(9) + b"\xce", 505),  # a confirm on channel 0
    (b"\x01\0\1\0\0\0\5\0\x14\0\x0b\0\xce", 505),  # channel.open-ok again: its arguments are too short for pamqp
    (b"\x01\0\0\0\0\0\5\0\x0a\0\x29\0\xce", 505),  # connection.open-ok again
]


@pytest.mark.parametrize(("wire", "code"), BROKEN)
async def test_protocol_errors_close_the_connection_loudly(wire: bytes, code: int) -> None:
    async with scripted_channel() as (connection, channel, peer):
        asking = await asked(channel, peer)
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
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
    async with scripted_channel() as (connection, channel, peer):

        def broken(_: Delivery) -> None:
            raise KeyError("a bug of ours")

        await consume(channel, peer, broken)
        peer.send(commands.Basic.Deliver("amqp.1", 1, False, "", "q"), 1)
        peer.send_raw(content(b"\0\0", b"x"))
        await asyncio.wait({connection.closed})
        assert isinstance(connection.closed.result().__cause__, KeyError)
        assert len(heard) == 1


# Heartbeats.


async def test_a_peer_that_beats_is_not_lost() -> None:
    async with scripted() as script:
        connection, peer = await script.connect(heartbeat=0.1)
        for _ in range(12):  # 0.6 s with heartbeats only
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
        assert "nothing was received" in connection.closed.result().text
        await peer.hung_up()


# Alarms and full buffers.


async def test_blocked_and_unblocked() -> None:
    async with scripted_channel() as (connection, channel, peer):
        heard: list[str] = []
        connection.on_alarm(heard.append)
        await connection.unblocked()
        peer.send(commands.Connection.Blocked("low on memory"))
        await round_trip(channel, peer)
        assert connection.blocked
        waiting = [asyncio.ensure_future(connection.unblocked()) for _ in range(3)]
        waiting[0].cancel()
        await round_trip(channel, peer)
        assert not any(one.done() for one in waiting[1:])
        peer.send(commands.Connection.Unblocked())
        await asyncio.gather(*waiting[1:])
        assert connection.blocked is False
        await connection.unblocked()
        peer.send(commands.Connection.Blocked("low on disk"))
        await round_trip(channel, peer)
        assert heard == ["low on memory", "", "low on disk"]
        connection.on_alarm(heard.append)
        assert heard[3:] == ["low on disk"], "a later listener hears of the alarm too"
        waiting = [asyncio.ensure_future(connection.unblocked())]
        peer.writer.transport.abort()
        with pytest.raises(ConnectionLost):
            await waiting[0]


LARGE = [message(f"{at}", bytes(100_000)) for at in range(400)]


@asynccontextmanager
async def publishing_into_a_full_buffer(
    timeout: float = 30,
) -> AsyncIterator[tuple[asyncio.Task[list[Answer]], Channel, Peer]]:
    """A publish to a peer that does not read; the transport's buffer is above its high-water mark."""
    async with scripted_channel(confirms=True) as (connection, channel, peer):
        full = asyncio.Event()
        pause_writing = connection.pause_writing

        def paused() -> None:
            pause_writing()
            full.set()

        connection.pause_writing = paused  # type: ignore[method-assign]
        peer.reader._transport.pause_reading()  # type: ignore[attr-defined]
        publishing = asyncio.create_task(channel.publish(LARGE, timeout=timeout))
        await full.wait()
        assert connection._transport is not None
        assert connection._transport.get_write_buffer_size() < 3 << 20
        yield publishing, channel, peer


async def test_a_full_buffer_delays_publishes() -> None:
    """The write buffer is bounded, and all messages arrive in order once the peer reads."""
    async with publishing_into_a_full_buffer() as (publishing, _, peer):
        peer.reader._transport.resume_reading()  # type: ignore[attr-defined]
        await publishes(peer, len(LARGE))
        peer.send(commands.Basic.Ack(len(LARGE), True), 1)
        assert await publishing == [CONFIRMED] * len(LARGE)


@pytest.mark.parametrize(("timeout", "failure"), [(30, ConnectionLost), (0.2, ConfirmTimeout)])
async def test_a_cut_or_a_timeout_while_the_buffer_is_full(timeout: float, failure: type[Exception]) -> None:
    async with publishing_into_a_full_buffer(timeout) as (publishing, channel, peer):
        if failure is ConnectionLost:
            peer.writer.transport.abort()
        with pytest.raises(failure):
            await publishing
        peer.writer.transport.abort()
        await asyncio.wait({channel.closed})


async def test_a_cancelled_publish_while_the_buffer_is_full() -> None:
    """The channel continues after the messages already written."""
    async with publishing_into_a_full_buffer() as (publishing, channel, peer):
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        written = channel._confirms.in_flight  # type: ignore[union-attr]
        assert 0 < written < len(LARGE)
        peer.reader._transport.resume_reading()  # type: ignore[attr-defined]
        await publishes(peer, written)
        another = await in_flight(channel, peer, "another")
        peer.send(commands.Basic.Ack(written + 1, True), 1)
        assert await another == [CONFIRMED]
