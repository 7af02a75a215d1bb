"""Try the zero path: messages without any delay that travel a cascade's exchanges and arrive at once.

Only for a cascade of our own. In a damaged one a probe can go astray; in ours a stray lands, visibly, in the strays
queue, in somebody else's it would take one of the 32 places of a level's dead-letter worker, for ever.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import NamedTuple

from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel as Wire
from aiormq.exceptions import DeliveryError
from pamqp.commands import Basic

from delayer.core.cascade import LEVELS, Cascade, delivery_binding, routing_key

QUIET_SECONDS = 0.3


class ZeroPath(NamedTuple):
    """``breaks_at``: the lowest level whose exchange does not pass a message without delay on, None when all do.

    ``detours``: level queues that a wrong binding led a copy of such a message through.
    """

    breaks_at: int | None
    detours: frozenset[str]


async def try_zero_path(channel: Wire, cascade: Cascade, *, patience: float = 5.0) -> ZeroPath:
    """Let one message enter at every level, addressed to a temporary queue that nobody else sees.

    ``patience``: seconds to wait for those that the broker took. Their expiration of 0 sends a copy that a wrong
    binding leads into a level's queue on at once; we stay a little to meet it, and one that is even later is a stray.
    """
    arrived: set[int] = set()
    detours: set[str] = set()
    changed = asyncio.Event()

    async def on_message(message: DeliveredMessage) -> None:
        arrived.add(int(message.body))
        detours.update(_queues_of_death(message))
        changed.set()

    address = f"delayer.probe.{uuid.uuid4().hex}"
    # Exclusive: should anything below fail, it goes with the connection.
    await channel.queue_declare(address, exclusive=True)
    await channel.queue_bind(address, cascade.delivery, delivery_binding(address))
    consumer = await channel.basic_consume(address, on_message, no_ack=True)
    key = routing_key(0, address.encode()).decode()
    taken = {level for level in range(LEVELS) if await _taken(channel, cascade.level(level), key, level)}
    try:
        async with asyncio.timeout(patience):
            while not taken <= arrived:
                await changed.wait()
                changed.clear()
            while True:
                async with asyncio.timeout(QUIET_SECONDS):
                    await changed.wait()
                changed.clear()
    except TimeoutError:
        pass  # what did not arrive by now counts as not passed on
    await channel.basic_cancel(str(consumer.consumer_tag))
    await channel.queue_delete(address)
    return ZeroPath(min(set(range(LEVELS)) - arrived, default=None), frozenset(detours))


def _queues_of_death(message: DeliveredMessage) -> list[str]:
    """The queues that the message expired in."""
    deaths = (message.header.properties.headers or {}).get("x-death")
    return [str(death["queue"]) for death in deaths if isinstance(death, dict)] if isinstance(deaths, list) else []


async def _taken(channel: Wire, exchange: str, key: str, level: int) -> bool:
    """Whether the broker routed the probe anywhere."""
    properties = Basic.Properties(delivery_mode=1, expiration="0", message_id=f"{key}.{level}")
    try:
        await channel.basic_publish(
            str(level).encode(), exchange=exchange, routing_key=key, mandatory=True, properties=properties
        )
    except DeliveryError:
        return False
    return True
