"""One plain connection for administration. Its channel opens again after the broker closed it.

The broker closes the channel when a question concerns a missing part, so here that is a normal answer. The connection
does not reconnect on purpose: an administrator wants to know that it is gone.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import aio_pika
import aio_pika.connection
from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq.channel import Channel as Wire
from aiormq.exceptions import ChannelAccessRefused, ChannelClosed
from pamqp.base import Frame

from delayer.amqp.address import Address
from delayer.broker.errors import BrokerRefused, BrokerUnreachable, translated

T = TypeVar("T")

DELAYS_FROM: Final = (4, 3)
"""The first version of RabbitMQ whose quorum queues delay messages: returned ones, and from 4.4 on published ones."""


class AdminConnection:
    """One connection. ``patience``: seconds for each call; be generous, since a new quorum queue elects a leader."""

    def __init__(self, connection: AbstractConnection, where: str, patience: float) -> None:
        self.where = where
        self._connection = connection
        self._patience = patience
        self._channel: AbstractChannel | None = None

    @classmethod
    async def open(cls, url: str, *, name: str, patience: float) -> AdminConnection:
        """Connect. Raises BrokerUnreachable, BrokerRefused, and ValueError for an invalid URL."""
        address = Address.parse(url)
        where = f"{address.host}:{address.port} vhost {address.vhost!r}"
        connection = _prepared(address, name)
        try:
            with translated(where):
                await connection.connect(timeout=patience if address.timeout is None else address.timeout)
        except BaseException:
            # Otherwise the driver would close it during garbage collection, perhaps without a loop.
            await connection.close()
            raise
        return cls(connection, where, patience)

    @property
    def cluster(self) -> str:
        """The name of the broker's cluster; "" if the broker does not send it."""
        return self._said("cluster_name")

    @property
    def version(self) -> tuple[int, ...]:
        """The broker's version, such as (4, 3, 6); empty if the broker does not send it."""
        return tuple(int(part) for part in re.findall(r"\d+", self._said("version"))[:3])

    def _said(self, name: str) -> str:
        transport = self._connection.transport
        value = transport.connection.server_properties.get(name) if transport is not None else None
        return value if isinstance(value, str) else ""

    async def call(self, method: Callable[[Wire], Awaitable[T]]) -> T:
        """Run one method of the driver's channel.

        Raises ChannelClosed (the broker's answer: not found, precondition failed, or locked), BrokerRefused if a
        permission is missing, BrokerUnreachable.
        """
        with translated(self.where):
            try:
                async with asyncio.timeout(self._patience):
                    return await method(await self._open_channel())
            except ChannelAccessRefused as error:
                raise BrokerRefused(f"{self.where}: {error}") from error

    async def ask(self, method: Frame) -> Frame | ChannelClosed | None:
        """The broker's answer to one method; a refusal is a value. Raises as :meth:`call`."""
        try:
            return await self.call(lambda channel: channel.rpc(method))
        except ChannelClosed as error:
            return error

    async def _open_channel(self) -> Wire:
        if self._connection.is_closed:
            raise BrokerUnreachable(f"{self.where}: the connection is closed")
        if self._channel is None or self._channel.is_closed:
            try:
                self._channel = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
            except RuntimeError as error:  # The driver raises this for a connection that is closing.
                raise BrokerUnreachable(f"{self.where}: the connection is closed") from error
        channel = await self._channel.get_underlay_channel()
        assert isinstance(channel, Wire), channel
        return channel

    async def close(self) -> None:
        with translated(self.where):
            await self._connection.close()


def _prepared(address: Address, name: str) -> aio_pika.Connection:
    """A connection that is not open yet and does not reconnect, with the parameters of delayer's own AMQP client."""
    url = aio_pika.connection.make_url(
        host=address.host,
        port=address.port,
        login=address.user,
        password=address.password,
        virtualhost=address.vhost,
        ssl=address.tls is not None,
        auth=address.auth_mechanism.lower(),
        heartbeat=None if address.heartbeat is None else int(address.heartbeat),
    )
    connection = aio_pika.Connection(url, ssl_context=address.tls, client_properties={"connection_name": name})
    if address.tls is not None and address.server_name is not None:
        connection.kwargs["server_hostname"] = address.server_name
    return connection
