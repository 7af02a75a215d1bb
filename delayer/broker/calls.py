"""The calls for the things of a topology. Each raises the driver's ChannelClosed when the broker says no.

The driver's methods go through pamqp's checks of names, which hold to the letter of AMQP 0-9-1: a few ASCII characters,
127 of them for an exchange. RabbitMQ takes any 255 bytes of UTF-8, and people use them: their queues are our addresses.
So the frames are made here, by classes that leave the judgement to the broker.
"""

from __future__ import annotations

from aiormq.channel import Channel as Wire
from pamqp.commands import Exchange as ExchangeMethods
from pamqp.commands import Queue as QueueMethods

from delayer.core.topology import Binding, Exchange, Queue


class _Unjudged:
    """The broker judges."""

    def validate(self) -> None:
        return


class _ExchangeDeclare(_Unjudged, ExchangeMethods.Declare): ...


class _ExchangeDelete(_Unjudged, ExchangeMethods.Delete): ...


class _ExchangeBind(_Unjudged, ExchangeMethods.Bind): ...


class _ExchangeUnbind(_Unjudged, ExchangeMethods.Unbind): ...


class _QueueDeclare(_Unjudged, QueueMethods.Declare): ...


class _QueueDelete(_Unjudged, QueueMethods.Delete): ...


class _QueueBind(_Unjudged, QueueMethods.Bind): ...


class _QueueUnbind(_Unjudged, QueueMethods.Unbind): ...


async def declare_exchange(channel: Wire, wanted: Exchange) -> None:
    await channel.rpc(
        _ExchangeDeclare(
            exchange=wanted.name,
            exchange_type=wanted.type,
            durable=wanted.durable,
            arguments=dict(wanted.arguments),
        )
    )


async def declare_queue(channel: Wire, wanted: Queue) -> None:
    """pamqp sends an integer in the smallest type that holds it: 64 bits for the TTLs from level 22 up.

    The broker compares all integer types as one, so the declarations of other systems' clients stay equal to ours.
    """
    await channel.rpc(_QueueDeclare(queue=wanted.name, durable=wanted.durable, arguments=dict(wanted.arguments)))


async def bind(channel: Wire, wanted: Binding) -> None:
    if wanted.destination_kind == "queue":
        await channel.rpc(_QueueBind(queue=wanted.destination, exchange=wanted.source, routing_key=wanted.key))
    else:
        await channel.rpc(_ExchangeBind(destination=wanted.destination, source=wanted.source, routing_key=wanted.key))


async def unbind(channel: Wire, wanted: Binding) -> None:
    if wanted.destination_kind == "queue":
        await channel.rpc(_QueueUnbind(queue=wanted.destination, exchange=wanted.source, routing_key=wanted.key))
    else:
        await channel.rpc(_ExchangeUnbind(destination=wanted.destination, source=wanted.source, routing_key=wanted.key))


async def find_exchange(channel: Wire, name: str) -> None:
    await channel.rpc(_ExchangeDeclare(exchange=name, passive=True))


async def find_queue(channel: Wire, name: str) -> QueueMethods.DeclareOk:
    """Its ``message_count`` is the messages ready for delivery, ``consumer_count`` who is there to take them."""
    answer = await channel.rpc(_QueueDeclare(queue=name, passive=True))
    assert isinstance(answer, QueueMethods.DeclareOk), answer
    return answer


async def delete_exchange(channel: Wire, name: str, *, if_unused: bool) -> None:
    await channel.rpc(_ExchangeDelete(exchange=name, if_unused=if_unused))


async def delete_queue(channel: Wire, name: str) -> None:
    """With its messages: quorum queues do not support "if empty", and answer by closing the connection."""
    await channel.rpc(_QueueDelete(queue=name))
