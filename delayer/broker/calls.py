"""The driver's calls for the things of a topology. Each raises the driver's ChannelClosed when the broker says no."""

from __future__ import annotations

from aiormq.abc import AbstractChannel as Wire
from pamqp.commands import Queue as QueueMethods

from delayer.core.topology import Binding, Exchange, Queue


async def declare_exchange(channel: Wire, wanted: Exchange) -> None:
    await channel.exchange_declare(
        wanted.name, exchange_type=wanted.type, durable=wanted.durable, arguments=dict(wanted.arguments)
    )


async def declare_queue(channel: Wire, wanted: Queue) -> None:
    """The driver sends an integer in the smallest type that holds it: 64 bits for the TTLs from level 22 up.

    The broker compares all integer types as one, so the declarations of other systems' clients stay equal to ours.
    """
    await channel.queue_declare(wanted.name, durable=wanted.durable, arguments=dict(wanted.arguments))


async def bind(channel: Wire, wanted: Binding) -> None:
    if wanted.destination_kind == "queue":
        await channel.queue_bind(wanted.destination, wanted.source, wanted.key)
    else:
        await channel.exchange_bind(wanted.destination, wanted.source, wanted.key)


async def unbind(channel: Wire, wanted: Binding) -> None:
    if wanted.destination_kind == "queue":
        await channel.queue_unbind(wanted.destination, wanted.source, wanted.key)
    else:
        await channel.exchange_unbind(wanted.destination, wanted.source, wanted.key)


async def find_exchange(channel: Wire, name: str) -> None:
    await channel.exchange_declare(name, passive=True)


async def find_queue(channel: Wire, name: str) -> QueueMethods.DeclareOk:
    """Its ``message_count`` is the messages ready for delivery, ``consumer_count`` who is there to take them."""
    return await channel.queue_declare(name, passive=True)
