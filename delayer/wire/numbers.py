"""The channel numbers of one connection: who receives what comes for each, and which are free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from delayer.wire import methods
from delayer.wire.channel import Channel, ClosingChannel
from delayer.wire.errors import ConnectionLost, NoFreeChannel
from delayer.wire.framing import Receiver
from delayer.wire.methods import commands


class Numbers:
    """``receivers``: by number, for the parser; 0 is the connection itself. ``write`` hands bytes to the transport."""

    def __init__(self, loop: asyncio.AbstractEventLoop, zero: Receiver, write: Callable[[bytes], None]) -> None:
        self.receivers: dict[int, Receiver] = {0: zero}
        self.released: dict[int, asyncio.Future[None]] = {}
        self._loop = loop
        self._write = write

    def free(self, channel_max: int) -> int:
        """The lowest number that nobody has. Raises NoFreeChannel."""
        number = next(one for one in count(1) if one not in self.receivers)
        if number > channel_max:
            raise NoFreeChannel(f"all {channel_max} channels of the connection are in use")
        return number

    def release(self, number: int) -> None:
        """We close this channel: ignore what comes for it, and keep its number until the broker agrees."""
        self.released[number] = self._loop.create_future()
        self.receivers[number] = ClosingChannel(
            number,
            on_closed=lambda: self.forget(number),
            answer=lambda: self._write(methods.marshal(commands.Channel.CloseOk(), number)),
        )

    def forget(self, number: int) -> None:
        """The number is free again."""
        del self.receivers[number]
        released = self.released.pop(number, None)
        if released is not None and not released.done():
            released.set_result(None)

    async def wait_released(self, number: int, seconds: float) -> None:
        """Until the broker agreed that a channel is closed, or the connection is lost, or the time is over."""
        released = self.released.get(number)
        if released is not None:
            await asyncio.wait({released}, timeout=seconds)

    def fail(self, loss: ConnectionLost) -> None:
        """The connection is gone: every channel hears of it, and nobody waits for a number."""
        for number, receiver in list(self.receivers.items()):
            if isinstance(receiver, Channel):
                self.receivers[number] = ClosingChannel(number, _nothing, _nothing)
                receiver.fail(loss)
        for released in self.released.values():
            if not released.done():
                released.set_result(None)


def _nothing() -> None:
    """The connection is gone: there is no number to free, and nobody to answer."""
