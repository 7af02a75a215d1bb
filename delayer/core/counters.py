"""Counters of this process since its start, for the last log line and for metrics. Callers add once per batch. Counting
must not slow the hot path, so values of single messages (a route, a lateness) cost one step of a loop in C."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from delayer.amqp.values import Pace
from delayer.core.hold import Hold, HoldKind, Outcome

ROUTE_KINDS: Final = ("parked", "released", "cascaded", "refused", "held", "returned", "nacked", "undelayed")
MOST_ROUTES: Final = 15
"""Limit of routes with their own counters, unless configured. Any publisher to the refused exchange could invent route
names."""
OTHERS: Final = b"(others)"
MOST_DESTINATIONS: Final = 1_000
"""Limit of destinations with their own counters: the first that this process released to."""

DURATIONS: Final = ("claim", "settle", "park", "publish", "loop_lag")
STAGES: Final = ("intake", "park", "claim", "publish")


SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Bounds in seconds for a statement, a commit, a round of confirms, or a stall of the event loop."""
LATENESS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 7200.0, 14400.0,
    43200.0, 86400.0,
)  # fmt: skip
SIZES: Final = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0)

Counted = tuple[str, bytes, int | None]
"""A published message: its kind once confirmed, its route, and its due time. The due time is None if the message has no
lateness: it was due already when it arrived, was held before, or is on its way into the cascade."""


class Tally:
    """A histogram. ``below[i]`` values were at most ``bounds[i]``; ``count`` is their number, ``total`` their sum."""

    __slots__ = ("below", "bounds", "count", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.below = [0] * len(self.bounds)
        self.count = 0
        self.total = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        for at in range(bisect_left(self.bounds, value), len(self.below)):
            self.below[at] += 1

    def add_lateness(self, late_ms: list[float]) -> None:
        """Add values in milliseconds to bounds in seconds. Sorts ``late_ms``. Messages not due yet count as on time,
        because clocks differ by a millisecond.

        >>> tally = Tally((0.005, 0.1, 1.0))
        >>> tally.add_lateness([1000, 100, 2, -1])
        >>> tally.below, tally.count, round(tally.total, 3)
        ([2, 3, 4], 4, 1.102)
        """
        late_ms.sort()
        self.count += len(late_ms)
        self.total += sum(late_ms[bisect_right(late_ms, 0) :]) / 1000
        for at, bound in enumerate(self.bounds):
            self.below[at] += bisect_right(late_ms, bound * 1000)


class Counters:
    """Counts of messages by kind and route. Raises KeyError for a name outside the tables above.

    The first ``most_routes`` routes have their own counters, and the rest share those of OTHERS.
    """

    def __init__(self, most_routes: int = MOST_ROUTES) -> None:
        self._most_routes = most_routes
        self.routes: dict[str, Counter[bytes]] = {kind: Counter() for kind in ROUTE_KINDS}
        self.lateness: dict[bytes, Tally] = {}
        self.seconds: Mapping[str, Tally] = {name: Tally(SECONDS) for name in DURATIONS}
        self.sizes: Mapping[str, Tally] = {name: Tally(SIZES) for name in STAGES}
        self.released_to: Counter[tuple[bytes, bytes]] = Counter()
        self.restored = 0
        self.broken_segments = 0
        self.lanes_lost = 0
        self._known: set[bytes] = set()

    def add(self, kind: str, routes: Iterable[bytes]) -> None:
        """Add one message for each entry of ``routes``."""
        ours = self.routes[kind]
        for route, count in Counter(routes).items():
            ours[self.name_of(route)] += count

    def settled(
        self, messages: Iterable[Counted], outcomes: Iterable[Outcome | None], pace: Pace, now_ms: float
    ) -> None:
        """Count a batch's outcomes, and the lateness of its confirmed messages. Messages missing from the pace were
        confirmed at ``now_ms``. An outcome that closed a channel or connection counts as returned."""
        confirmed: dict[str, list[bytes]] = {}
        late: list[tuple[float, bytes]] = []
        for index, ((kind, route, due_ms), outcome) in enumerate(zip(messages, outcomes, strict=True)):
            if isinstance(outcome, Hold):
                if outcome.kind is not HoldKind.UNANSWERED:
                    self.add("nacked" if outcome.kind is HoldKind.NACKED else "returned", [route])
            elif outcome is not None:
                confirmed.setdefault(kind, []).append(route)
                if due_ms is not None:
                    late.append((pace.written_ms.get(index, now_ms) - due_ms, route))
        for kind, routes in confirmed.items():
            self.add(kind, routes)
        self.delivered(late)

    def sent(self, targets: Iterable[tuple[bytes, bytes]]) -> None:
        """Add one released message for each exchange and routing key of ``targets``."""
        for target, count in Counter(targets).items():
            if target in self.released_to or len(self.released_to) < MOST_DESTINATIONS:
                self.released_to[target] += count

    def delivered(self, messages: Sequence[tuple[float, bytes]]) -> None:
        """Add the lateness of delivered messages, as (milliseconds, route) in any order."""
        by_route: dict[bytes, list[float]] = {}
        for late_ms, route in messages:
            by_route.setdefault(route, []).append(late_ms)
        for route, all_late_ms in by_route.items():
            route = self.name_of(route)  # noqa: PLW2901
            if route not in self.lateness:
                self.lateness[route] = Tally(LATENESS)
            self.lateness[route].add_lateness(all_late_ms)

    def took(self, what: str, seconds: float) -> None:
        """Add the duration of one ``what`` of :data:`DURATIONS`."""
        self.seconds[what].add(seconds)

    def took_to_confirm(self, pace: Pace) -> None:
        """Add the time since the last message of a pace was written, if one was. Call it when the publish has ended."""
        if pace.written_ms:
            self.took("publish", max(pace.now_ms() - max(pace.written_ms.values()), 0.0) / 1000)

    def batch(self, stage: str, messages: int) -> None:
        """Add the size of a batch of ``stage``, one of :data:`STAGES`."""
        self.sizes[stage].add(messages)

    def as_dict(self) -> Mapping[str, int]:
        """Totals over all routes, and the counts of segments."""
        totals = {kind: routes.total() for kind, routes in self.routes.items()}
        return totals | {"restored": self.restored, "broken_segments": self.broken_segments}

    def name_of(self, route: bytes) -> bytes:
        """The name that the route is counted under: its own, which it keeps, or OTHERS."""
        if route not in self._known:
            if len(self._known) >= self._most_routes:
                return OTHERS
            self._known.add(route)
        return route
