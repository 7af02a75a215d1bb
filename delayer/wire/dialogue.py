"""The conversation on channel 0 that opens a connection: one question at a time, each with its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from pamqp.base import Frame

from delayer.wire import handshake, methods
from delayer.wire.address import Address
from delayer.wire.errors import ConnectionLost, again
from delayer.wire.framing import PROTOCOL_HEADER
from delayer.wire.methods import commands

_Reply = TypeVar("_Reply", bound=Frame)


class Dialogue:
    """``write`` raises ConnectionLost, and so does whoever waits for an answer then."""

    def __init__(self, loop: asyncio.AbstractEventLoop, write: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._write = write
        self._reply: tuple[type[Frame], asyncio.Future[Frame]] | None = None

    async def greet(self, address: Address, name: str, heartbeat: float) -> tuple[str, handshake.Limits]:
        """Say who we are; the name of the broker's cluster, and the limits. Raises AccessRefused."""
        start = await self._ask(PROTOCOL_HEADER, commands.Connection.Start)
        hello = handshake.start_ok(start, address, name)
        tune = await self._ask(methods.marshal(hello, 0), commands.Connection.Tune)
        return handshake.cluster_of(start), handshake.agree(tune, heartbeat)

    async def enter(self, limits: handshake.Limits, vhost: str) -> None:
        """Agree to the limits, and open the virtual host."""
        self._write(methods.marshal(handshake.tune_ok(limits), 0))
        wish = commands.Connection.Open(virtual_host=vhost)
        await self._ask(methods.marshal(wish, 0), commands.Connection.OpenOk)

    async def _ask(self, frame: bytes, reply: type[_Reply]) -> _Reply:
        self._write(frame)
        future: asyncio.Future[Frame] = self._loop.create_future()
        self._reply = (reply, future)
        answer = await future
        assert isinstance(answer, reply)  # heard() compared it
        return answer

    def heard(self, method: Frame) -> bool:
        """Whether this is what was waited for."""
        if self._reply is None or not isinstance(method, self._reply[0]):
            return False
        _, future = self._reply
        self._reply = None
        if not future.done():
            future.set_result(method)
        return True

    def fail(self, loss: ConnectionLost) -> None:
        """Nobody answers any more."""
        if self._reply is not None and not self._reply[1].done():
            self._reply[1].set_exception(again(loss))
