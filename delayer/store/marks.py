"""Where the claims of a lane begin, while some routes are claimed apart from the others (core/pace.py).

Each scope has a mark of its own: a place before which the lane has no rows of that scope. So the rows that a limited
route keeps waiting are passed by the others once, and not again with every claim; nor again whenever something of that
route is parked behind them, as a restored service's backlog is for hours. And a scope whose own row is parked far
behind its mark reads to that row, and goes on where it was. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from delayer.core.pace import Scope

Place = tuple[int, int]
"""A due instant in microseconds, and an id: the order of claims."""
_EARLIEST_MS: Final = -(1 << 43)
"""Before every instant that a row can have, and within what SQL can add to an epoch."""
_LAST_ID: Final = (1 << 63) - 1
_NEVER_MS: Final = 1 << 60


def before(due_ms: int) -> Place:
    """The place before everything that is due at ``due_ms`` or later."""
    return max(due_ms, _EARLIEST_MS) * 1000 - 1, _LAST_ID


@dataclass(slots=True)
class Mark:
    """Where one scope is: no row of it is before ``place``, nor between ``until`` and ``far``. The three are one place,
    unless it is on its way through what it passed before."""

    place: Place
    until: Place
    far: Place
    behind: tuple[int, int] | None = None
    """The first and last due instant before ``far`` that were noted since its last claim began."""
    ahead: int | None = None
    """The first one at ``far`` or after it, that its claim may have passed without seeing it."""

    def passed(self, place: Place) -> None:
        """A claim read as far as ``place``."""
        if place >= self.until:
            self.place = self.until = self.far = max(place, self.far)
        else:
            self.place = place
        if self.ahead is not None:
            self._no_farther(self.ahead)
        if self.behind is not None:
            self._back(*self.behind)

    def note(self, first_ms: int, last_ms: int) -> None:
        """Rows were parked that are due in this span, which ends before ``far``, or begins there."""
        if before(first_ms) >= self.far:
            self.ahead = first_ms if self.ahead is None else min(first_ms, self.ahead)
            return
        known = self.behind or (first_ms, last_ms)
        self.behind = min(first_ms, known[0]), max(last_ms, known[1])
        self._back(first_ms, last_ms)

    def note_from(self, due_ms: int) -> None:
        """Rows were put here that are due then or at any time later."""
        self.ahead = due_ms if self.ahead is None else min(due_ms, self.ahead)
        self._no_farther(due_ms)

    @property
    def noted_ms(self) -> int:
        """The soonest that was noted since its last claim began."""
        firsts = (_NEVER_MS if self.behind is None else self.behind[0], _NEVER_MS if self.ahead is None else self.ahead)
        return min(firsts)

    def _back(self, first_ms: int, last_ms: int) -> None:
        last = before(last_ms + 1)
        self.until = max(last, self.until) if self.place < self.far else last
        self.place = min(before(first_ms), self.place)
        self._one_place_if_read()

    def _no_farther(self, due_ms: int) -> None:
        self.far = min(before(due_ms), self.far)
        self.place = min(self.place, self.far)
        self._one_place_if_read()

    def _one_place_if_read(self) -> None:
        if self.until >= self.far or self.place >= self.far:
            self.until = self.far = self.place


class Marks:
    """The marks of the scopes in use; none while nothing is claimed apart."""

    def __init__(self) -> None:
        self._marks: dict[Scope, Mark] = {}
        self._of_route: dict[bytes, Scope] = {}
        self._others: Scope | None = None

    def __bool__(self) -> bool:
        return bool(self._marks)

    def begin(self, scopes: Sequence[Scope], start_ms: int) -> None:
        """These scopes from now on, all from the same instant."""
        start = before(start_ms)
        self._marks = {scope: Mark(start, start, start) for scope in scopes}
        self._of_route = {route: scope for scope in scopes if scope.only for route in scope.routes}
        self._others = next((scope for scope in scopes if not scope.only), None)

    def again(self, start_ms: int) -> None:
        """All of them from this instant."""
        self.begin(tuple(self._marks), start_ms)

    def claims(self, scope: Scope) -> Place:
        """Where a claim of ``scope`` begins that is made now."""
        mark = self._marks[scope]
        mark.behind = mark.ahead = None
        return mark.place

    def passed(self, scope: Scope, place: Place) -> None:
        """Nothing of ``scope`` is before ``place``, but for what was noted since the claim."""
        if scope in self._marks:
            self._marks[scope].passed(place)

    def note(self, due_ms: int) -> None:
        """Rows were put here that are due then or later; of which scope is not said."""
        for mark in self._marks.values():
            mark.note_from(due_ms)

    def note_rows(self, rows: Iterable[tuple[bytes, int]]) -> None:
        """Rows were parked: their routes and due instants. Only the scopes that mean them look for them."""
        if not self._marks:
            return
        spans: dict[tuple[Scope, bool], tuple[int, int]] = {}
        for route, due_ms in rows:
            scope = self._of_route.get(route, self._others)
            if scope is None:
                continue
            # What is due where its scope has not been is found anyway, and would make the way back longer.
            span = scope, before(due_ms) >= self._marks[scope].far
            first, last = spans.get(span, (due_ms, due_ms))
            spans[span] = min(first, due_ms), max(last, due_ms)
        for (scope, _), (first, last) in spans.items():
            self._marks[scope].note(first, last)

    @property
    def fars(self) -> dict[Scope, Place]:
        """Where each scope has been, and has taken all that it was told of."""
        return {scope: mark.far for scope, mark in self._marks.items()}

    def missed(self, routes: Mapping[bytes, tuple[int, int]], fars: Mapping[Scope, Place]) -> int:
        """Rows of these routes were seen between these instants, after each scope had come as far as it says in
        ``fars``: whatever is before that was put there without a word. The soonest of those, if any."""
        soonest_ms = _NEVER_MS
        for route, (first_ms, last_ms) in routes.items():
            scope = self._of_route.get(route, self._others)
            far = None if scope is None else fars.get(scope)
            if scope is None or far is None or before(first_ms) >= far:
                continue
            self._marks[scope].note(first_ms, min(last_ms, far[0] // 1000))
            soonest_ms = min(first_ms, soonest_ms)
        return soonest_ms

    @property
    def noted_ms(self) -> int:
        """The soonest that was noted of what no limit keeps, since its last claim began: a claim of another scope did
        not take it."""
        return _NEVER_MS if self._others is None else self._marks[self._others].noted_ms

    @property
    def lowest_ms(self) -> int:
        """Nothing of any scope is before this."""
        return min(mark.place[0] for mark in self._marks.values()) // 1000

    @property
    def highest_ms(self) -> int:
        """Nothing is before this of the scope that came farthest."""
        return max(mark.place[0] for mark in self._marks.values()) // 1000
