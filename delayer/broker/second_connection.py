"""The second connection of the publishers, on which messages may end a channel or a connection without harm."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import structlog

from delayer.amqp.channel import Channel
from delayer.amqp.connection import Connection
from delayer.amqp.errors import BrokerLost
from delayer.amqp.values import Answer, Outgoing
from delayer.broker.connection import ReconnectingConnection
from delayer.core import faultpoint

log = structlog.get_logger(__name__)

CONNECT_SECONDS: Final = 2.0
"""Timeout for the second connection. Also the longest time that a batch waits for messages that may end a
connection."""
OPEN_SECONDS: Final = 5.0
"""Timeout for opening a channel there, longer than a busy broker needs. After it the connection is replaced."""
AGAIN_SECONDS: Final = 30.0
"""After the broker refused the connection, the next attempt waits for this long."""
IDLE_CHANNELS: Final = 8
"""Maximum number of channels that are kept open for later rounds."""


class SecondConnection:
    """The connection of the isolation, for one exclusive round or several others at a time."""

    def __init__(self, reconnecting: ReconnectingConnection) -> None:
        self._reconnecting = reconnecting
        self._connection: Connection | None = None
        self._idle_channels: list[Channel] = []
        """Channels that earlier rounds left open, because opening one costs two round trips."""
        self._entry = asyncio.Lock()
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._refused = -math.inf

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon()

    @asynccontextmanager
    async def use(self, *, is_exclusive: bool, is_required: bool) -> AsyncIterator[Connection]:
        """Lend the connection to one round, which does not share it if it ``is_exclusive``. Raises BrokerLost."""
        async with AsyncExitStack() as turn:
            await turn.enter_async_context(self._entry)
            if is_exclusive:
                await self._unused.wait()
            connection = await self._open(is_required=is_required)
            self._users += 1
            self._unused.clear()
            if not is_exclusive:
                await turn.aclose()
            try:
                yield connection
            finally:
                self._users -= 1
                if not self._users:
                    self._unused.set()

    async def _open(self, *, is_required: bool) -> Connection:
        """Return the open connection, or open it. If the broker refuses a second connection, use the publishers'
        connection, unless the second one ``is_required``."""
        connection = self._connection
        full = connection is not None and connection.free_channels <= connection.limits.channel_max // 2
        if connection is not None and full and not self._users:
            connection.abandon()  # The broker then closes its channels that wait for silent queues.
        if connection is not None and not connection.closed.done():
            return connection
        if is_required or self._refused + AGAIN_SECONDS < asyncio.get_running_loop().time():
            try:
                self._connection = await self._reconnecting.another(CONNECT_SECONDS)
            except BrokerLost as lost:
                self._refused = asyncio.get_running_loop().time()
                log.warning("no isolation connection", reason=str(lost))
                if is_required:
                    raise
            else:
                return self._connection
        return await self._reconnecting.connection(CONNECT_SECONDS)

    async def publish(self, connection: Connection, messages: Sequence[Outgoing], seconds: float) -> list[Answer]:
        """Publish on a channel of ``connection`` that no other publish uses. Raises BrokerLost."""
        ours = connection is self._connection
        self._idle_channels = [one for one in self._idle_channels if not one.closed.done()]
        if ours and self._idle_channels:
            channel = self._idle_channels.pop()
        else:
            channel = await self._reconnecting.confirming_channel(connection, OPEN_SECONDS if ours else None)
        try:
            answers = await channel.publish(messages, timeout=seconds, reach=faultpoint.reach)
            if ours and len(self._idle_channels) < IDLE_CHANNELS:
                self._idle_channels.append(channel)
            return answers
        finally:
            if channel not in self._idle_channels:
                channel.abandon()
