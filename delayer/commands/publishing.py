"""Publishing for people: one message after another, each confirmed before the next, over the admin's connection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from aiormq.channel import Channel as Wire
from aiormq.exceptions import ChannelNotFoundEntity, DeliveryError
from pamqp.commands import Basic

from delayer.broker.link import Link

SECONDS = 30.0
Value = str | int | float | bool


@dataclass(slots=True)
class Message:
    """What is published. ``timestamp``: epoch seconds. ``due_ms``: when this host's clock expects it back, epoch ms;
    None where nobody here knows."""

    exchange: str
    routing_key: str
    body: bytes
    headers: dict[str, Value] = field(default_factory=dict)
    timestamp: int | None = None
    due_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Untaken:
    """The broker did not take the message: ``reason`` completes "the broker did not take it: …"."""

    message_id: str
    reason: str


async def publish(url: str, message: Message, ids: Sequence[str]) -> Untaken | None:
    """Publish ``message`` under each of ``ids``; stop at the first that is not taken, and say why.

    Raises BrokerUnreachable, BrokerRefused.
    """
    link = await Link.open(url, name="delayer send", patience=SECONDS)
    try:
        for message_id in ids:
            reason = await link.call(partial(_publish, message=message, message_id=message_id))
            if reason is not None:
                return Untaken(message_id, reason)
    except ChannelNotFoundEntity:
        return Untaken(message_id, f'exchange "{message.exchange}" does not exist')
    finally:
        await link.close()
    return None


async def _publish(channel: Wire, message: Message, message_id: str) -> str | None:
    """None when it is confirmed, else the reason why not."""
    properties = Basic.Properties(
        headers={**message.headers} or None,
        delivery_mode=2,
        message_id=message_id,
        timestamp=None if message.timestamp is None else datetime.fromtimestamp(message.timestamp, UTC),
    )
    try:
        await channel.basic_publish(
            message.body,
            exchange=message.exchange,
            routing_key=message.routing_key,
            properties=properties,
            mandatory=True,
        )
    except DeliveryError as error:
        return "nothing is bound for it" if isinstance(error.frame, Basic.Return) else "a queue refused it"
    return None
