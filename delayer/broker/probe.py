"""Try the zero path: messages without any delay that travel a cascade's exchanges and arrive at once.

Only for a cascade of our own. In a damaged one a probe can go astray; in ours a stray lands, visibly, in the strays
queue, in somebody else's it would take one of the 32 places of a level's dead-letter worker, for ever.
"""

from __future__ import annotations

import asyncio
import uuid

from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel as Wire
from aiormq.exceptions import DeliveryError
from pamqp.commands import Basic

from delayer.core.cascade import LEVELS, Cascade, delivery_binding, routing_key


async def zero_path_breaks_at(channel: Wire, cascade: Cascade, *, patience: float = 5.0) -> int | None:
    """The lowest level whose exchange does not pass a message without delay on; None when all of them do.

    One message enters at every level, addressed to a temporary queue that nobody else sees. ``patience``: seconds to
    wait for those that the broker took. Their expiration of 0 keeps no copy alive where a wrong binding leads one
    into a queue without a consumer.
    """
    arrived: set[int] = set()
    changed = asyncio.Event()

    async def on_message(message: DeliveredMessage) -> None:
        arrived.add(int(message.body))
        changed.set()

    address = f"delayer.probe.{uuid.uuid4().hex}"
    await channel.queue_declare(address, exclusive=True, auto_delete=True)
    try:
        await channel.queue_bind(address, cascade.delivery, delivery_binding(address))
        await channel.basic_consume(address, on_message, no_ack=True)
        key = routing_key(0, address.encode()).decode()
        taken = {level for level in range(LEVELS) if await _taken(channel, cascade.level(level), key, level)}
        try:
            async with asyncio.timeout(patience):
                while not taken <= arrived:
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            pass  # what did not arrive by now counts as not passed on
    finally:
        await channel.queue_delete(address)
    return min(set(range(LEVELS)) - arrived, default=None)


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
