"""The wire against a real broker: bodies, header fields, returns, nacks, closes."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import quote

import pytest
from pamqp import commands
from pamqp.common import FieldTable

from delayer.amqp.channel import Channel
from delayer.amqp.connection import Connection
from delayer.amqp.errors import AccessRefused, ChannelClosed
from delayer.amqp.properties import Properties, encode_headers, entry, long_string, splice
from delayer.core.message import CONFIRMED, NACKED, Delivery, Outcome, Outgoing, Returned
from tests.support.proxy import Proxy
from tests.support.raw import Props
from tests.support.servers import RabbitMQ
from tests.unit.amqp.tables import EVERY_TYPE, nested

TIMEOUT = 30.0


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connection]:
    connection = await Connection.open(url, name="wire test")
    try:
        yield connection
    finally:
        await connection.close()


async def declare(channel: Channel, queue: str, arguments: FieldTable | None = None) -> None:
    """The wire declares nothing by itself; a test may, as the broker layer does."""
    wish = commands.Queue.Declare(queue=queue, durable=True, arguments=arguments or {})
    await channel.call(wish, commands.Queue.DeclareOk)


async def publisher(connection: Connection) -> Channel:
    channel = await connection.channel()
    await channel.confirm_select()
    return channel


def message(token: str, key: str, body: bytes = b"body", properties: bytes | None = None) -> Outgoing:
    own = entry(b"x-delayer-id", long_string(token.encode()))
    return Outgoing(b"", key.encode(), splice(properties or b"\0\0", append=own), body, token.encode())


class Inbox:
    """What a consumer got, and a way to wait for it."""

    def __init__(self) -> None:
        self.deliveries: asyncio.Queue[Delivery] = asyncio.Queue()
        self.cancelled = asyncio.Event()

    async def open(self, connection: Connection, queue: str) -> Channel:
        channel = await connection.channel()
        await channel.qos(0)
        await channel.consume(queue, self.deliveries.put_nowait, self.cancelled.set)
        return channel

    async def take(self, count: int) -> list[Delivery]:
        return [await self.deliveries.get() for _ in range(count)]


FRAME_MAX = 131072
SIZES = [0, 1, FRAME_MAX - 9, FRAME_MAX - 8, FRAME_MAX - 7, 3 * FRAME_MAX, 16 << 20]


async def test_bodies_of_every_size(vhost: str) -> None:
    async with connected(vhost) as connection:
        assert connection.frame_max == FRAME_MAX
        channel = await publisher(connection)
        await declare(channel, "q")
        bodies = [random.Random(size).randbytes(size) for size in SIZES]
        batch = [message(f"{at}", "q", body) for at, body in enumerate(bodies)]
        assert await channel.publish(batch, timeout=TIMEOUT) == [CONFIRMED] * len(batch)
        inbox = Inbox()
        consumer = await inbox.open(connection, "q")
        found = await inbox.take(len(batch))
        assert [one.body for one in found] == bodies
        assert [(one.exchange, one.routing_key, one.redelivered) for one in found] == [(b"", b"q", False)] * len(batch)
        consumer.ack(found[-1].tag, multiple=True)


def as_handed_over(properties: bytes, rabbitmq: RabbitMQ) -> bytes:
    """As this broker hands them over: see RabbitMQ.sorts_headers."""
    return Props.decode(properties).sorted_if(rabbitmq.sorts_headers).encode()


async def test_every_field_type_survives(rabbitmq: RabbitMQ, vhost: str) -> None:
    """Property bytes come back as they went out: type bytes, widths, doubles, bytes that are no UTF-8, deep nesting."""
    everything = commands.Basic.Properties(
        content_type="text/plain", content_encoding="gzip", delivery_mode=1, priority=7, correlation_id="c",
        reply_to="r", expiration="600000", message_id="m", message_type="t", user_id="guest", app_id="a",
    ).marshal()  # fmt: skip
    # Erlang has no infinity: no broker that is RabbitMQ ever hands us one, it breaks the connection of its publisher.
    carried = [kind.encode() + raw for kind, raw, value in EVERY_TYPE if value != math.inf]
    together = b"".join(entry(b"h%d" % at, one) for at, one in enumerate(carried))
    tables = [entry(b"h", one) for one in carried]
    tables += [b"", together, entry(b"deep", nested(120)), entry(b"a", b"V") + entry(b"a", b"V")]
    sent = [message(f"{at}", "q", b"", encode_headers(table)) for at, table in enumerate(tables)]
    sent += [message("full", "q", b"", splice(everything, append=together))]
    sent += [
        message("bare", "q", b"", b"\0\0"),
        message("time", "q", b"", b"\0\x40" + bytes.fromhex("00000002540be400")),
    ]
    async with connected(vhost) as connection:
        channel = await publisher(connection)
        await declare(channel, "q")
        assert await channel.publish(sent, timeout=TIMEOUT) == [CONFIRMED] * len(sent)
        inbox = Inbox()
        await inbox.open(connection, "q")
        for one, out in zip(await inbox.take(len(sent)), sent, strict=True):
            expected = as_handed_over(out.properties, rabbitmq)
            assert one.properties == expected
            assert Properties.parse(one.properties).headers_items() == Properties.parse(expected).headers_items()


@pytest.mark.parametrize("message_id", [None, b"the same for all"])
async def test_returns_find_their_message(vhost: str, message_id: bytes | None) -> None:
    """2,000 messages in several publishes at a time, two of three routable, under one message id or none."""
    own = b"\0\0" if message_id is None else b"\0\x80" + bytes((len(message_id),)) + message_id
    routable = [at % 3 != 1 for at in range(2000)]
    batch = [message(f"{at}", "q" if to else "nowhere", b"x", own) for at, to in enumerate(routable)]
    async with connected(vhost) as connection:
        channel = await publisher(connection)
        await declare(channel, "q")
        parts = [batch[at : at + 250] for at in range(0, len(batch), 250)]
        outcomes = await asyncio.gather(*(channel.publish(part, timeout=TIMEOUT) for part in parts))
        expected: list[Outcome] = [CONFIRMED if to else Returned(312, "NO_ROUTE") for to in routable]
        assert [one for part in outcomes for one in part] == expected
        inbox = Inbox()
        await inbox.open(connection, "q")
        found = await inbox.take(sum(routable))
        assert [one.properties for one in found] == [
            out.properties for out, to in zip(batch, routable, strict=True) if to
        ]


async def test_nacks(vhost: str) -> None:
    async with connected(vhost) as connection:
        channel = await publisher(connection)
        await declare(channel, "full", {"x-max-length": 1, "x-overflow": "reject-publish"})
        await declare(channel, "q")
        assert await channel.publish([message("first", "full")], timeout=TIMEOUT) == [CONFIRMED]
        batch = [message(f"{at}", ["full", "q", "nowhere"][at % 3]) for at in range(30)]
        expected: list[Outcome] = [NACKED, CONFIRMED, Returned(312, "NO_ROUTE")]
        assert await channel.publish(batch, timeout=TIMEOUT) == expected * 10


async def test_a_missing_exchange_closes_one_channel(vhost: str) -> None:
    async with connected(vhost) as connection:
        channel, other = await publisher(connection), await publisher(connection)
        await declare(other, "q")
        lost = message("1", "q")._replace(exchange=b"missing")
        with pytest.raises(ChannelClosed, match="no exchange 'missing'") as found:
            await channel.publish([message("0", "q"), lost, message("2", "q")], timeout=TIMEOUT)
        assert found.value.code == 404
        assert channel.closed.result().code == 404
        assert await other.publish([message("3", "q")], timeout=TIMEOUT) == [CONFIRMED]
        again = await publisher(connection)
        assert again.number == channel.number
        assert await again.publish([message("4", "q")], timeout=TIMEOUT) == [CONFIRMED]


async def test_a_long_name_that_is_not_ascii_in_the_reason(rabbitmq: RabbitMQ, vhost: str) -> None:
    """The broker clips its text by bytes; the connection survives that. Where the broker itself does not, names are
    kept short enough not to be clipped: a header may name no exchange of more than 127 bytes."""
    most = 63 if rabbitmq.falls_over_clipped_names else 126
    async with connected(vhost) as connection:
        channel, other = await publisher(connection), await publisher(connection)
        for extra in range(2):
            name = "a" * extra + "ü" * most
            with pytest.raises(ChannelClosed, match="404 NOT_FOUND"):
                await channel.publish([message("1", "q")._replace(exchange=name.encode())], timeout=TIMEOUT)
            channel = await publisher(connection)
        await declare(other, "q")


async def test_settling(vhost: str) -> None:
    async with connected(vhost) as connection:
        channel = await publisher(connection)
        await declare(channel, "q")
        await channel.publish([message(f"{at}", "q", b"%d" % at) for at in range(6)], timeout=TIMEOUT)
        inbox = Inbox()
        consumer = await inbox.open(connection, "q")
        found = await inbox.take(6)
        consumer.ack(found[1].tag, multiple=True)
        consumer.nack(found[2].tag, requeue=False)
        consumer.nack(found[3].tag)
        back = await inbox.deliveries.get()
        assert (back.body, back.redelivered) == (b"3", True)
        await consumer.close()
        again = await Inbox().open(connection, "q")
        inbox = Inbox()
        await again.close()
        await inbox.open(connection, "q")
        assert [one.body for one in await inbox.take(3)] == [b"3", b"4", b"5"]


async def test_cancelling(vhost: str) -> None:
    async with connected(vhost) as connection:
        channel = await publisher(connection)
        await declare(channel, "q")
        await channel.publish([message("1", "q")], timeout=TIMEOUT)
        seen: asyncio.Queue[Delivery] = asyncio.Queue()
        consumer = await connection.channel()
        tag = await consumer.consume("q", seen.put_nowait, lambda: None)
        delivery = await seen.get()
        await consumer.cancel(tag)
        consumer.ack(delivery.tag)
        await channel.publish([message("2", "q")], timeout=TIMEOUT)
        inbox = Inbox()
        await inbox.open(connection, "q")
        assert Properties.parse((await inbox.take(1))[0].properties).get(b"x-delayer-id").content == b"2"  # type: ignore[union-attr]
        assert seen.empty()


async def test_a_queue_deleted_under_its_consumer(rabbitmq: RabbitMQ, vhost: str) -> None:
    async with connected(vhost) as connection:
        at = f"/api/queues/{vhost.rpartition('/')[2]}/{quote('grün & q')}"
        await asyncio.to_thread(rabbitmq.api, "PUT", at, {"durable": True})
        inbox = Inbox()
        consumer = await inbox.open(connection, "grün & q")
        await asyncio.to_thread(rabbitmq.api, "DELETE", at)
        await inbox.cancelled.wait()
        assert not consumer.closed.done()
        await consumer.qos(1)


async def test_wrong_password(rabbitmq: RabbitMQ) -> None:
    with pytest.raises(AccessRefused, match="403 ACCESS_REFUSED") as found:
        await Connection.open(rabbitmq.url(user="guest:wrong"), name="wire test")
    assert "wrong" not in str(found.value)


async def test_missing_vhost(rabbitmq: RabbitMQ) -> None:
    with pytest.raises(AccessRefused, match="530 NOT_ALLOWED - vhost missing not found"):
        await Connection.open(rabbitmq.url("missing"), name="wire test")


async def test_forbidden_vhost(rabbitmq: RabbitMQ) -> None:
    theirs, other = rabbitmq.add_vhost(), rabbitmq.add_vhost()
    rabbitmq.add_user("outsider", "pw", vhost=other)
    with pytest.raises(AccessRefused, match="530 NOT_ALLOWED"):
        await Connection.open(rabbitmq.url(theirs, user="outsider:pw"), name="wire test")
    for name in (theirs, other):
        rabbitmq.drop_vhost(name)


async def test_forbidden_write(rabbitmq: RabbitMQ) -> None:
    theirs = rabbitmq.add_vhost()
    rabbitmq.add_user("reader", "pw", vhost=theirs, read=".*")
    async with connected(rabbitmq.url(theirs, user="reader:pw")) as connection:
        channel = await publisher(connection)
        with pytest.raises(ChannelClosed, match="403 ACCESS_REFUSED"):
            await channel.publish([message("1", "q")._replace(exchange=b"amq.topic")], timeout=TIMEOUT)
    rabbitmq.drop_vhost(theirs)


async def test_backpressure_by_not_reading(vhost: str) -> None:
    """While reading is paused nothing comes; afterwards everything does, once and in order."""
    async with connected(vhost) as connection, connected(vhost) as sender:
        channel = await publisher(sender)
        await declare(channel, "q")
        total = 2000
        await channel.publish([message(f"{at}", "q", bytes(10_000)) for at in range(total)], timeout=TIMEOUT)
        seen: asyncio.Queue[Delivery] = asyncio.Queue()
        held: list[Delivery] = []

        def on_delivery(delivery: Delivery) -> None:
            held.append(delivery)
            seen.put_nowait(delivery)
            if len(held) >= 50:
                connection.pause_reading()

        consumer = await connection.channel()
        await consumer.consume("q", on_delivery, lambda: None)
        most = 0
        for number in range(total):
            delivery = await seen.get()
            assert delivery.tag == number + 1
            most = max(most, len(held))
            if seen.empty():
                held.clear()
                connection.resume_reading()
        assert most < 200  # 50, and what one read of the socket still had


def in_doubt(outcomes: Sequence[object]) -> bool:
    return all(isinstance(one, BaseException) for one in outcomes)


async def test_a_cut_in_the_middle_of_publishing(rabbitmq: RabbitMQ, vhost: str) -> None:
    async with Proxy(rabbitmq.port) as proxy:
        url = vhost.replace(f":{rabbitmq.port}/", f":{proxy.port}/")
        connection = await Connection.open(url, name="wire test")
        channel = await publisher(connection)
        await declare(channel, "q")
        proxy.stall(to_server=False)
        publishing = [
            asyncio.create_task(channel.publish([message(f"{part}-{at}", "q") for at in range(100)], timeout=TIMEOUT))
            for part in range(3)
        ]
        async with connected(vhost) as other:
            inbox = Inbox()
            await inbox.open(other, "q")
            await inbox.take(300)  # all of it took effect, and nobody was told
            proxy.cut()
            assert in_doubt(await asyncio.gather(*publishing, return_exceptions=True))
        await asyncio.wait({connection.closed, channel.closed})
        await connection.close()
        proxy.resume()


async def test_a_stalled_network_is_noticed(rabbitmq: RabbitMQ, vhost: str) -> None:
    async with Proxy(rabbitmq.port) as proxy:
        url = vhost.replace(f":{rabbitmq.port}/", f":{proxy.port}/")
        connection = await Connection.open(url, name="wire test", heartbeat=1)
        channel = await publisher(connection)
        await declare(channel, "q")
        proxy.stall()
        publishing = asyncio.create_task(channel.publish([message("1", "q")], timeout=TIMEOUT))
        await asyncio.wait({connection.closed})
        assert "nothing was heard from the broker for 2" in connection.closed.result().text
        assert in_doubt(await asyncio.gather(publishing, return_exceptions=True))
        await connection.close()
        proxy.resume()
