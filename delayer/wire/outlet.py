"""The writing end of a connection: bytes to the transport, and waiting while it has more than it can send."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

HIGH_WATER = 1 << 20
"""Bytes that the transport may hold before writers are asked to wait."""
# Publishes are handed over in runs of about this many bytes, and the room in the buffer is looked at between them:
# few enough writes to be cheap, small enough that a blocked broker costs little memory.
WRITE_BYTES = 1 << 18


class Outlet:
    """``written_at`` is the loop time of the last write."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.written_at = loop.time()
        self._loop = loop
        self._transport: asyncio.WriteTransport | None = None
        self._full = False
        self._waiting: set[asyncio.Future[None]] = set()

    def attach(self, transport: asyncio.WriteTransport) -> None:
        """The transport is there: from now on writes go somewhere."""
        self._transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER)

    def write(self, data: bytes) -> None:
        """Hand over bytes; nothing happens when the transport is closing."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
            self.written_at = self._loop.time()

    def write_parts(self, parts: Sequence[bytes | memoryview]) -> None:
        """The same for the pieces of many frames, joined to writes of a size that does not double their memory."""
        size = start = 0
        for index, part in enumerate(parts):
            size += len(part)
            if size >= WRITE_BYTES:
                self.write(b"".join(parts[start : index + 1]))
                size, start = 0, index + 1
        if size:
            self.write(b"".join(parts[start:]))

    async def drain(self) -> None:
        """Wait while the transport holds too much."""
        while self._full:
            future: asyncio.Future[None] = self._loop.create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)

    def pause(self) -> None:
        """The transport holds more than the high-water mark."""
        self._full = True

    def resume(self) -> None:
        """There is room again, or it does not matter any more."""
        self._full = False
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
