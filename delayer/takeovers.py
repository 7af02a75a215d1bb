"""The parts of a daemon that take over other systems' cascades, constructed from settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

from delayer.broker.consumer import RelayConsumer
from delayer.broker.relay import Relay
from delayer.core.cascade import LEVELS, Cascade
from delayer.services.counting import Counters
from delayer.services.ports import Parking, Pulse
from delayer.services.takeover import LevelTakeover
from delayer.settings import Settings


def levels_of(settings: Settings) -> Iterator[tuple[Cascade, int]]:
    """The levels that are taken over, the longest first."""
    for table in settings.takeovers:
        cascade = Cascade(table.cascade, owner=table.prefix)
        for level in reversed(range(table.levels_from, LEVELS)):
            yield cascade, level


def takeovers_of(
    settings: Settings,
    relay: Relay,
    *,
    parking: Parking,
    prepare: Callable[[], Awaitable[None]],
    now_ms: Callable[[], int],
    pulse: Pulse,
    counters: Counters,
) -> list[LevelTakeover]:
    """One for each level. ``relay`` is for them alone: pausing one queue must not pause another's."""
    consumer = RelayConsumer(relay)
    return [
        LevelTakeover(
            cascade,
            level,
            consumer=consumer,
            parking=parking,
            prepare=prepare,
            now_ms=now_ms,
            pulse=pulse,
            counters=counters,
        )
        for cascade, level in levels_of(settings)
    ]
