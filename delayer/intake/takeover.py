"""Takes over another system's cascade: parks the messages of its upper levels, and releases them to the exchange where
that cascade ends.

The arguments of its level queues cannot be changed. RabbitMQ 4 dead-letters a message after about 20 deliveries from
them, which delivers it early. So a delivery is parked within moments or returned to its queue. Without a store the
daemon does not consume the levels. A message that keeps returning ends the consumption of its level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from delayer.amqp.properties import decoded, parsed
from delayer.amqp.values import Delivery
from delayer.core.cascade import Cascade
from delayer.core.counters import Counters
from delayer.core.errors import Rejected
from delayer.core.hold import unfit
from delayer.core.levels import LEVEL_HEADERS, due_at_level
from delayer.core.message import Parcel, Target
from delayer.intake.consume import Handler, Intake
from delayer.intake.handle import parcel
from delayer.intake.ports import Backlog, Clock
from delayer.intake.session import AckTracker, write_by_halves

log = structlog.get_logger(__name__)

PREFETCH: Final = 500
"""Messages read ahead from one level. The broker delivers these again when the store or the connection is lost."""
IN_FLIGHT: Final = 2
"""Batches of one level that are parked at the same time. There are many levels."""
GATHER: Final = 0.010
GIVE_BACK_AFTER: Final = 30.0
MOST_DELIVERIES: Final = 10
"""Half of what RabbitMQ 4 allows by default."""
_DELIVERIES: Final = b"x-delivery-count"
_WANTED: Final = LEVEL_HEADERS | {_DELIVERIES}


def intake_of(level_queue: str) -> Intake:
    """How a level's queue is read."""
    return Intake(level_queue, PREFETCH, GIVE_BACK_AFTER, batch=PREFETCH, gather=GATHER, in_flight=IN_FLIGHT)


@dataclass(eq=False)
class LevelTakeover(Handler):
    """Handles the deliveries of one level, until one of them has been delivered too often."""

    cascade: Cascade
    level: int
    backlog: Backlog
    clock: Clock
    counters: Counters

    def handle(self, batch: Sequence[Delivery]) -> None:
        self._session.start(self._park_batch(batch, self._session.acks))

    async def _park_batch(self, batch: Sequence[Delivery], acks: AckTracker) -> None:
        """Park a batch, and accept it. Raises StoreLost."""
        now_ms = self.clock.now_upper_ms()
        parcels = []
        for delivery in batch:
            headers = decoded(parsed(delivery.properties), _WANTED)
            if self._is_too_often(delivery, headers):
                acks.forget_kept(one.tag for one in batch)
                return  # The batch returns to its queue, and the daemon stops consuming the level.
            due_ms = due_at_level(self.cascade, self.level, delivery.routing_key, headers, now_ms)
            # Keep the digits of the key, because the bindings of that cascade begin with "#.".
            parcels.append(parcel(delivery, due_ms, Target(self.cascade.delivery.encode(), delivery.routing_key)))
        await write_by_halves(parcels, self._park, self._hold)
        acks.accept(delivery.tag for delivery in batch)

    async def _park(self, parcels: Sequence[Parcel]) -> None:
        await self.backlog.apply(parcels)
        self.counters.add("parked", [one.route for one in parcels])

    async def _hold(self, one: Parcel, rejected: Rejected) -> None:
        """Hold a message, because RabbitMQ drops one that returns to its level too often."""
        await self.backlog.hold([(one, unfit(str(rejected)))])

    def _is_too_often(self, delivery: Delivery, headers: dict[bytes, object]) -> bool:
        if not (delivery.redelivered and self.cascade.counts_deliveries):
            return False  # The count is another queue's, and a shovel or client passed the headers on.
        deliveries = headers.get(_DELIVERIES)
        if not isinstance(deliveries, int) or deliveries < MOST_DELIVERIES:
            return False
        if not self.is_over:
            log.error(
                "takeover stopped",
                queue=self.cascade.level(self.level),
                deliveries=deliveries,
                next_step="delayer check; restart",
            )
        self.is_over = True
        return True
