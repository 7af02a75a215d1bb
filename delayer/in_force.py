"""What is in force in a running daemon just now: its settings, what follows from them, and the clock that rules."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from delayer.broker.publisher import RelayPublisher
from delayer.core.cascade import Cascade
from delayer.core.hold import Limits
from delayer.core.plan import Policy
from delayer.policies import policy_of, rates_of
from delayer.services.envelopes import Names
from delayer.services.lane_manager import LaneManager
from delayer.settings import Settings
from delayer.wiring import uses_cascade


class InForce:
    """Asked for every batch, so that a reload rules from the next one on."""

    def __init__(self, settings: Settings, cascade: Cascade, publisher: RelayPublisher, lanes: LaneManager) -> None:
        self.settings = settings
        self._cascade = cascade
        self._publisher = publisher
        self._lanes = lanes
        self._policy = policy_of(settings, has_store=settings.store_url is not None)
        self.rates: Mapping[bytes, float] = rates_of(settings)

    def adopt(self, settings: Settings) -> None:
        """Let the live part of new settings rule from the next batch on."""
        self.settings = settings
        self._policy = policy_of(settings, has_store=self._lanes.configured)
        self.rates = rates_of(settings)

    def policy(self) -> Policy:
        """In native mode a store that is out of reach is no store: a message with a key is refused, with that reason,
        where waiting for the store would stop everybody. In store mode a broker that takes no publishes is no reason to
        take nothing in."""
        policy = self._policy
        # Without a lane in a store that is reached, consuming waits for one.
        reached = self._lanes.usable or self._lanes.reached
        if self.settings.mode == "native":
            return replace(policy, has_store=False) if policy.has_store and not reached else policy
        return policy if self._publisher.ready else replace(policy, publishing=False)

    def late_limits(self) -> Limits:
        """Of the routes that have one."""
        limits = ((route.source, route.late_limit_ms) for route in self._policy.routes.values())
        return {source: limit_ms for source, limit_ms in limits if limit_ms is not None}

    @property
    def holds_in_store(self) -> bool:
        """See ports.Live. Without the cascade there is no other place than the store."""
        return self._lanes.usable or not uses_cascade(self.settings)

    def restore_ahead_ms(self) -> int:
        """How long before it is due a segment is restored."""
        return self.settings.store.restore_ahead_ms

    def names(self) -> Names:
        """What the messages of this daemon are published to, and by."""
        return Names(
            levels=self._cascade,
            due_queue=self.settings.native.due_queue.encode(),
            refused_exchange=self.settings.refused.queue.encode(),
            max_properties=self._publisher.max_properties,
        )

    def now_ms(self) -> int:
        """The clock that rules: the store's where there is one, else this host's; rounded up, so never early."""
        stored = self._lanes.now_ms()
        return -(-time.time_ns() // 1_000_000) if stored is None else stored

    def sure_ms(self) -> int:
        """The same clock, rounded down: what is due by this one is due."""
        stored = self._lanes.sure_ms()
        return time.time_ns() // 1_000_000 if stored is None else stored
