"""The AMQP layer against a real broker: refused logins, and reasons that the broker clips."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from pamqp import commands

from delayer.amqp.channel import Channel
from delayer.amqp.connection import Connection
from delayer.amqp.errors import AccessRefused, ChannelClosed
from delayer.amqp.properties import entry, long_string, splice
from delayer.amqp.values import Delivery, Outgoing
from delayer.core.marks import ID
from tests.support.servers import RabbitMQ

TIMEOUT = 30.0


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connection]:
    connection = await Connection.open(url, name="wire test")
    try:
        yield connection
    finally:
        await connection.close()


async def declare(channel: Channel, queue: str) -> None:
    """The AMQP layer never declares anything itself; this declares like the broker layer."""
    await channel.call(commands.Queue.Declare(queue=queue, durable=True), commands.Queue.DeclareOk)


def message(token: str, key: str, body: bytes = b"body") -> Outgoing:
    own = entry(b"x-delayer-id", long_string(token.encode()))
    return Outgoing(b"", key.encode(), splice(b"\0\0", append=own), body, token.encode())


async def test_a_long_name_that_is_not_ascii_in_the_reason(rabbitmq: RabbitMQ, vhost: str) -> None:
    """The broker truncates its message by bytes, and the connection survives that. For brokers that fail at it, a
    header must not name an exchange longer than 127 bytes; shorter names are not truncated."""
    most = 63 if rabbitmq.falls_over_clipped_names else 126
    async with connected(vhost) as connection:
        channel, other = [await connection.channel(token_header=ID) for _ in range(2)]
        for extra in range(2):
            name = "a" * extra + "ü" * most
            with pytest.raises(ChannelClosed, match="404 NOT_FOUND"):
                await channel.publish([message("1", "q")._replace(exchange=name.encode())], timeout=TIMEOUT)
            channel = await connection.channel(token_header=ID)
        await declare(other, "q")


async def test_headers_longer_than_a_frame_are_read(vhost: str) -> None:
    """The broker adds x-death and ignores the frame size. The next delivery also arrives."""
    to_grave = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "grave", "x-message-ttl": 0}
    came: asyncio.Queue[Delivery] = asyncio.Queue()
    async with connected(vhost) as connection:
        channel, consumer = await connection.channel(token_header=ID), await connection.channel()
        await declare(channel, "grave")
        await channel.call(commands.Queue.Declare(queue="dying", arguments=to_grave), commands.Queue.DeclareOk)
        large = entry(b"large", long_string(b"v" * (connection.limits.frame_max - 200)))
        one = message("1", "dying")
        await channel.publish([one._replace(properties=splice(one.properties, append=large))], timeout=TIMEOUT)
        await channel.publish([message("2", "grave")], timeout=TIMEOUT)
        await consumer.consume("grave", came.put_nowait, lambda: None)
        first, second = [await asyncio.wait_for(came.get(), TIMEOUT) for _ in range(2)]
        if len(first.properties) < len(second.properties):
            first, second = second, first
        assert len(first.properties) > connection.limits.frame_max
        assert b"x-death" in first.properties and (first.body, second.body) == (b"body", b"body")


@pytest.mark.parametrize(
    ("entered", "user", "reason"),
    [
        ("/", "guest:wr0ng", "403 ACCESS_REFUSED"),
        ("missing", "guest:guest", "530 NOT_ALLOWED - vhost missing not found"),
        ("/", "outsider:pw", "530 NOT_ALLOWED"),
    ],
    ids=["wrong password", "missing vhost", "forbidden vhost"],
)
async def test_a_refused_login(rabbitmq: RabbitMQ, vhost_name: str, entered: str, user: str, reason: str) -> None:
    rabbitmq.add_user("outsider", "pw", vhost=vhost_name)
    with pytest.raises(AccessRefused, match=reason) as found:
        await Connection.open(rabbitmq.url(entered, user=user), name="wire test")
    assert "wr0ng" not in str(found.value)
