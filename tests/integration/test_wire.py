"""The wire against a real broker: settling, closes, TLS with certificates of clients, a node that stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from pamqp import commands

from delayer.amqp.channel import Channel
from delayer.amqp.connection import Connection
from delayer.amqp.errors import AccessRefused, ChannelClosed, ConnectionLost
from delayer.amqp.properties import entry, long_string, splice
from delayer.broker.admin import Admin
from delayer.core.message import CONFIRMED, Delivery, Outgoing
from tests.support.rabbitmq import Certificates
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
    """The wire declares nothing by itself; a test may, as the broker layer does."""
    await channel.call(commands.Queue.Declare(queue=queue, durable=True), commands.Queue.DeclareOk)


async def publisher(connection: Connection) -> Channel:
    channel = await connection.channel()
    await channel.confirm_select()
    return channel


def message(token: str, key: str, body: bytes = b"body") -> Outgoing:
    own = entry(b"x-delayer-id", long_string(token.encode()))
    return Outgoing(b"", key.encode(), splice(b"\0\0", append=own), body, token.encode())


class Inbox:
    """What a consumer got, and a way to wait for it."""

    def __init__(self) -> None:
        self.deliveries: asyncio.Queue[Delivery] = asyncio.Queue()

    async def open(self, connection: Connection, queue: str) -> Channel:
        channel = await connection.channel()
        await channel.qos(0)
        await channel.consume(queue, self.deliveries.put_nowait, lambda: None)
        return channel

    async def take(self, count: int) -> list[Delivery]:
        return [await self.deliveries.get() for _ in range(count)]


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


@dataclass(frozen=True)
class Secured:
    """A broker that wants a certificate of its clients, and the files to meet it with."""

    broker: RabbitMQ
    files: Path

    def url(self, *parameters: str, host: str = "localhost") -> str:
        joined = "&".join(one.replace("=", f"={self.files}/") for one in parameters)
        return f"{self.broker.tls_url(host=host)}?{joined}"


CLIENT = ("certfile=client.pem", "keyfile=client.key")


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    files = tmp_path_factory.mktemp("certificates")
    ours, theirs = trustme.CA(), trustme.CA()
    ours.cert_pem.write_to_path(files / "ca.pem")
    for name, pair in {
        "server": ours.issue_cert("localhost"),
        "client": ours.issue_cert("client"),
        "stranger": theirs.issue_cert("client"),
    }.items():
        pair.cert_chain_pems[0].write_to_path(files / f"{name}.pem")
        pair.private_key_pem.write_to_path(files / f"{name}.key")
    certificates = Certificates(files / "ca.pem", files / "server.pem", files / "server.key", verify_client=True)
    with RabbitMQ(tls=certificates) as broker:
        yield Secured(broker, files)


async def test_tls(secured: Secured) -> None:
    async with connected(secured.url("cafile=ca.pem", *CLIENT)) as connection:
        channel = await publisher(connection)
        await declare(channel, "q")
        batch = [message("1", "q", bytes(1 << 20)), message("2", "q")]
        assert await channel.publish(batch, timeout=TIMEOUT) == [CONFIRMED] * 2


@pytest.mark.parametrize("client", [(), ("certfile=stranger.pem", "keyfile=stranger.key")])
async def test_a_client_that_cannot_prove_who_it_is(secured: Secured, client: tuple[str, ...]) -> None:
    with pytest.raises(ConnectionLost):
        await Connection.open(secured.url("cafile=ca.pem", *client), name="wire test")


async def test_the_url_can_say_whose_certificate_to_expect(secured: Secured) -> None:
    """One URL serves the hot path and the administration."""
    url = secured.url("cafile=ca.pem", *CLIENT, host="127.0.0.1") + "&server_name_indication=localhost"
    await (await Connection.open(url, name="wire test")).close()
    async with await Admin.connect(url) as admin:
        assert not await admin.queue_exists("nowhere")


async def test_plain_to_a_tls_port(secured: Secured) -> None:
    with pytest.raises(ConnectionLost):
        await Connection.open(f"amqp://127.0.0.1:{secured.broker.tls_port}", name="wire test")


@pytest.mark.deadline(120)
async def test_the_end_of_a_node() -> None:
    """A stopped node falls silent, an ended one says so."""
    with RabbitMQ() as broker:
        async with connected(broker.url()) as connection:
            silent = await Connection.open(broker.url(), name="wire test", heartbeat=1)
            broker.pause()
            await asyncio.wait({silent.closed})
            assert "nothing was heard" in silent.closed.result().text
            broker.resume()
            ending = asyncio.create_task(asyncio.to_thread(broker.stop))
            await asyncio.wait({connection.closed})
            assert connection.closed.result().code == 320
            await ending
