"""When the held rows of a lane are worth asking for. Pure: instants are given, epoch milliseconds."""

from __future__ import annotations

from enum import Enum
from typing import Final

from delayer.core.pace import Scope

NEVER_MS: Final = 1 << 60
LONG_AGO_MS: Final = -(1 << 60)
LOCKED_MS: Final = 1_000
"""How long to leave rows alone that somebody else has locked: nobody tells when they are free."""


class Turn(Enum):
    """What a claim takes of the held rows that are due."""

    NONE = "none"
    SHARE = "share"
    """A tenth, beside those that wait."""
    SPARE = "spare"
    """What is left where none waits: there is but one row to take, and it is their turn."""


class Retries:
    """The soonest retry of a lane, and for each scope of claims whether it was in vain just now."""

    def __init__(self, soonest_ms: int | None) -> None:
        self.soonest_ms = NEVER_MS if soonest_ms is None else soonest_ms
        self._passed_over: dict[Scope | None, int] = {}
        self._single: set[Scope | None] = set()  # of these the last claim of a single row was for one that is held
        self._crowded: set[Scope | None] = set()

    def turn(self, scope: Scope | None, limit: int, now_ms: int) -> Turn:
        """Whether a claim of ``limit`` rows is to take held ones too."""
        if max(self.soonest_ms, self._passed_over.get(scope, LONG_AGO_MS)) > now_ms:
            return Turn.NONE
        if limit == 1:  # of one row nothing is left for those that wait: they take turns
            self._single ^= {scope}
            return Turn.SHARE if scope in self._single else Turn.SPARE
        return Turn.SHARE

    def limit(self, scope: Scope | None, limit: int) -> int:
        """How many rows such a claim may be of: a single one, and so a held one, where the last had no bytes for any.
        Where rows are large they take turns too."""
        return 1 if scope in self._crowded else limit

    def crowded(self, scope: Scope | None, crowded: bool) -> None:
        """Whether the last claim of this scope left no bytes for those that are held."""
        (self._crowded.add if crowded else self._crowded.discard)(scope)

    def in_vain(self, scope: Scope | None, now_ms: int) -> None:
        """Some were due, and a claim of this scope got none: they are locked, or of a scope that asks for itself."""
        self._passed_over[scope] = now_ms + LOCKED_MS

    def expect(self, at_ms: int) -> bool:
        """One is to be tried then; whether that is sooner than what was known."""
        sooner = at_ms < self.soonest_ms
        self.soonest_ms = min(self.soonest_ms, at_ms)
        return sooner

    def again(self) -> None:
        """Something changed: no scope asks in vain any more, for all that is known."""
        self._passed_over.clear()

    def next_ms(self, now_ms: int, *, paced: bool) -> int:
        """From when on asking is worth it. ``paced``: by scopes, each of which has just asked for its own, or may not
        go on; so none of them is in a hurry."""
        if self.soonest_ms > now_ms:
            return self.soonest_ms
        return now_ms + LOCKED_MS if paced else max(self.soonest_ms, self._passed_over.get(None, LONG_AGO_MS))
