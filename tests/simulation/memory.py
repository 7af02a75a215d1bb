"""Bounded memory: collections in the objects of a daemon stay within the bounds that their modules state, and those of
messages in flight are empty once none is in flight."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from delayer.broker.isolation import MAX_EXCHANGES
from delayer.broker.publisher import MAX_BATCH
from delayer.config.model import Settings
from delayer.core.counters import MOST_DESTINATIONS
from delayer.intake.handle import PARK_MESSAGES
from delayer.release.loop import CLAIM_MESSAGES, MOST_CONFIRMED
from delayer.store.inbox import MOST_POSTPONED, MOST_RANGES
from delayer.store.lanes.settling import MOST_COUNTED
from tests.simulation.world import Node

EACH_SECONDS: Final = 10
"""Between two checks, which cost some milliseconds."""
FEW: Final = 200
"""The bound of each collection without a bound of its own."""
MOST_BREAKERS: Final = 10_000
REST_SECONDS: Final = 60.0
"""A daemon has so long to reconnect, and to forget what it had in flight before."""
_COLLECTIONS: Final = (list, dict, set, deque)
IN_FLIGHT: Final = frozenset({
    "AckTracker._accepted", "AckTracker._kept", "AckTracker._order", "AckTracker._single", "AmqpPublisher._tokens",
    "AmqpSubscription._buffer", "Confirms._runs", "DueHandler._slots", "InboxHandler._gathered", "InboxHandler._slots",
    "InboxSubscription._rows", "InboxSubscription._settled", "IntakeHandler._gathered", "IntakeHandler._slots",
    "Parser._contents", "Session._lost", "Session._punctual", "Session._tasks",
})  # fmt: skip


def bounds_of(settings: Settings) -> dict[str, int]:
    """The bounds of the collections that may be large, by class, or by class and attribute."""
    prefetch = settings.intake.prefetch
    of_prefetch = ("AckTracker", "AmqpSubscription._buffer", "InboxSubscription._rows", "InboxSubscription._settled")
    return {
        **dict.fromkeys(of_prefetch, prefetch),
        **dict.fromkeys(("IntakeHandler._gathered", "InboxHandler._gathered"), PARK_MESSAGES + prefetch),
        **dict.fromkeys(("BatchPlan", "Fold"), PARK_MESSAGES + prefetch),
        **dict.fromkeys(("Batch", "Pace", "Pending", "_Case", "AmqpPublisher._tokens"), MAX_BATCH),
        **dict.fromkeys(("Claim", "Settlement"), CLAIM_MESSAGES),
        **dict.fromkeys(("Daemon._confirmed", "LaneRelease.confirmed"), MOST_CONFIRMED),
        "CircuitBreaker.table": MOST_BREAKERS,
        "Counters.released_to": MOST_DESTINATIONS,
        "Isolation.exchanges": MAX_EXCHANGES,
        "OpenRanges._ranges": MOST_RANGES,
        "Postponed.ids": MOST_POSTPONED,
        "SkippedRows._times": MOST_COUNTED,
    }


def is_within(bounds: Mapping[str, int], name: str, size: int) -> bool:
    """Whether a collection of this name may have this size."""
    return size <= bounds.get(name, bounds.get(name.partition(".")[0], FEW))


def check(node: Node) -> None:
    """Raises AssertionError."""
    bounds = bounds_of(node.settings)
    large = {name: size for name, size in sizes(_roots(node)).items() if not is_within(bounds, name, size)}
    assert not large, f"{node.host} keeps more than it may: {large}"


async def check_rest(node: Node) -> None:
    """Wait until nothing is in flight. Raises AssertionError."""
    ends = asyncio.get_running_loop().time() + REST_SECONDS
    while left := {name: size for name, size in sizes(_roots(node)).items() if size and name in IN_FLIGHT}:
        assert asyncio.get_running_loop().time() < ends, f"{node.host} still keeps {left}"
        await asyncio.sleep(1.0)


def sizes(roots: Iterable[object]) -> dict[str, int]:
    """The largest size of each collection that these objects lead to, by class and attribute."""
    found: dict[str, int] = {}
    left, seen = [*roots], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen or not _leads_on(one):
            continue
        seen.add(id(one))
        if isinstance(one, _COLLECTIONS):
            left += one.values() if isinstance(one, dict) else one
        elif isinstance(one, asyncio.Task):
            left += _locals_of(one)
        else:
            for name, value in _attributes_of(one):
                left.append(value)
                if isinstance(value, _COLLECTIONS):
                    name = f"{type(one).__qualname__}.{name}"  # noqa: PLW2901
                    found[name] = max(found.get(name, 0), len(value))
    return found


def _roots(node: Node) -> Iterator[object]:
    """The daemon, and its tasks. Nothing if it is not there."""
    if node._running.done():
        return
    yield node.daemon
    ours = node.tasks()
    assert len(ours) <= FEW, f"{node.host} has {len(ours)} tasks: {sorted(task.get_name() for task in ours)}"
    yield from ours


def _leads_on(one: object) -> bool:
    return isinstance(one, (*_COLLECTIONS, asyncio.Task)) or type(one).__module__.startswith("delayer.")


def _locals_of(task: asyncio.Task[Any]) -> Iterator[object]:
    """What the suspended functions of a task refer to, from the outermost to the innermost."""
    awaited: Any = task.get_coro()
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        yield from frame.f_locals.values()
        awaited = awaited.cr_await


def _attributes_of(one: object) -> Iterator[tuple[str, object]]:
    yield from getattr(one, "__dict__", {}).items()
    for base in type(one).__mro__:
        for name in vars(base).get("__slots__", ()):
            if hasattr(one, name):
                yield name, getattr(one, name)
