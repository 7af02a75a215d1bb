"""Publishing, consuming and the channels of both, against a scripted broker."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Iterator

import pytest
from pamqp import commands

from delayer.amqp.errors import ChannelClosed, ConfirmTimeout, NoFreeChannel
from delayer.amqp.properties import encode_headers, entry, long_string
from delayer.amqp.values import CONFIRMED, Delivery, Nacked, Outgoing, Pace
from tests.support.fakes import until
from tests.unit.amqp.recorded import content, returned
from tests.unit.amqp.scripted import (
    another,
    asked,
    in_flight,
    message,
    publishes,
    round_trip,
    scripted,
    scripted_channel,
)

# Publishing.


class Clock:
    """A clock that shows what a test sets."""

    def __init__(self) -> None:
        self.ms = 0

    def __call__(self) -> int:
        return self.ms


async def test_each_message_is_written_when_it_is_due() -> None:
    clock = Clock()
    async with scripted_channel(confirms=True) as (_, channel, peer):
        batch = [message(token) for token in "1234"]
        pace = Pace([-5, 10, 10, 11], clock)
        publishing = asyncio.create_task(channel.publish(batch, timeout=30, pace=pace))
        for clock.ms, count in ((0, 1), (10, 2)):
            await publishes(peer, count)
            await round_trip(channel, peer)  # no other message came
        other = await in_flight(channel, peer, "5")
        clock.ms = 11
        await publishes(peer, 1)
        peer.send(commands.Basic.Ack(4, False), 1)
        assert await other == [CONFIRMED]
        peer.send(commands.Basic.Nack(5, False), 1)
        peer.send(commands.Basic.Ack(3, True), 1)
        assert await publishing == [CONFIRMED, CONFIRMED, CONFIRMED, Nacked()]
        assert pace.written_ms == {0: 0, 1: 10, 2: 10, 3: 11}


async def test_a_channel_that_closes_before_all_messages_are_due_does_not_write_the_rest() -> None:
    clock = Clock()
    async with scripted_channel(confirms=True) as (_, channel, peer):
        batch = [message(token) for token in "12"]
        publishing = asyncio.create_task(channel.publish(batch, timeout=30, pace=Pace([0, 10], clock)))
        await publishes(peer, 1)
        peer.send(commands.Basic.Ack(1, False), 1)
        peer.send(commands.Channel.Close(404, "NOT_FOUND", 60, 40), 1)
        await peer.expect(commands.Channel.CloseOk)
        clock.ms = 10
        with pytest.raises(ChannelClosed) as lost:
            await publishing
        assert lost.value.answers == [CONFIRMED, None]


async def test_a_blocked_broker_gets_no_messages_that_become_due() -> None:
    clock = Clock()
    async with scripted_channel(confirms=True) as (connection, channel, peer):
        batch = [message(token) for token in "12"]
        pace = Pace([0, 10], clock)
        publishing = asyncio.create_task(channel.publish(batch, timeout=0.2, pace=pace))
        await publishes(peer, 1)
        peer.send(commands.Connection.Blocked("memory"))
        await until(lambda: connection.blocked)
        clock.ms = 10
        with pytest.raises(ConfirmTimeout) as late:
            await publishing
        assert late.value.answers == [None, None]
        assert pace.written_ms == {0: 0}
        await peer.expect(commands.Channel.Close)  # no publish came before it


async def test_missing_confirms_close_the_channel() -> None:
    async with scripted_channel(confirms=True) as (connection, channel, peer):
        other = asyncio.create_task(channel.publish([message("1")], timeout=30))
        late = asyncio.create_task(channel.publish([message("2"), message("3"), message("4")], timeout=0.5))
        await publishes(peer, 4)
        peer.send(commands.Basic.Ack(3, False), 1)
        with pytest.raises(ConfirmTimeout, match=r"3 confirms were missing after 0\.5 s") as missing:
            await late
        assert missing.value.answers == [None, CONFIRMED, None]
        with pytest.raises(ConfirmTimeout) as too:
            await other
        assert too.value.answers == [None]
        assert isinstance(channel.closed.result(), ConfirmTimeout)
        await peer.expect(commands.Channel.Close)
        # Until the broker agrees, the connection ignores frames of that channel and does not use its number again.
        peer.send(commands.Basic.Ack(3, True), 1)
        peer.send_raw(returned(b"unknown", b"x"))
        second = await another(connection, peer, 2)
        peer.send(commands.Channel.CloseOk(), 1)
        await round_trip(second, peer)
        await another(connection, peer, 1)


async def test_a_cancelled_publish_leaves_the_channel_usable() -> None:
    async with scripted_channel(confirms=True) as (_, channel, peer):
        given_up = await in_flight(channel, peer, "1", "2")
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        publishing = await in_flight(channel, peer, "3")
        peer.send_raw(returned(b"2", b"body"))
        peer.send(commands.Basic.Nack(2, True, False), 1)
        peer.send(commands.Basic.Ack(3, False), 1)
        assert await publishing == [CONFIRMED]


async def test_an_impossible_publish_writes_nothing() -> None:
    async with scripted_channel() as (_, channel, _):
        with pytest.raises(RuntimeError, match="confirm mode"):
            await channel.publish([message("1")], timeout=1)
    async with scripted_channel(confirms=True) as (_, channel, peer):
        large = message("2")._replace(properties=encode_headers(entry(b"h", long_string(bytes(131072)))))
        with pytest.raises(ValueError, match=f"message 1 of the batch: .* a frame carries {131072 - 20}"):
            await channel.publish([message("1"), large], timeout=1)
        with pytest.raises(ValueError, match="message 0 of the batch"):
            await channel.publish([message("1")._replace(routing_key=bytes(256))], timeout=1)
        with pytest.raises(ValueError, match="unique"):
            await channel.publish([message("1"), message("1")], timeout=1)
        publishing = await in_flight(channel, peer, "1")
        peer.send(commands.Basic.Ack(1, False), 1)
        assert await publishing == [CONFIRMED]


class Letters(list[Outgoing]):
    """A list that allows weak references."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def test_a_publish_that_closed_its_channel_frees_its_batch(no_collector: None) -> None:
    """The daemon collects reference cycles after a failure only, and an objection is an outcome, not a failure."""
    async with scripted_channel(confirms=True) as (_, channel, peer):
        letters = Letters([message("1")])
        seen = weakref.ref(letters)
        publishing = asyncio.create_task(channel.publish(letters, timeout=30))
        del letters
        await publishes(peer, 1)
        peer.send(commands.Channel.Close(404, "NOT_FOUND - no exchange", 60, 40), 1)
        await asyncio.wait([publishing])
        assert isinstance(publishing.exception(), ChannelClosed)
        del publishing
        assert seen() is None


# Channels.


async def test_a_channel_closed_by_the_broker() -> None:
    async with scripted_channel(confirms=True) as (connection, channel, peer):
        publishing = await in_flight(channel, peer, "1")
        asking = await asked(channel, peer)
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
        await another(connection, peer, 1)  # the number is free


async def test_both_sides_close_a_channel() -> None:
    async with scripted_channel() as (connection, channel, peer):
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
        assert connection.limits.frame_max == 8192
        for number in (1, 2):
            assert connection.free_channels == 3 - number
            channel = await another(connection, peer, number)
        with pytest.raises(NoFreeChannel, match="all 2"):
            await connection.channel()
        channel.abandon()
        assert connection.free_channels == 0, "until the broker agrees"


# Consumers.


async def test_the_first_delivery_directly_follows_the_answer() -> None:
    async with scripted_channel() as (_, channel, peer):
        seen: asyncio.Queue[Delivery] = asyncio.Queue()
        consuming = asyncio.create_task(channel.consume("q", seen.put_nowait, lambda: None))
        tag = (await peer.expect(commands.Basic.Consume)).consumer_tag
        peer.send(commands.Basic.ConsumeOk(tag), 1)
        peer.send(commands.Basic.Deliver(tag, 1, True, "e", "k"), 1)
        before = time.monotonic()
        peer.send_raw(content(b"\0\0", b"first"))
        assert await consuming == tag
        found = await seen.get()
        assert found == Delivery(1, True, b"e", b"k", b"\0\0", b"first", found.read_at)
        assert before <= found.read_at <= time.monotonic()
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


async def test_an_answer_to_a_cancelled_call_is_dropped() -> None:
    async with scripted_channel() as (_, channel, peer):
        asking = await asked(channel, peer)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        peer.send(commands.Basic.QosOk(), 1)
        await round_trip(channel, peer)
