"""Where the claims of a lane begin, while some routes are claimed apart from the others (core/pace.py).

Each scope has a mark of its own: a place before which the lane has no rows of that scope. So the rows that a limited
route keeps waiting are passed by the others once, and not again with every claim. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from delayer.core.pace import Scope

Place = tuple[int, int]
"""A due instant in microseconds, and an id: the order of claims."""
_EARLIEST_MS: Final = -(1 << 43)
"""Before every instant that a row can have, and within what SQL can add to an epoch."""


def before(due_ms: int) -> Place:
    """The place before everything that is due at ``due_ms`` or later."""
    return max(due_ms, _EARLIEST_MS) * 1000 - 1, (1 << 63) - 1


class Marks:
    """The marks of the scopes in use; none while nothing is claimed apart."""

    def __init__(self) -> None:
        self._places: dict[Scope, Place] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def begin(self, scopes: Sequence[Scope], start_ms: int) -> None:
        """These scopes from now on, all from the same instant."""
        self._places = {scope: before(start_ms) for scope in scopes}

    def again(self, start_ms: int) -> None:
        """All of them from this instant."""
        self.begin(tuple(self._places), start_ms)

    def place(self, scope: Scope) -> Place:
        return self._places[scope]

    def passed(self, scope: Scope, place: Place, noted_ms: int) -> None:
        """Nothing of ``scope`` is before ``place``, but for what was noted meanwhile."""
        if scope in self._places:
            self._places[scope] = min(place, before(noted_ms))

    def note(self, due_ms: int) -> None:
        """A row was parked that is due then; of which scope is not said."""
        self._places = {scope: min(place, before(due_ms)) for scope, place in self._places.items()}

    @property
    def lowest_ms(self) -> int:
        """Nothing of any scope is before this."""
        return min(due_us for due_us, _ in self._places.values()) // 1000

    @property
    def highest_ms(self) -> int:
        """Nothing is before this of the scope that came farthest."""
        return max(due_us for due_us, _ in self._places.values()) // 1000
