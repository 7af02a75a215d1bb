"""One plain connection for administration. Its channel opens again after the broker closed it.

The broker closes the channel if a request names a missing part, so here that is a normal answer. The connection does
not reconnect, so that an administrator sees its loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import aio_pika
import aio_pika.connection
from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq import exceptions as driver
from aiormq.channel import EXCEPTION_MAPPING
from aiormq.channel import Channel as Wire
from pamqp import commands
from pamqp.base import Frame

from delayer.amqp.address import Address
from delayer.amqp.errors import NOT_ALLOWED, PERMISSION, ChannelClosed
from delayer.amqp.handshake import server_version
from delayer.broker.addresses import CONNECT_SECONDS, addresses_of, first_success
from delayer.broker.errors import BrokerRefused, BrokerUnreachable
from delayer.broker.pipelined_admin import open_connection

T = TypeVar("T")

ALARM = "free memory or disk on the broker's nodes (`rabbitmq-diagnostics alarms`)"

_CODES = {kind: code for code, kind in EXCEPTION_MAPPING.items()}
_UNEXPLAINED = (driver.ProbableAuthenticationError, driver.AuthenticationError, driver.InvalidFrameError)


@dataclass
class AdminConnection:
    """One connection. ``patience``: timeout of each call in seconds, long enough for a new quorum queue's election."""

    _connection: AbstractConnection
    where: str
    patience: float
    _channel: AbstractChannel | None = field(default=None, init=False)

    @classmethod
    async def open(cls, urls: str, *, name: str, patience: float) -> AdminConnection:
        """Connect to one of these URLs. Raises BrokerUnreachable, BrokerRefused."""

        async def attempt(address: Address) -> AdminConnection:
            where = f"{address.host}:{address.port} vhost {address.vhost!r}"
            connection = _prepared(address, name)
            seconds = min(patience, CONNECT_SECONDS) if address.timeout is None else address.timeout
            try:
                with translate_errors(where):
                    await connection.connect(timeout=seconds)
            except BaseException as error:
                # Otherwise the driver would close it during garbage collection, perhaps without a loop.
                await connection.close()
                if isinstance(error.__cause__, _UNEXPLAINED):
                    # The driver hides the broker's reason; our own client raises it.
                    await (await open_connection(address, name, seconds)).close()
                raise
            return cls(connection, where, patience)

        return await first_success(addresses_of(urls), attempt)

    @property
    def version(self) -> tuple[int, ...]:
        """The broker's version, such as (4, 3, 6); empty if the broker does not send it."""
        transport = self._connection.transport
        return server_version(None if transport is None else transport.connection.server_properties)

    async def call(self, method: Callable[[Wire], Awaitable[T]]) -> T:
        """Run one method of the driver's channel.

        Raises the driver's ChannelClosed (the broker's answer: not found, precondition failed, or locked),
        BrokerRefused if a permission is missing, BrokerUnreachable.
        """
        with translate_errors(self.where):
            try:
                async with asyncio.timeout(self.patience):
                    return await method(await self._open_channel())
            except TimeoutError as error:
                if not await self._blocked():
                    raise
                text = f"{self.where}: a resource alarm (memory, disk): the broker blocks publishers"
                raise BrokerUnreachable(text, advice=ALARM) from error
            except driver.ChannelAccessRefused as error:
                raise BrokerRefused(f"{self.where}: {_text(error)}", PERMISSION) from error

    async def ask(self, method: Frame) -> Frame | ChannelClosed:
        """Return the broker's answer to one method, even if it is a refusal. Raises as :meth:`call`."""
        try:
            answer = await self.call(lambda channel: channel.rpc(method))
        except driver.ChannelClosed as error:
            return ChannelClosed(_CODES.get(type(error), 0), str(error))
        assert answer is not None, method  # Every method here has an answer.
        return answer

    async def has_message(self, queue: str) -> bool:
        """Whether the queue has a message ready. A majority of its members must answer, while a count of 0 may also
        mean that they are down. The message returns to the queue when the connection ends. False for a queue with a
        single active consumer, once its members agreed to refuse: count again. Raises as :meth:`call`."""
        try:
            found = await self.call(lambda channel: channel.basic_get(queue))
        except (driver.ChannelLockedResource, driver.ChannelNotFoundEntity):
            return False  # It has a single active consumer, and refuses this after its members agreed; or it is gone.
        except driver.ChannelClosed as error:
            raise BrokerRefused(f"{self.where}: {_text(error)}") from error
        return isinstance(found.delivery, commands.Basic.GetOk)

    async def _blocked(self) -> bool:
        """Whether the broker said that it accepts no publishes of this connection."""
        transport = self._connection.transport
        try:
            async with asyncio.timeout(0.1):
                if transport is not None:
                    await transport.connection.ready()
        except TimeoutError:
            return True
        return False

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
        with translate_errors(self.where):
            await self._connection.close()


def _prepared(address: Address, name: str) -> aio_pika.Connection:
    """Build an unopened connection without reconnects, with the parameters of delayer's own AMQP client."""
    url = aio_pika.connection.make_url(
        host=address.at or address.host,
        port=address.port,
        login=address.user,
        password=address.password,
        virtualhost=address.vhost,
        ssl=address.tls is not None,
        auth=address.auth_mechanism.lower(),
        heartbeat=None if address.heartbeat is None else int(address.heartbeat),
    )
    connection = aio_pika.Connection(url, ssl_context=address.tls, client_properties={"connection_name": name})
    if address.tls is not None:
        connection.kwargs["server_hostname"] = address.server_name or address.host
    return connection


@contextmanager
def translate_errors(where: str) -> Iterator[None]:
    """Translate the driver's errors into ours. ``where``: the broker's host, port and vhost.

    A ChannelClosed passes unchanged, because it is the broker's answer to one call.
    """
    try:
        yield
    except driver.ChannelClosed:
        raise
    except driver.ConnectionClosed as error:
        advice = NOT_ALLOWED if isinstance(error, driver.ConnectionNotAllowed) else ""
        raise BrokerUnreachable(f"{where}: the broker closed the connection: {_text(error)}", advice=advice) from error
    except TimeoutError as error:
        raise BrokerUnreachable(f"{where}: no answer in time") from error
    except (driver.AMQPConnectionError, OSError) as error:
        raise BrokerUnreachable(f"{where}: {_text(error)}") from error
    except (driver.AMQPError, driver.ChannelInvalidStateError) as error:
        raise BrokerUnreachable(f"{where}: the channel is gone: {_text(error)}") from error


def _text(error: BaseException) -> str:
    """Remove the full stop that the broker puts at the end of its text, because our sentences continue after it."""
    return str(error).removesuffix(".") or type(error).__name__
