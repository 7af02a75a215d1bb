"""The calls for the things of a topology. Each raises the driver's ChannelClosed when the broker says no.

Not the driver's own methods: see frames.py.
"""

from __future__ import annotations

from aiormq.channel import Channel as Wire
from pamqp.commands import Queue as QueueMethods

from delayer.broker import frames
from delayer.core.topology import Binding, Exchange, Queue


async def declare_exchange(channel: Wire, wanted: Exchange) -> None:
    await channel.rpc(frames.exchange(wanted))


async def declare_queue(channel: Wire, wanted: Queue) -> None:
    await channel.rpc(frames.queue(wanted))


async def bind(channel: Wire, wanted: Binding) -> None:
    await channel.rpc(frames.binding(wanted))


async def unbind(channel: Wire, wanted: Binding) -> None:
    await channel.rpc(frames.unbinding(wanted))


async def find_exchange(channel: Wire, name: str) -> None:
    await channel.rpc(frames.look_at_exchange(name))


async def find_queue(channel: Wire, name: str) -> QueueMethods.DeclareOk:
    """Its ``message_count`` is the messages ready for delivery, ``consumer_count`` who is there to take them."""
    answer = await channel.rpc(frames.look_at_queue(name))
    assert isinstance(answer, QueueMethods.DeclareOk), answer
    return answer


async def delete_exchange(channel: Wire, name: str, *, if_unused: bool) -> None:
    await channel.rpc(frames.ExchangeDelete(exchange=name, if_unused=if_unused))


async def delete_queue(channel: Wire, name: str) -> None:
    """With its messages: quorum queues do not support "if empty", and answer by closing the connection."""
    await channel.rpc(frames.QueueDelete(queue=name))
