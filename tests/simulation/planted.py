"""Bugs to plant into a daemon, to see whether a simulation finds them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from delayer.amqp.values import CONFIRMED, Outgoing
from delayer.broker.publisher import AmqpPublisher
from delayer.daemon.live_settings import LiveSettings


def without_confirms() -> None:
    """The publisher reports a confirm as soon as it has begun to publish."""
    publish = AmqpPublisher.publish
    running: set[asyncio.Task[Any]] = set()

    async def hasty(self: AmqpPublisher, batch: Sequence[Outgoing], *rest: Any) -> list[Any]:
        task = asyncio.create_task(publish(self, batch, *rest))
        running.add(task)
        task.add_done_callback(lambda done: (running.discard(done), done.cancelled() or done.exception()))
        await asyncio.sleep(0)
        return [CONFIRMED] * len(batch)

    AmqpPublisher.publish = hasty  # type: ignore[method-assign]


def a_clock_ahead() -> None:
    """The daemon takes a message as due 0.2 s before it is."""
    now_ms = LiveSettings.now_lower_ms
    LiveSettings.now_lower_ms = lambda self: now_ms(self) + 200  # type: ignore[method-assign]


PLANTED: Final[dict[str, Callable[[], None]]] = {one.__name__: one for one in (without_confirms, a_clock_ahead)}
