"""Topology and cascade from settings. (daemon/live_settings.py builds the policy.)"""

from __future__ import annotations

from delayer.config.model import DestinationTable, Settings
from delayer.core.cascade import LEVELS, Cascade, due_topology, intake_topology, parking_queue
from delayer.core.delay_headers import OWN_SOURCES
from delayer.core.topology import Binding, Exchange, Queue, Topology, arguments


def cascade_of(settings: Settings) -> Cascade:
    """The cascade that ``[native]`` names."""
    return Cascade(prefix=settings.native.prefix)


def uses_cascade(settings: Settings) -> bool:
    """Whether new delays may use the cascade."""
    return settings.mode == "native" or settings.store.park_beyond_ms > 0


def without_effect(settings: Settings) -> list[str]:
    """The routes whose ``max_rate`` has no effect, because in native mode their messages bypass the store."""
    return [route.from_ for route in settings.routes if route.max_rate and settings.mode == "native"]


def unread_delays(settings: Settings) -> dict[bytes, str]:
    """Exchanges whose routes do not read ``x-delay`` first, each with the reason why a new ``x-delay`` is ignored."""
    found: dict[bytes, str] = {}
    for route in settings.routes:
        forms = () if route.retry else route.delay_from
        first = next((form for form in forms if form == "x-delay" or form not in OWN_SOURCES), None)
        if first != "x-delay":
            why = f"reads {first} before x-delay" if "x-delay" in forms else "does not read x-delay"
            found[route.from_.encode()] = f"its route {why}: set another header"
    return found


def own_names(settings: Settings) -> tuple[frozenset[bytes], frozenset[bytes]]:
    """Queues and exchanges that no message may target, in either mode, as the cascade may still have old messages."""
    # Leave out the exchanges of other systems' cascades: an application may want to deliver there.
    ours = [native_of(settings), *(cascade.topology() for cascade in _cascades(settings))]
    exchanges = {exchange.name for one in ours for exchange in one.exchanges if not exchange.shared}
    return frozenset(map(str.encode, queues_at_work(settings))), frozenset(map(str.encode, exchanges))


def takeovers_of(settings: Settings) -> dict[Cascade, list[str]]:
    """The cascades of other systems, each with the queues that the daemon empties."""
    cascades = ((Cascade(table.cascade, owner=table.prefix), table.levels_from) for table in settings.takeovers)
    return {cascade: [cascade.level(level) for level in range(first, LEVELS)] for cascade, first in cascades}


def _cascades(settings: Settings) -> dict[Cascade, str]:
    """The cascades that a daemon may fill or empty, and the configuration key that names each."""
    return dict.fromkeys(takeovers_of(settings), "takeover.cascade") | {cascade_of(settings): "native.prefix"}


def queues_at_work(settings: Settings) -> dict[str, str]:
    """The queues that a daemon fills and empties in either mode, and the configuration key of each."""
    found = {
        settings.intake.queue: "intake.queue",
        settings.refused.queue: "refused.queue",
        settings.native.due_queue: "native.due_queue",
    }
    for cascade, key in _cascades(settings).items():
        names = [level.name for level in cascade.levels()] + ([cascade.strays] if cascade.strays else [])
        found = dict.fromkeys(names, key) | found
    return found


def sources_of(settings: Settings) -> Topology:
    """Intake and refused queues, and the exchanges of the routes."""
    table, sources = settings.intake, [route.from_ for route in settings.routes]
    classic, shared = table.queue_type == "classic", table.consumers == "shared"
    return intake_topology(table.queue, settings.refused.queue, sources, classic=classic, shared=shared)


def intake_of(settings: Settings) -> Topology:
    """The topology of every mode: :func:`sources_of`, and queues for exhausted retries."""
    ends = dict.fromkeys(route.retry.exhausted for route in settings.routes if route.retry is not None)
    return sources_of(settings) + Topology(queues=tuple(parking_queue(name) for name in ends))


def destinations_of(settings: Settings) -> Topology:
    """The topology that delayer declares for its users."""
    return sum(map(destination_of, settings.destinations), Topology())


def destination_of(one: DestinationTable) -> Topology:
    """One destination. It is shared, so delayer never removes it."""
    exchanges = (Exchange(one.exchange, one.type, shared=True),) if one.exchange else ()
    queues = (Queue(one.queue, arguments({"x-queue-type": one.queue_type}), shared=True),) if one.queue else ()
    keys = one.keys or ("#" if one.type == "topic" else one.queue,)
    bindings = [Binding(one.exchange, one.queue, "queue", key) for key in keys if one.exchange and one.queue]
    return Topology(exchanges, queues, tuple(bindings))


def native_of(settings: Settings) -> Topology:
    """What native mode adds to the topology: the cascade, and the daemon's own queue at its end."""
    cascade = cascade_of(settings)
    return cascade.topology() + due_topology(cascade, settings.native.due_queue, settings.refused.queue)


def topology_of(settings: Settings) -> Topology:
    """Everything that this configuration needs on the broker."""
    whole = intake_of(settings) + destinations_of(settings)
    return whole + native_of(settings) if uses_cascade(settings) else whole
