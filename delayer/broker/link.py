"""One plain connection for administration, with a channel that opens again after the broker closed it.

The broker answers a question about a thing that is missing by closing the channel, so here that is daily business and
not a failure. The connection itself is not robust on purpose: who administers a broker wants to know that it is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aio_pika
import aio_pika.connection
from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq.channel import Channel as Wire
from aiormq.exceptions import ChannelAccessRefused, ChannelClosed
from pamqp.commands import Queue as QueueMethods

from delayer.amqp.address import Address
from delayer.broker.brief import (
    ExchangeDelete,
    QueueDelete,
    binding_frame,
    exchange_frame,
    exchange_look,
    queue_frame,
    queue_look,
    unbinding_frame,
)
from delayer.broker.errors import BrokerRefused, BrokerUnreachable, translated
from delayer.core.topology import Binding, Exchange, Queue

T = TypeVar("T")


class Link:
    """``patience``: seconds for each call. A quorum queue's declaration waits for an election, so be generous."""

    def __init__(self, connection: AbstractConnection, where: str, patience: float) -> None:
        self.where = where
        self._connection = connection
        self._patience = patience
        self._channel: AbstractChannel | None = None

    @classmethod
    async def open(cls, url: str, *, name: str, patience: float) -> Link:
        """Raises BrokerUnreachable, BrokerRefused; ValueError for a URL that is none."""
        address = Address.parse(url)
        where = f"{address.host}:{address.port} vhost {address.vhost!r}"
        connection = _prepared(address, name)
        try:
            with translated(where):
                await connection.connect(timeout=patience if address.timeout is None else address.timeout)
        except BaseException:
            await connection.close()  # or the driver would, when it is collected, perhaps in no loop
            raise
        return cls(connection, where, patience)

    @property
    def cluster(self) -> str:
        """What the broker calls its cluster; "" where it does not say."""
        transport = self._connection.transport
        said = transport.connection.server_properties.get("cluster_name") if transport is not None else None
        return said if isinstance(said, str) else ""

    async def call(self, method: Callable[[Wire], Awaitable[T]]) -> T:
        """Run one method of the driver's channel.

        Raises ChannelClosed (not found, precondition failed, locked: the broker's answer), BrokerRefused where a
        permission is missing, BrokerUnreachable.
        """
        with translated(self.where):
            try:
                async with asyncio.timeout(self._patience):
                    return await method(await self._open_channel())
            except ChannelAccessRefused as error:
                raise BrokerRefused(f"{self.where}: {error}") from error

    async def _open_channel(self) -> Wire:
        if self._connection.is_closed:
            raise BrokerUnreachable(f"{self.where}: the connection is closed")
        if self._channel is None or self._channel.is_closed:
            try:
                self._channel = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
            except RuntimeError as error:  # the driver's word for a connection that closes at this moment
                raise BrokerUnreachable(f"{self.where}: the connection is closed") from error
        channel = await self._channel.get_underlay_channel()
        assert isinstance(channel, Wire), channel
        return channel

    async def close(self) -> None:
        with translated(self.where):
            await self._connection.close()


def _prepared(address: Address, name: str) -> aio_pika.Connection:
    """Not robust, not yet connected, and with the parameters that the wire understands too."""
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


async def answered(link: Link, method: Callable[[Wire], Awaitable[T]]) -> T | ChannelClosed:
    """Like :meth:`Link.call`, with the broker's "no" to this one call as a value."""
    try:
        return await link.call(method)
    except ChannelClosed as error:
        return error


async def declare_exchange(channel: Wire, wanted: Exchange) -> None:
    await channel.rpc(exchange_frame(wanted))


async def declare_queue(channel: Wire, wanted: Queue) -> None:
    await channel.rpc(queue_frame(wanted))


async def bind(channel: Wire, wanted: Binding) -> None:
    await channel.rpc(binding_frame(wanted))


async def unbind(channel: Wire, wanted: Binding) -> None:
    await channel.rpc(unbinding_frame(wanted))


async def find_exchange(channel: Wire, name: str) -> None:
    await channel.rpc(exchange_look(name))


async def find_queue(channel: Wire, name: str) -> QueueMethods.DeclareOk:
    """Its ``message_count`` is the messages ready for delivery, ``consumer_count`` who is there to take them."""
    answer = await channel.rpc(queue_look(name))
    assert isinstance(answer, QueueMethods.DeclareOk), answer
    return answer


async def delete_exchange(channel: Wire, name: str, *, if_unused: bool) -> None:
    await channel.rpc(ExchangeDelete(exchange=name, if_unused=if_unused))


async def delete_queue(channel: Wire, name: str) -> None:
    """With its messages: quorum queues do not support "if empty", and answer by closing the connection."""
    await channel.rpc(QueueDelete(queue=name))
