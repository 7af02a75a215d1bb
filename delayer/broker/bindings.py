"""Binding queues to the delivery exchange, for messages that the broker takes out of the cascade by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from delayer.broker.admin import Admin
from delayer.broker.errors import BrokerRefused, BrokerUnreachable
from delayer.core.cascade import Cascade, delivery_binding

log = structlog.get_logger(__name__)

TRUSTED: Final = 30.0
"""Seconds for which a binding is taken to exist. A queue that is deleted and declared again loses its binding; it is
back this long after the next message for it, and what came out of the cascade meanwhile stands in the strays queue."""
TRUSTED_SHARED: Final = 1.0
"""The same for a cascade that is shared: it has no strays queue, and about 32 unroutable messages stop a level."""
REMEMBERED: Final = 10_000


class DeliveryBindings:
    """Satisfies ports.Bindings. One administrative connection, opened when first needed and again after a loss."""

    def __init__(self, connect: Callable[[], Awaitable[Admin]], cascade: Cascade) -> None:
        self._connect = connect
        self._exchange = cascade.delivery
        self._trusted_seconds = TRUSTED_SHARED if cascade.shared else TRUSTED
        self._admin: Admin | None = None
        self._bound_at: dict[bytes, float] = {}
        self._one_at_a_time = asyncio.Lock()

    async def bound(self, queue: bytes) -> bool:
        """See ports.Bindings. Asks the broker only for queues that it was not asked about lately."""
        if self._trusted(queue):
            return True
        async with self._one_at_a_time:
            return self._trusted(queue) or await self._bind(queue)

    async def close(self) -> None:
        """Close the connection. Safe to call twice."""
        admin, self._admin = self._admin, None
        if admin is not None:
            await admin.close()

    def _trusted(self, queue: bytes) -> bool:
        bound_at = self._bound_at.get(queue)
        return bound_at is not None and time.monotonic() - bound_at < self._trusted_seconds

    async def _bind(self, queue: bytes) -> bool:
        name = queue.decode()  # core.cascade.bindable() let only UTF-8 pass
        try:
            if self._admin is None:
                self._admin = await self._connect()
            bound = await self._admin.bind_queue(name, self._exchange, delivery_binding(name))
        except BrokerUnreachable:
            await self.close()
            raise
        except BrokerRefused as refused:
            # Of this queue, or of this user: either way the daemon can still finish by itself, and nobody is stopped.
            log.warning("binding refused", queue=name, reason=str(refused))
            return False
        if bound:
            if len(self._bound_at) >= REMEMBERED:
                self._bound_at.clear()
            self._bound_at[queue] = time.monotonic()
        return bound
