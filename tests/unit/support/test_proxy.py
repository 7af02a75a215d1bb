"""The proxy with several servers behind it: which server gets a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.support import ports
from tests.support.place import eventually
from tests.support.proxy import Proxy


@asynccontextmanager
async def server(port: int, answer: bytes) -> AsyncIterator[None]:
    """Answers each connection at once, or never if the answer is empty."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        with suppress(OSError):
            await reader.read()
        writer.close()

    listening = await asyncio.start_server(serve, ports.HOST, port)
    try:
        yield
    finally:
        listening.close()


async def first_byte(proxy: Proxy) -> bytes:
    """The first byte through the proxy; empty if there is none soon."""
    reader, writer = await asyncio.open_connection(ports.HOST, proxy.port)
    try:
        async with asyncio.timeout(0.2):
            return await reader.read(1)
    except (TimeoutError, OSError):
        return b""
    finally:
        writer.close()


async def test_a_connection_goes_to_the_server_that_accepted_the_last_one() -> None:
    one, two = ports.reserve(), ports.reserve()
    async with Proxy(one, two) as proxy, server(two, b"2"):
        async with server(one, b"1"):
            assert [await first_byte(proxy), proxy.target] == [b"1", one]
        assert [await first_byte(proxy), proxy.target] == [b"2", two]
        async with server(one, b"1"):
            assert [await first_byte(proxy), proxy.target] == [b"2", two]


async def test_a_server_that_never_answers_is_tried_last() -> None:
    one, two = ports.reserve(), ports.reserve()
    async with Proxy(one, two) as proxy, server(one, b""), server(two, b"2"):
        assert await first_byte(proxy) == b""
        await eventually(lambda: proxy.connections, lambda connections: connections == 0)
        assert [await first_byte(proxy), proxy.target] == [b"2", two]


async def test_no_server_at_all() -> None:
    async with Proxy(ports.reserve(), ports.reserve()) as proxy:
        assert await first_byte(proxy) == b""
