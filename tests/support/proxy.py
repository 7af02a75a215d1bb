"""A TCP proxy to stand between us and a server, for what networks do: cut, fall silent, and come back.

    async with Proxy(broker.port) as proxy:
        url = broker.url(vhost, port=proxy.port)
        ...
        proxy.cut()

Runs in the test's own event loop.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from tests.support import ports

_CHUNK = 64 * 1024

Listener = Callable[[bytes], None]
"""Hears what one side of a connection says, each piece before the other side does."""


def deaf(_: bytes) -> None:
    """Nobody listens."""


class Proxy:
    """Forwards connections to `port` on the loopback interface.

    cut()       reset every connection there is; new ones are accepted as before
    refuse()    and accept nobody any more, until accept()
    stall()     read nothing and answer nothing, on old and new connections, until resume(): a dead peer behind a live
                network. What was sent meanwhile goes through then
    stall(to_server=False)  the same for the server's answers alone: requests arrive and take effect, and nobody hears
    slow(...)   let every piece wait, or only so many bytes a second pass, in each direction of each connection, or in
                one; until resume()
    """

    def __init__(self, port: int) -> None:
        self.port = ports.reserve()
        self.accepted = 0
        self.listener: Callable[[], Listener] = lambda: deaf
        """Asked for a listener of each new connection."""
        self.overhears: Listener = deaf
        """Hears what clients say."""
        self.tls: ssl.SSLContext | None = None
        self._target = (ports.HOST, port)
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._cuts = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._to_server = _Way()
        self._to_client = _Way()

    async def __aenter__(self) -> Self:
        await self.accept()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()
        await asyncio.gather(*self._tasks)

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._links)

    async def accept(self) -> None:
        """Take connections (again)."""
        if self._server is None:
            self._server = await asyncio.start_server(self._admit, ports.HOST, self.port, ssl=self.tls)

    async def refuse(self) -> None:
        """Cut what there is, and be a port where nobody listens."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    def cut(self) -> None:
        """Reset every connection, on both sides, without a goodbye."""
        self._cuts += 1  # for those that are being made
        for link in list(self._links):
            link.cut()

    def lead_to(self, port: int) -> None:
        """Forward new connections to another server; those that there are end."""
        self._target = (self._target[0], port)
        self.cut()

    def stall(self, *, to_server: bool = True, to_client: bool = True) -> None:
        """Fall silent in these directions; whoever connects is accepted and hears nothing."""
        if to_server:
            self._to_server.flowing.clear()
        if to_client:
            self._to_client.flowing.clear()

    def slow(self, *, delay: float = 0.0, bytes_per_second: float = float("inf"), to_client: bool = True) -> None:
        """Forward each piece after ``delay`` seconds, and no more than so much, to the server, and to the client too
        unless told otherwise."""
        for way in [self._to_server] + [self._to_client] * to_client:
            way.delay, way.bytes_per_second = delay, bytes_per_second

    def resume(self) -> None:
        """Forward everything at once again."""
        self.slow()
        self._to_server.flowing.set()
        self._to_client.flowing.set()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        client = _End(reader, writer, self.overhears)
        cuts = self._cuts
        try:
            server = _End(*await asyncio.open_connection(*self._target), self.listener())
        except OSError:
            client.reset()
            return
        if cuts != self._cuts:
            client.reset()
            server.reset()
            return
        link = _Link(client, server, self._to_server, self._to_client)
        self._links.add(link)
        await link.forward()
        self._links.discard(link)


class _Way:
    """What holds for everything that goes in one direction."""

    def __init__(self) -> None:
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.delay = 0.0
        self.bytes_per_second = float("inf")

    def seconds_for(self, size: int) -> float:
        return self.delay + size / self.bytes_per_second


class _End:
    """One side of a connection, and who listens to what it says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener: Listener = deaf) -> None:
        self.reader = reader
        self.writer = writer
        self.listener = listener

    def reset(self) -> None:
        """Close with RST: the peer sees an error, not an orderly end."""
        if self.writer.is_closing():
            return
        linger_for_nothing = struct.pack("ii", 1, 0)
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_for_nothing)
        self.writer.transport.abort()


class _Link:
    """A client's connection and ours to the server on its behalf."""

    def __init__(self, client: _End, server: _End, to_server: _Way, to_client: _Way) -> None:
        self._client = client
        self._server = server
        self._directions = [
            asyncio.ensure_future(_pump(client, server, to_server)),
            asyncio.ensure_future(_pump(server, client, to_client)),
        ]

    def cut(self) -> None:
        self._client.reset()
        self._server.reset()
        for direction in self._directions:
            direction.cancel()

    async def forward(self) -> None:
        """Until one side ends, or the link is cut; then both end."""
        await asyncio.wait(self._directions, return_when=asyncio.FIRST_COMPLETED)
        for direction in self._directions:
            direction.cancel()
        await asyncio.wait(self._directions)
        self._client.writer.close()
        self._server.writer.close()


async def _pump(source: _End, sink: _End, way: _Way) -> None:
    """Bytes in one direction, while they may flow, up to the end of the source or an error on either side."""
    with suppress(OSError):
        while True:
            await way.flowing.wait()
            data = await source.reader.read(_CHUNK)
            if not data:
                return
            if seconds := way.seconds_for(len(data)):
                await asyncio.sleep(seconds)
            await way.flowing.wait()
            source.listener(data)
            sink.writer.write(data)
            await sink.writer.drain()
