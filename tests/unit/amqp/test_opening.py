"""The login of a connection, and its failures: every case against a scripted broker."""

from __future__ import annotations

import asyncio

import pytest
from pamqp import commands

from delayer.amqp.address import Address
from delayer.amqp.connection import Connection
from delayer.amqp.errors import AccessRefused, ConnectionLost, ProtocolError
from delayer.amqp.handshake import ConnectionLimits, agree, tune_ok
from tests.unit.amqp.scripted import say_goodbye, scripted


async def test_certificates_instead_of_a_password() -> None:
    async with scripted() as script:
        address = Address.parse(f"amqp://127.0.0.1:{script.port}?auth_mechanism=external")
        opening = asyncio.create_task(Connection.open(address, name="test"))
        peer = await script.peer()
        hello = await peer.log_in()
        assert (hello.mechanism, hello.response) == ("EXTERNAL", "")
        await say_goodbye(await opening, peer)


async def test_the_client_properties() -> None:
    async with scripted() as script:
        opening, peer = await script.opening(name="delayer@host", product="delayer", version="7.1", heartbeat=7)
        hello = await peer.log_in()
        connection = await opening
        assert hello.client_properties is not None
        assert hello.client_properties["product"] == "delayer"
        assert hello.client_properties["connection_name"] == "delayer@host"
        assert hello.client_properties["version"] == "7.1"
        assert hello.client_properties["capabilities"] == dict.fromkeys(
            ("publisher_confirms", "consumer_cancel_notify", "connection.blocked", "basic.nack",
             "authentication_failure_close"), True,
        )  # fmt: skip
        assert (hello.mechanism, hello.response) == ("PLAIN", "\0guest\0guest")
        assert connection.limits.frame_max == 131072
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
async def test_a_refused_login(after: str, close: commands.Connection.Close, expected: type[ConnectionLost]) -> None:
    async with scripted() as script:
        opening, peer = await script.greeted()
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
        opening, peer = await script.greeted()
        peer.send(commands.Connection.Start(0, 9, {}, "EXTERNAL AMQPLAIN", "en_US"))
        with pytest.raises(AccessRefused, match="offers EXTERNAL AMQPLAIN, expected PLAIN"):
            await opening
        await peer.hung_up()


@pytest.mark.parametrize("greeting", [b"AMQP\0\1\0\0", b"SSH-2.0-OpenSSH_9.2\r\n", b"\x15\x03\x01\0\x02\x02\x0a\0"])
async def test_no_amqp_server(greeting: bytes) -> None:
    async with scripted() as script:
        opening, peer = await script.opening()
        peer.send_raw(greeting)
        with pytest.raises(ProtocolError):
            await opening
        await peer.hung_up()


async def test_a_silent_server_times_out() -> None:
    async with scripted() as script:
        with pytest.raises(ConnectionLost, match=r"within 0\.05 s") as found:
            await Connection.open(script.address, name="test", timeout=0.05)
        assert isinstance(found.value.__cause__, TimeoutError)
        await (await script.peer()).hung_up()


async def test_a_server_that_hangs_up() -> None:
    async with scripted() as script:
        opening, peer = await script.greeted()
        peer.writer.close()
        with pytest.raises(ConnectionLost, match="hung up"):
            await opening


async def test_a_cancelled_open_leaves_no_socket() -> None:
    async with scripted() as script:
        opening, peer = await script.greeted()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await peer.hung_up()


@pytest.mark.parametrize(
    ("loss", "objects"),
    [
        (ConnectionLost(0, "the broker hung up"), False),
        (ConnectionLost(320, "CONNECTION_FORCED - shutdown"), False),
        (ConnectionLost(501, "FRAME_ERROR"), True),
        (ConnectionLost(541, "INTERNAL_ERROR"), True),
        (ConnectionLost(530, "NOT_ALLOWED - number of channels opened has reached the maximum"), False),
        (AccessRefused(530, "NOT_ALLOWED - vhost missing not found"), False),
        (ProtocolError(505, "ours"), False),
    ],
)
def test_some_close_codes_blame_a_message(loss: ConnectionLost, objects: bool) -> None:
    assert loss.caused_by_client is objects


@pytest.mark.parametrize(
    ("offered", "ours", "agreed"),
    [
        ((2047, 131072, 60), 20.0, (2047, 131072, 20.0)), ((0, 0, 60), 20.0, (65535, 131072, 20.0)),
        ((5, 8192, 5), 20.0, (5, 8192, 5.0)), ((5, 4096, 0), 20.0, (5, 4096, 20.0)),
        ((5, 4096, 60), 0.0, (5, 4096, 0.0)), ((5, 4096, 0), 0.0, (5, 4096, 0.0)), ((5, 10, 0), 0.0, (5, 4096, 0.0)),
    ],
)  # fmt: skip
def test_limits(offered: tuple[int, int, int], ours: float, agreed: tuple[int, int, float]) -> None:
    limits = agree(commands.Connection.Tune(*offered), ours)
    assert limits == agreed


def test_a_heartbeat_is_rounded_up_to_a_whole_second() -> None:
    assert tune_ok(ConnectionLimits(1, 4096, 0.2)).heartbeat == 1
    assert tune_ok(ConnectionLimits(1, 4096, 0.0)).heartbeat == 0
