"""From settings to what the daemon decides by. Apart from wiring.py, as no command decides anything."""

from __future__ import annotations

from delayer.core.plan import Mode, Policy, Route
from delayer.core.retrying import Retry
from delayer.settings import Retry as RetryTable
from delayer.settings import Settings
from delayer.wiring import own_names


def policy_of(settings: Settings, *, has_store: bool) -> Policy:
    """What decisions depend on."""
    routes = (
        Route(
            source=route.from_.encode(),
            to=route.to.encode(),
            routing_key=route.routing_key.encode(),
            delay_from=route.delay_from,
            default_delay_ms=route.default_delay_ms,
            allow_exchanges=route.allow_exchanges,
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
        intake_queue=settings.intake.queue.encode(),
        max_delay_ms=settings.intake.max_delay_ms,
        park_beyond_ms=settings.store.park_beyond_ms,
        has_store=has_store,
        own_queues=queues,
        own_exchanges=exchanges,
    )


def rates_of(settings: Settings) -> dict[bytes, float]:
    """How many messages a second each limited route may release, by all processes together."""
    return {route.from_.encode(): float(route.max_rate) for route in settings.routes if route.max_rate}


def _retry(table: RetryTable) -> Retry:
    return Retry(table.first_ms, table.factor, table.longest_ms, table.jitter, table.attempts, table.exhausted.encode())
