"""The parts of a daemon that take over other systems' cascades, constructed from settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from delayer.broker.consumer import RelayConsumer
from delayer.broker.flow_control import Fitting, Inflow
from delayer.broker.relay import Relay
from delayer.core.cascade import LEVELS, Cascade
from delayer.services.counting import Counters
from delayer.services.ports import Parking, Pulse
from delayer.services.takeover import LevelTakeover
from delayer.settings import Settings

ALL_BYTES: Final = 16 << 20
"""Bytes that are read ahead from all levels together."""
BATCH_BYTES: Final = 1 << 20
"""Of one level; in two parks at a time, of each of some twenty levels."""


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
    """One for each level. ``relay`` is for them alone; they share it, and the bytes that wait here."""
    inflow, levels = Inflow(ALL_BYTES), list(levels_of(settings))

    def takeover(cascade: Cascade, level: int) -> LevelTakeover:
        fitting = Fitting(ALL_BYTES // len(levels))
        return LevelTakeover(
            cascade,
            level,
            consumer=RelayConsumer(relay, batch_bytes=BATCH_BYTES, inflow=inflow, fitting=fitting),
            parking=parking,
            prepare=prepare,
            now_ms=now_ms,
            pulse=pulse,
            counters=counters,
            reads_ahead=fitting.full,
        )

    return [takeover(cascade, level) for cascade, level in levels]
