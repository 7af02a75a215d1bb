"""A TCP proxy between us and a server that simulates network faults: cut connections, silence, delays.

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
"""Receives the bytes of one side of a connection, each piece before the other side does."""


def deaf(_: bytes) -> None:
    """Ignore the bytes."""


class Proxy:
    """Forwards connections to `port` on the loopback interface.

    With `more` ports it is the load balancer of a cluster. A connection goes to the server that accepted the last one,
    or to the next server that accepts it. A server that never answered on a connection moves to the end of the list.

    cut()       reset every connection; accept new ones as before
    refuse()    cut(), and accept no connection until accept()
    stall()     read nothing and answer nothing, on old and new connections, until resume(): a dead peer behind a live
                network. resume() forwards the bytes sent since
    stall(to_server=False)  the same for the server's answers alone: requests arrive and take effect without an answer
    slow(...)   delay every piece, or limit the bytes a second, in one or both directions of each connection, until
                resume()
    """

    def __init__(self, port: int, *more: int) -> None:
        self.port = ports.reserve()
        self.accepted = 0
        self.listener: Callable[[], Listener] = lambda: deaf
        """Called for each new connection; returns the listener of its server side."""
        self.overhears: Listener = deaf
        """The listener of all client sides."""
        self.tls: ssl.SSLContext | None = None
        self._targets = [port, *more]
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
        """The number of open connections."""
        return len(self._links)

    @property
    def target(self) -> int:
        """The port of the server that the last connection goes to."""
        return self._targets[0]

    async def accept(self) -> None:
        """Accept connections (again)."""
        if self._server is None:
            self._server = await asyncio.start_server(self._admit, ports.HOST, self.port, ssl=self.tls)

    async def refuse(self) -> None:
        """Cut every connection, and stop listening on the port."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    def cut(self) -> None:
        """Reset every connection, on both sides, without a goodbye."""
        self._cuts += 1  # for connections that are being made
        for link in list(self._links):
            link.cut()

    def lead_to(self, port: int) -> None:
        """Forward new connections to another server; cut the open ones."""
        self._targets = [port]
        self.cut()

    def stall(self, *, to_server: bool = True, to_client: bool = True) -> None:
        """Fall silent in these directions; accept new connections, and stay silent there too."""
        if to_server:
            self._to_server.flowing.clear()
        if to_client:
            self._to_client.flowing.clear()

    def slow(self, *, delay: float = 0.0, bytes_per_second: float = float("inf"), to_client: bool = True) -> None:
        """Forward each piece after ``delay`` seconds, and at most ``bytes_per_second``. This applies to the direction
        to the server, and by default also to the other."""
        for way in [self._to_server] + [self._to_client] * to_client:
            way.delay, way.bytes_per_second = delay, bytes_per_second

    def resume(self) -> None:
        """Forward everything immediately again."""
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
        target, server = await self._connect()
        if server is None:
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
        if not server.heard and self._targets[0] == target:
            self._targets.append(self._targets.pop(0))

    async def _connect(self) -> tuple[int, _End | None]:
        """A connection to the first server that accepts one, which then also comes first for the next connection."""
        for target in list(self._targets):
            with suppress(OSError):
                server = _End(*await asyncio.open_connection(ports.HOST, target), self.listener())
                self._targets.sort(key=lambda port: port != target)  # stable: the rest keep their order
                return target, server
        return 0, None


class _Way:
    """The state of one direction: flowing or stalled, its delay and its rate."""

    def __init__(self) -> None:
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.delay = 0.0
        self.bytes_per_second = float("inf")

    def seconds_for(self, size: int) -> float:
        return self.delay + size / self.bytes_per_second


class _End:
    """One side of a connection, and the listener to its bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener: Listener = deaf) -> None:
        self.reader = reader
        self.writer = writer
        self.listener = listener
        self.heard = False
        """Whether a byte came from this side."""

    def reset(self) -> None:
        """Close with RST, so the peer sees an error, not a clean close."""
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
        """Forward until one side closes, or the link is cut; then close both sides."""
        await asyncio.wait(self._directions, return_when=asyncio.FIRST_COMPLETED)
        for direction in self._directions:
            direction.cancel()
        await asyncio.wait(self._directions)
        self._client.writer.close()
        self._server.writer.close()


async def _pump(source: _End, sink: _End, way: _Way) -> None:
    """Forward bytes in one direction while it flows, up to the end of the source or an error on either side."""
    with suppress(OSError):
        while True:
            await way.flowing.wait()
            data = await source.reader.read(_CHUNK)
            if not data:
                return
            source.heard = True
            if seconds := way.seconds_for(len(data)):
                await asyncio.sleep(seconds)
            await way.flowing.wait()
            source.listener(data)
            sink.writer.write(data)
            await sink.writer.drain()
