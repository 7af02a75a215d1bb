"""The wire against brokers of its own: TLS in all its ways to fail, alarms, a node that stops."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from delayer.amqp.connection import Connection
from delayer.amqp.errors import ConnectionLost
from delayer.core.message import CONFIRMED
from tests.integration.test_wire import connected, declare, message, publisher
from tests.support.rabbitmq import Certificates
from tests.support.servers import RabbitMQ

TIMEOUT = 30.0


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
    theirs.cert_pem.write_to_path(files / "wrong-ca.pem")
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


@pytest.mark.parametrize(
    ("parameters", "host"),
    [
        (("cafile=wrong-ca.pem", *CLIENT), "localhost"),
        (CLIENT, "localhost"),  # the system knows nothing of our authority: as good as self-signed
        (("cafile=ca.pem", *CLIENT), "127.0.0.1"),  # another host's certificate
    ],
)
async def test_a_broker_that_cannot_prove_who_it_is(secured: Secured, parameters: tuple[str, ...], host: str) -> None:
    with pytest.raises(ConnectionLost) as found:
        await Connection.open(secured.url(*parameters, host=host), name="wire test")
    assert isinstance(found.value.__cause__, ssl.SSLCertVerificationError)
    assert "guest:guest" not in str(found.value)


async def test_verification_turned_off(secured: Secured) -> None:
    url = secured.url(*CLIENT, host="127.0.0.1") + "&verify=verify_none"
    await (await Connection.open(url, name="wire test")).close()


@pytest.mark.parametrize("client", [(), ("certfile=stranger.pem", "keyfile=stranger.key")])
async def test_a_client_that_cannot_prove_who_it_is(secured: Secured, client: tuple[str, ...]) -> None:
    with pytest.raises(ConnectionLost):
        await Connection.open(secured.url("cafile=ca.pem", *client), name="wire test")


async def test_plain_to_a_tls_port(secured: Secured) -> None:
    with pytest.raises(ConnectionLost):
        await Connection.open(f"amqp://127.0.0.1:{secured.broker.tls_port}", name="wire test")


async def test_tls_to_a_plain_port(secured: Secured) -> None:
    with pytest.raises(ConnectionLost) as found:
        await Connection.open(f"amqps://localhost:{secured.broker.port}", name="wire test")
    assert isinstance(found.value.__cause__, OSError)


@pytest.mark.deadline(120)
async def test_an_alarm_and_the_end_of_the_node() -> None:
    """One broker for three: an alarm blocks and unblocks us, a stopped node falls silent, an ended one says so."""
    broker = await asyncio.to_thread(RabbitMQ().__enter__)
    try:
        async with connected(broker.url()) as connection:
            channel = await publisher(connection)
            await declare(channel, "q")
            await asyncio.to_thread(broker.ctl, "set_vm_memory_high_watermark", "0.0000001")
            publishing = asyncio.create_task(channel.publish([message("1", "q")], timeout=60))
            # The broker tells those who publish; the message waits at its door.
            done, _ = await asyncio.wait({publishing, asyncio.ensure_future(until_blocked(connection))},
                                         return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
            assert publishing not in done
            assert connection.blocked_reason == "low on memory"
            unblocked = asyncio.ensure_future(connection.unblocked)
            await asyncio.to_thread(broker.ctl, "set_vm_memory_high_watermark", "0.4")
            await unblocked
            assert await publishing == [CONFIRMED]

            silent = await Connection.open(broker.url(), name="wire test", heartbeat=1)
            broker.pause()
            await asyncio.wait({silent.closed})
            assert "nothing was heard" in silent.closed.result().text
            broker.resume()

            ending = asyncio.create_task(asyncio.to_thread(broker.stop))
            await asyncio.wait({connection.closed})
            assert connection.closed.result().code == 320
            await ending
    finally:
        await asyncio.to_thread(broker.close)


async def until_blocked(connection: Connection) -> None:
    """Wait for connection.blocked, by watching for the method."""
    blocked = asyncio.Event()
    on_method = connection.on_method

    def watch(frame: bytes) -> None:
        on_method(frame)
        if connection.blocked:
            blocked.set()

    connection.on_method = watch  # type: ignore[method-assign]
    if not connection.blocked:
        await blocked.wait()
