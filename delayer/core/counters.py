"""What this process did since its start: plain numbers, for the last line of its life and for metrics.

Everything is entered once for each batch, and what is entered message by message (a route, a lateness) costs a step of
a loop in C: the hot path must not feel that somebody counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from delayer.core.horizon import LATENESS, SECONDS, SIZES, Tally
from delayer.core.message import ClosedChannel, ClosedConnection, Nacked, Outcome, Returned

KINDS: Final = (
    "parked",
    "released",
    "cascaded",
    "refused",
    "held",
    "cancelled",
    "restored",
    "broken_segments",
)
BY_ROUTE: Final = ("parked", "released", "cascaded", "refused", "held", "returned", "nacked")
"""What is counted for each route as well."""
MOST_ROUTES: Final = 200
"""Routes that are told apart. Whoever may publish to the refused queue's side of things could invent names for ever."""
OTHERS: Final = b"(others)"

DURATIONS: Final = ("claim", "settle", "park", "publish")
STAGES: Final = ("intake", "park", "claim", "publish")


class Counters:
    """Counts by name; a name outside the tables above is a programming error."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self.routes: dict[str, Counter[bytes]] = {kind: Counter() for kind in BY_ROUTE}
        self.lateness: dict[bytes, Tally] = {}
        self.seconds: Mapping[str, Tally] = {name: Tally(SECONDS) for name in DURATIONS}
        self.sizes: Mapping[str, Tally] = {name: Tally(SIZES) for name in STAGES}
        self.lanes_lost = 0
        self._known: set[bytes] = set()

    def add(self, kind: str, count: int) -> None:
        if kind not in self._counts:
            raise KeyError(f"counter: expected one of {', '.join(KINDS)}, found {kind!r}")
        self._counts[kind] += count

    def add_routes(self, kind: str, routes: Iterable[bytes]) -> None:
        """Enter one message of each of ``routes``; a route comes as often as it has messages."""
        found = Counter(routes)
        ours = self.routes[kind]
        for route, count in found.items():
            ours[self._told_apart(route)] += count

    def objected(self, outcome: Outcome, route: bytes) -> None:
        """Enter a publish that was returned or nacked; one that closed something counts as returned."""
        if isinstance(outcome, Nacked):
            self.add_routes("nacked", [route])
        elif isinstance(outcome, Returned | ClosedChannel | ClosedConnection):
            self.add_routes("returned", [route])

    def delivered(self, messages: Sequence[tuple[int, bytes]], now_ms: int) -> None:
        """Enter how late messages went out, each with its due instant and its route. In the order of their instants, or
        nearly: what comes out of order is sorted."""
        by_route: dict[bytes, list[int]] = {}
        for due_ms, route in messages:
            by_route.setdefault(route, []).append(due_ms)
        for route, dues_ms in by_route.items():
            dues_ms.sort()
            route = self._told_apart(route)  # noqa: PLW2901
            if route not in self.lateness:
                self.lateness[route] = Tally(LATENESS)
            self.lateness[route].add_lateness(dues_ms, now_ms)

    def took(self, what: str, seconds: float) -> None:
        """``what`` of :data:`DURATIONS` took so long."""
        self.seconds[what].add(seconds)

    def batch(self, stage: str, messages: int) -> None:
        """A batch of ``messages`` went through ``stage`` of :data:`STAGES`."""
        self.sizes[stage].add(messages)

    def as_dict(self) -> Mapping[str, int]:
        return dict(self._counts)

    def figures(self) -> dict[str, Any]:
        """Everything that metrics and the page show."""
        return {
            "counts": self.as_dict(),
            "lanes_lost": self.lanes_lost,
            "routes": {
                kind: {shown(route): count for route, count in counts.items()} for kind, counts in self.routes.items()
            },
            "lateness": {shown(route): _figures(tally) for route, tally in self.lateness.items()},
            "seconds": {name: _figures(tally) for name, tally in self.seconds.items()},
            "sizes": {name: _figures(tally) for name, tally in self.sizes.items()},
        }

    def _told_apart(self, route: bytes) -> bytes:
        if route not in self._known:
            if len(self._known) >= MOST_ROUTES:
                return OTHERS
            self._known.add(route)
        return route


def shown(name: bytes) -> str:
    """A name of the broker as text; what is no UTF-8 as escapes."""
    return name.decode("utf-8", "backslashreplace")


def _figures(tally: Tally) -> dict[str, Any]:
    return {"bounds": tally.bounds, "below": list(tally.below), "count": tally.count, "total": tally.total}
