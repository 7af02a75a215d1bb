"""A broker that follows the test's script: an in-process server on the loopback interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pamqp import body, commands, frame, header, heartbeat
from pamqp.base import Frame

from delayer.amqp.address import Address
from delayer.amqp.channel import Channel
from delayer.amqp.connection import Connection
from delayer.amqp.properties import encode_headers, entry, long_string
from delayer.amqp.values import Outgoing
from tests.unit.amqp.recorded import TOKEN_HEADER

HOST = "127.0.0.1"
One = TypeVar("One", bound=Frame | body.ContentBody | header.ContentHeader | heartbeat.Heartbeat)


class Peer:
    """The broker's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, method: Frame, channel: int = 0) -> None:
        self.writer.write(frame.marshal(method, channel))

    def send_raw(self, data: bytes) -> None:
        self.writer.write(data)

    async def next_frame(self) -> tuple[int, object]:
        head = await self.reader.readexactly(7)
        rest = await self.reader.readexactly(int.from_bytes(head[3:], "big") + 1)
        _, channel, found = frame.unmarshal(head + rest)
        return channel, found

    async def expect(self, kind: type[One]) -> One:
        """The next frame after any heartbeats; it must be of that kind."""
        while True:
            _, found = await self.next_frame()
            if isinstance(found, heartbeat.Heartbeat) and kind is not heartbeat.Heartbeat:
                continue
            assert isinstance(found, kind), f"expected {kind.__name__}, found {found}"
            return found

    async def log_in(self, tune: commands.Connection.Tune | None = None) -> commands.Connection.StartOk:
        """The broker's half of the handshake."""
        assert await self.reader.readexactly(8) == b"AMQP\0\0\x09\1"
        self.send(commands.Connection.Start(0, 9, {"product": "script"}, "PLAIN EXTERNAL", "en_US"))
        hello = await self.expect(commands.Connection.StartOk)
        self.send(tune or commands.Connection.Tune(2047, 131072, 0))
        await self.expect(commands.Connection.TuneOk)
        await self.expect(commands.Connection.Open)
        self.send(commands.Connection.OpenOk())
        return hello

    async def open_channel(self, number: int = 1, *, confirms: bool = False) -> None:
        await self.expect(commands.Channel.Open)
        self.send(commands.Channel.OpenOk(), number)
        if confirms:
            await self.expect(commands.Confirm.Select)
            self.send(commands.Confirm.SelectOk(), number)

    async def hung_up(self) -> None:
        """Wait for the other side to close the socket."""
        try:
            while await self.reader.read(1 << 16):
                pass
        except ConnectionError:
            pass


class Script:
    """A listening port: ``address`` to connect to, ``peer()`` for the broker's end of the next connection."""

    def __init__(self, port: int, peers: asyncio.Queue[Peer]) -> None:
        self.port = port
        self._peers = peers

    @property
    def address(self) -> Address:
        return Address.parse(f"amqp://{HOST}:{self.port}")

    async def peer(self) -> Peer:
        return await self._peers.get()

    async def opening(self, **options: Any) -> tuple[asyncio.Task[Connection], Peer]:
        """A connection being opened, and the broker's end of it."""
        opening = asyncio.create_task(Connection.open(self.address, **{"name": "test"} | options))
        return opening, await self.peer()

    async def greeted(self) -> tuple[asyncio.Task[Connection], Peer]:
        """Like opening(), after the client's first bytes."""
        opening, peer = await self.opening()
        await peer.reader.readexactly(8)
        return opening, peer

    async def connect(
        self, *, heartbeat: float = 0.0, tune: commands.Connection.Tune | None = None
    ) -> tuple[Connection, Peer]:
        """Both ends of a logged-in connection."""
        opening, peer = await self.opening(heartbeat=heartbeat)
        await peer.log_in(tune)
        return await opening, peer

    async def channel(self, *, confirms: bool = False) -> tuple[Connection, Channel, Peer]:
        """Like connect(), with channel 1 open."""
        connection, peer = await self.connect()
        opening = (
            connection.channel(token_header=TOKEN_HEADER if confirms else None),
            peer.open_channel(confirms=confirms),
        )
        channel, _ = await asyncio.gather(*opening)
        return connection, channel, peer


@asynccontextmanager
async def scripted() -> AsyncIterator[Script]:
    peers: asyncio.Queue[Peer] = asyncio.Queue()
    writers: list[asyncio.StreamWriter] = []

    def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        peers.put_nowait(Peer(reader, writer))

    server = await asyncio.start_server(admit, HOST, 0, limit=1 << 26)
    try:
        yield Script(server.sockets[0].getsockname()[1], peers)
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()


@asynccontextmanager
async def scripted_channel(*, confirms: bool = False) -> AsyncIterator[tuple[Connection, Channel, Peer]]:
    """A connection with one channel, and the broker's end of it."""
    async with scripted() as script:
        yield await script.channel(confirms=confirms)


def message(token: str, payload: bytes = b"body") -> Outgoing:
    properties = encode_headers(entry(TOKEN_HEADER, long_string(token.encode())))
    return Outgoing(b"", b"q", properties, payload, token.encode())


async def publishes(peer: Peer, count: int) -> None:
    """Wait until so many whole publishes (of one body frame each) have arrived."""
    for _ in range(count):
        await peer.expect(commands.Basic.Publish)
        await peer.expect(header.ContentHeader)
        await peer.expect(body.ContentBody)


async def in_flight(channel: Channel, peer: Peer, *tokens: str, timeout: float = 30) -> asyncio.Task[Any]:
    """A publish that arrived and is not confirmed."""
    publishing = asyncio.create_task(channel.publish([message(token) for token in tokens], timeout=timeout))
    await publishes(peer, len(tokens))
    return publishing


async def asked(channel: Channel, peer: Peer) -> asyncio.Task[None]:
    """A call that arrived and is not answered."""
    asking = asyncio.create_task(channel.qos(1))
    await peer.expect(commands.Basic.Qos)
    return asking


async def round_trip(channel: Channel, peer: Peer) -> None:
    """Wait until the client has read every frame that the peer sent before."""
    asking = await asked(channel, peer)
    peer.send(commands.Basic.QosOk(), channel.number)
    await asking


async def another(connection: Connection, peer: Peer, number: int) -> Channel:
    """One more channel, which gets this number."""
    channel, _ = await asyncio.gather(connection.channel(), peer.open_channel(number))
    assert channel.number == number
    return channel


async def consume(channel: Channel, peer: Peer, on_delivery: Any, on_cancelled: Any = lambda: None) -> None:
    consuming = asyncio.create_task(channel.consume("q", on_delivery, on_cancelled))
    wish = await peer.expect(commands.Basic.Consume)
    peer.send(commands.Basic.ConsumeOk(wish.consumer_tag), 1)
    assert await consuming == wish.consumer_tag


async def say_goodbye(connection: Connection, peer: Peer) -> None:
    closing = asyncio.create_task(connection.close())
    while not isinstance((await peer.next_frame())[1], commands.Connection.Close):
        pass
    peer.send(commands.Connection.CloseOk())
    await closing
