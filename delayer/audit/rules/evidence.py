"""What was counted, where the rules look it up. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from delayer.audit.rules.message import WAITING
from delayer.audit.rules.tally import Key, Partial, Tally


class Evidence:
    """The merged tallies (rules.summary.merged) by kind, in their order there: by key, or what is most first."""

    def __init__(self, partials: Iterable[Partial]) -> None:
        self._kinds: dict[str, dict[Key, Tally]] = {}
        for key, tally in partials:
            self._kinds.setdefault(key.kind, {})[key] = tally

    def of(self, kind: str) -> list[Partial]:
        return list(self._kinds.get(kind, {}).items())

    def get(self, key: Key) -> Tally | None:
        return self._kinds.get(key.kind, {}).get(key)

    def messages(self, key: Key) -> int:
        """How many messages were counted under ``key``."""
        tally = self.get(key)
        return 0 if tally is None else tally.messages

    def total(self, kind: str) -> Tally | None:
        """All tallies of a kind together, those that were not handed on too; ``size`` is the number of their keys."""
        return self.get(Key("total", 0, kind.encode()))

    def more(self, kind: str) -> int:
        """How many keys of a kind were not handed on."""
        total = self.total(kind)
        return 0 if total is None else total.size - len(self._kinds.get(kind, {}))

    def first_due(self, lane: int) -> int | None:
        """When the first waiting message of a lane is due."""
        tally = self.get(Key("lane", lane, WAITING.encode()))
        return None if tally is None else tally.first_due_ms

    def overdue_routes(self, lane: int, where: str) -> list[tuple[bytes, int]]:
        """Routes and their overdue messages, the most first; ``where`` is WAITING or PACED."""
        found = ((key, tally) for key, tally in self.of("overdue route") if key.number == lane)
        return [(key.first, tally.messages) for key, tally in found if key.second == where.encode()]
