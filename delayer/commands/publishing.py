"""Publishing for people, over the admin's connection: the first message alone, which shows what the broker thinks of
such a message, and the others in windows, each confirmed before the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Final

from aiormq.channel import Channel as Wire
from aiormq.exceptions import ChannelNotFoundEntity, DeliveryError
from pamqp.commands import Basic

from delayer.broker.link import Link

SECONDS = 30.0
WINDOW: Final = 500
"""Messages that wait for their confirms at once, at most."""
WINDOW_BYTES: Final = 8 << 20
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


async def publish(
    url: str, message: Message, count: int, id_of: Callable[[int], str], say: Callable[[int], None]
) -> Untaken | None:
    """Publish ``message`` so many times, under these ids; stop with the first window of which one is not taken, and say
    which, and why. ``say`` hears how many are confirmed.

    Raises BrokerUnreachable, BrokerRefused.
    """
    window = max(min(WINDOW, WINDOW_BYTES // max(len(message.body), 1)), 1)
    link = await Link.open(url, name="delayer send", patience=SECONDS)
    confirmed = 0
    try:
        while confirmed < count:
            ids = [id_of(number) for number in range(confirmed, min(confirmed + (window if confirmed else 1), count))]
            reasons = await link.call(partial(_publish_all, message=message, ids=ids))
            confirmed += sum(reason is None for reason in reasons)
            say(confirmed)
            for message_id, reason in zip(ids, reasons, strict=True):
                if reason is not None:
                    return Untaken(message_id, reason)
    finally:
        await link.close()
    return None


async def _publish_all(channel: Wire, message: Message, ids: Sequence[str]) -> list[str | None]:
    """For each None when it is confirmed, else the reason why not. Raises the first error that is no answer to one."""
    publishes = [_publish(channel, message, message_id) for message_id in ids]
    outcomes = await asyncio.gather(*publishes, return_exceptions=True)  # all have ended then, whatever one came to
    if any(isinstance(one, ChannelNotFoundEntity) for one in outcomes):
        missing = f'exchange "{message.exchange}" does not exist'
        return [missing if isinstance(one, BaseException) else one for one in outcomes]
    for one in outcomes:
        if isinstance(one, BaseException):
            raise one
    return [one for one in outcomes if not isinstance(one, BaseException)]


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
            wait=False,  # for the socket: the window is all that waits
        )
    except DeliveryError as error:
        return "nothing is bound for it" if isinstance(error.frame, Basic.Return) else "a queue refused it"
    return None
