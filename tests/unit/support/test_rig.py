"""The rig without servers: ports, processes that end with us, the proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from tests.support import ports
from tests.support.proxy import Proxy


@asynccontextmanager
async def _echo_server() -> AsyncIterator[int]:
    """The port of a server that says everything back; leaves when all its clients have."""
    tasks = set()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        with suppress(ConnectionResetError):
            while data := await reader.read(1024):
                writer.write(data)
        writer.close()
        with suppress(ConnectionResetError):
            await writer.wait_closed()

    server = await asyncio.start_server(echo, ports.HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()  # uvloop closes no loop while somebody listens: a test that failed would hang
    await asyncio.gather(*tasks)


async def test_proxy_forwards_stalls_and_cuts() -> None:
    async with _echo_server() as port, Proxy(port) as proxy:
        reader, writer = await asyncio.open_connection(ports.HOST, proxy.port)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"

        proxy.stall()
        writer.write(b"two")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(3), 0.1)
        proxy.resume()
        assert await reader.readexactly(3) == b"two"

        proxy.stall(to_server=False)
        writer.write(b"three")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(5), 0.1)
        proxy.resume()
        assert await reader.readexactly(5) == b"three"

        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        writer.close()


async def test_proxy_slows_down() -> None:
    async with _echo_server() as port, Proxy(port) as proxy:
        reader, writer = await asyncio.open_connection(ports.HOST, proxy.port)
        loop = asyncio.get_running_loop()

        async def seconds_for(size: int) -> float:
            began = loop.time()
            writer.write(bytes(size))
            await reader.readexactly(size)
            return loop.time() - began

        proxy.slow(delay=0.05)
        assert await seconds_for(1) >= 0.098  # the loop counts in whole milliseconds
        proxy.slow(bytes_per_second=100_000)
        assert await seconds_for(10_000) >= 0.198
        proxy.resume()
        await seconds_for(1_000_000)  # ten seconds, if it were slow still
        writer.close()
