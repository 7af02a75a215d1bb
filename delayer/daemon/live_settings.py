"""A running daemon's live settings, the policy that follows from them, and the deciding clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import structlog

from delayer.broker.pipelined_admin import PipelinedAdmin
from delayer.config.model import RetryTable, Settings
from delayer.config.topology import own_names, uses_cascade
from delayer.core.cascade import Cascade
from delayer.core.hold import Limits
from delayer.core.plan import Mode, Policy, Route
from delayer.core.publisher import Publisher
from delayer.core.retry_policy import RetryPolicy
from delayer.core.units import LATEST_MS
from delayer.format.envelope import Endpoints
from delayer.intake.handle import KEEP_MS
from delayer.store.backlog import PostgresBacklog

log = structlog.get_logger(__name__)

NATIVE_KEEP_MS: Final = 999
"""Messages due this soon are kept in memory in native mode, because the cascade counts whole seconds."""

UNREACHABLE: Final = "the store, which is unreachable"
SHARED: Final = (
    '[intake] consumers = "shared" cannot keep keys in order: see "The other value of consumers" in docs/operations.md'
)
"""Why messages with a key or a cancel are refused while several daemons consume the intake queue."""


def policy_of(settings: Settings, *, has_store: bool) -> Policy:
    """Build the policy that these settings describe."""
    routes = (
        Route(
            source=route.from_.encode(),
            to=route.to.encode(),
            routing_key=route.routing_key.encode(),
            routing_key_header=route.routing_key_header.encode(),
            delay_from=route.delay_from,
            default_delay_ms=route.default_delay_ms,
            require_delay=route.require_delay,
            key_from=route.key_from,
            allow_exchanges=route.allow_exchanges,
            exchange_from_reply_to=route.exchange_from_reply_to,
            late_limit_ms=route.late_limit_ms if route.late_action == "hold" else None,
            paced=route.max_rate > 0,
            retry=None if route.retry is None else _retry(route.retry),
        )
        for route in settings.routes
    )
    queues, exchanges = own_names(settings)
    return Policy(
        mode=Mode(settings.mode),
        routes={route.source: route for route in routes},
        max_delay_ms=settings.intake.max_delay_ms,
        park_beyond_ms=settings.store.park_beyond_ms,
        keep_ms=KEEP_MS if settings.mode == "store" else NATIVE_KEEP_MS,
        has_store=has_store,
        no_keys=SHARED if settings.intake.consumers == "shared" else "",
        own_queues=queues,
        own_exchanges=exchanges,
    )


def rates_of(settings: Settings) -> dict[bytes, float]:
    """Return the messages per second that all processes together may release from each limited route."""
    return {route.from_.encode(): float(route.max_rate) for route in settings.routes if route.max_rate}


def _retry(table: RetryTable) -> RetryPolicy:
    return RetryPolicy(
        table.first_ms, table.factor, table.longest_ms, table.jitter, table.attempts, table.exhausted.encode()
    )


class LiveSettings:
    """Satisfies IntakeSettings and ReleaseSettings. Read for every batch, so a reload applies from the next one on."""

    def __init__(self, settings: Settings, cascade: Cascade, publisher: Publisher, store: PostgresBacklog) -> None:
        self.settings = settings
        self._cascade = cascade
        self._publisher = publisher
        self._store = store
        self._policy = policy_of(settings, has_store=settings.store_url is not None)
        self.no_delays: str | None = ""
        """Why the broker does not delay messages itself; None if it does, and empty if it was not probed."""
        self._probing = asyncio.Lock()
        self._probed_connects: int | None = None
        self.rates: Mapping[bytes, float] = rates_of(settings)

    def adopt(self, settings: Settings) -> None:
        """Apply the live part of new settings from the next batch on."""
        self.settings = settings
        self._policy = policy_of(settings, has_store=self._store.configured)
        if self.no_delays is None:
            self._policy = replace(self._policy, longest_native_ms=LATEST_MS)
        self.rates = rates_of(settings)

    def add_routes(self, settings: Settings) -> None:
        """Accept messages of new routes before their bindings exist. :meth:`adopt` ends this."""
        new = policy_of(settings, has_store=self._store.configured).routes
        self._policy = replace(self._policy, routes={**new, **self._policy.routes})

    async def choose_strategy(self, broker: PipelinedAdmin, settings: Settings, connects: int) -> None:
        """If these settings use the cascade, probe whether the broker delays messages on time: once per connection, but
        repeatedly until it does if their strategy is "queue". From the next batch on, publish envelopes into the due
        queue, delayed by the broker, or into the cascade. Raises BrokerLost."""
        strategy = settings.native.strategy
        async with self._probing:
            if self._probed_connects == connects or not uses_cascade(settings) or strategy == "cascade":
                return
            self.no_delays = await broker.why_no_delays(self._cascade.delivery, self._cascade.probe) or None
            routes = self._policy.routes  # During a reload, also those of the new settings.
            self.adopt(self.settings)
            self._policy = replace(self._policy, routes=routes)
            if self.no_delays and strategy == "queue":
                return
            self._probed_connects = connects
            log.info("native strategy", strategy="cascade" if self.no_delays else "queue", reason=self.no_delays)

    def policy(self) -> Policy:
        """Return the policy of the next batch.

        In native mode, an unreachable store counts as no store: messages with a key are refused, because waiting would
        block the rest. In store mode, a broker that accepts no publishes does not stop the intake.
        """
        policy = self._policy
        # If the store is reached but has no lane for us, consuming waits for one.
        reached = self._store.usable or self._store.reached
        if self.settings.mode == "native":
            if policy.has_store and not reached:
                return replace(policy, has_store=False, no_store=UNREACHABLE)
            return policy
        return policy if self._publisher.ready else replace(policy, publishing=False)

    def late_limits(self) -> Limits:
        limits = ((route.source, route.late_limit_ms) for route in self._policy.routes.values())
        return {source: limit_ms for source, limit_ms in limits if limit_ms is not None}

    @property
    def holds_in_store(self) -> bool:
        """Whether held messages go to the store, because it has a lane for them or no message may enter the cascade."""
        return self._store.usable or not uses_cascade(self.settings)

    def names(self) -> Endpoints:
        """This daemon's exchanges and queues."""
        return Endpoints(
            levels=self._cascade,
            due_queue=self.settings.native.due_queue.encode(),
            refused_exchange=self.settings.refused.queue.encode(),
            max_properties=self._publisher.max_properties,
            broker_delays=self.no_delays is None,
        )

    def now_upper_ms(self) -> int:
        """Return the upper bound of the store's clock, or of this host's without a store."""
        stored = self._store.now_upper_ms()
        return -(-time.time_ns() // 1_000_000) if stored is None else stored

    def now_lower_ms(self) -> int:
        """Return the lower bound of the clock of :meth:`now_upper_ms`. By this bound a message is due, or not yet."""
        stored = self._store.now_lower_ms()
        return time.time_ns() // 1_000_000 if stored is None else stored
