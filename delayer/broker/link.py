"""One connection for administration. Its channel opens again after the broker closed it.

The broker closes the channel when a question concerns a missing part, so here that is a normal answer. The connection
does not reconnect on purpose: an administrator wants to know that it is gone.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from pamqp.base import Frame

from delayer.amqp.address import Address
from delayer.amqp.channel import Channel
from delayer.amqp.connection import Connection
from delayer.amqp.errors import ACCESS_REFUSED, AccessRefused, ChannelClosed
from delayer.broker.errors import BrokerRefused, BrokerUnreachable
from delayer.core.errors import BrokerLost
from delayer.core.message import Outcome, Outgoing

DELAYS_FROM: Final = (4, 3)
"""The first version of RabbitMQ whose quorum queues delay messages: returned ones, and from 4.4 on published ones."""


class Link:
    """One connection. ``patience``: seconds for each call; be generous, since a new quorum queue elects a leader."""

    def __init__(self, connection: Connection, where: str, patience: float) -> None:
        self.where = where
        self.connection = connection
        self._patience = patience
        self._channel: Channel | None = None

    @classmethod
    async def open(cls, url: str, *, name: str, patience: float) -> Link:
        """Connect. Raises BrokerUnreachable, BrokerRefused, and ValueError for an invalid URL."""
        address = Address.parse(url)
        where = f"{address.host}:{address.port} vhost {address.vhost!r}"
        try:
            return cls(await Connection.open(address, name=name, timeout=patience), where, patience)
        except AccessRefused as refused:
            raise BrokerRefused(f"{where}: {refused}") from refused
        except BrokerLost as lost:
            raise BrokerUnreachable(f"{where}: {lost}") from lost

    @property
    def cluster(self) -> str:
        """The name of the broker's cluster; "" if the broker does not send it."""
        return self.connection.cluster

    @property
    def version(self) -> tuple[int, ...]:
        """The broker's version, such as (4, 3, 6); empty if the broker does not send it."""
        return tuple(int(part) for part in re.findall(r"\d+", self.connection.version)[:3])

    async def ask(self, method: Frame) -> Frame | ChannelClosed:
        """The broker's answer to one method. A refusal is a value, except for a missing permission: not found,
        precondition failed, or locked. Raises BrokerRefused, BrokerUnreachable."""
        try:
            async with self._using() as channel:
                return await channel.call(method, Frame)
        except ChannelClosed as closed:
            return closed

    async def publish(self, batch: Sequence[Outgoing]) -> list[Outcome]:
        """The broker's answer to each message. Raises ChannelClosed, BrokerRefused, BrokerUnreachable."""
        async with self._using() as channel:
            await channel.confirm_select()
            return await channel.publish(batch, timeout=self._patience)

    @asynccontextmanager
    async def _using(self) -> AsyncIterator[Channel]:
        try:
            async with asyncio.timeout(self._patience):
                if self._channel is None:
                    self._channel = await self.connection.channel()
                yield self._channel
        except ChannelClosed as closed:
            self._channel = None
            if closed.code == ACCESS_REFUSED:
                raise BrokerRefused(f"{self.where}: {closed}") from closed
            if not closed.objects:
                raise BrokerUnreachable(f"{self.where}: {closed}") from closed
            raise
        except TimeoutError as late:
            self._channel = None  # The answer may still come, and would be taken for that to the next question.
            raise BrokerUnreachable(f"{self.where}: no answer in time") from late
        except BrokerLost as lost:
            raise BrokerUnreachable(f"{self.where}: {lost}") from lost

    async def close(self) -> None:
        """Close, without an error. Safe to call twice."""
        await self.connection.close()
