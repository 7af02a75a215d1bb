"""From settings to the values that the layers below understand: policy, cascade, topology."""

from __future__ import annotations

from delayer.core.cascade import Cascade, due_topology, intake_topology, parking_queue
from delayer.core.plan import Finish, Mode, Policy, Route
from delayer.core.retrying import Retry
from delayer.core.topology import Binding, Exchange, Queue, Topology, arguments
from delayer.settings import Retry as RetryTable
from delayer.settings import Settings


def cascade_of(settings: Settings) -> Cascade:
    """The cascade that ``[native]`` names."""
    return Cascade(settings.native.cascade, settings.native.prefix)


def uses_cascade(settings: Settings) -> bool:
    """Whether new delays may take the cascade."""
    return settings.mode == "native" or settings.store.park_beyond_ms > 0


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
            finish=Finish(route.finish),
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
    """How many messages a second each limited route may release in this process: the workers share the limit."""
    limited = (route for route in settings.routes if route.max_rate)
    return {route.from_.encode(): route.max_rate / settings.workers for route in limited}


def _retry(table: RetryTable) -> Retry:
    return Retry(table.first_ms, table.factor, table.longest_ms, table.jitter, table.attempts, table.exhausted.encode())


def own_names(settings: Settings) -> tuple[frozenset[bytes], frozenset[bytes]]:
    """Queues and exchanges that no message may name as its destination, whichever mode is in force: messages may be on
    their way through a cascade that new delays do not take any more."""
    native = native_of(settings)
    queues = {settings.intake.queue, *(queue.name for queue in native.queues)}
    # A shared cascade is somebody else's, and delivering into it may be what somebody wants.
    exchanges = {exchange.name for exchange in native.exchanges if not exchange.shared}
    return frozenset(map(str.encode, queues)), frozenset(map(str.encode, exchanges))


def intake_of(settings: Settings) -> Topology:
    """What every mode needs: the intake queue, the refused queue, the exchanges of the routes, the ends of retries."""
    intake = intake_topology(settings.intake.queue, settings.refused.queue, [route.from_ for route in settings.routes])
    ends = dict.fromkeys(route.retry.exhausted for route in settings.routes if route.retry is not None)
    return intake + Topology(queues=tuple(parking_queue(name) for name in ends))


def destinations_of(settings: Settings) -> Topology:
    """What the configuration asks to be declared for others; shared, so that it is never removed."""
    whole = Topology()
    for one in settings.destinations:
        exchanges = (Exchange(one.exchange, one.type, shared=True),) if one.exchange else ()
        queues = (Queue(one.queue, arguments({"x-queue-type": one.queue_type}), shared=True),) if one.queue else ()
        keys = one.keys or ("#" if one.type == "topic" else one.queue,)
        bindings = [Binding(one.exchange, one.queue, "queue", key) for key in keys if one.exchange and one.queue]
        whole += Topology(exchanges, queues, tuple(bindings))
    return whole


def native_of(settings: Settings) -> Topology:
    """What native mode needs besides: the cascade, and the daemon's own queue at its end."""
    cascade = cascade_of(settings)
    return cascade.topology() + due_topology(cascade, settings.native.due_queue, settings.refused.queue)


def topology_of(settings: Settings) -> Topology:
    """All that this configuration needs on the broker."""
    whole = intake_of(settings) + destinations_of(settings)
    return whole + native_of(settings) if uses_cascade(settings) else whole
