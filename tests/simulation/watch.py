"""Invariants of store mode, asked once a second: counters equal rows, every lane has one owner at most, and nobody
overlooks a due row."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from tests.simulation.faults import Trouble
from tests.simulation.store.process import Locked
from tests.simulation.store.server import SimulatedStore
from tests.simulation.world import Node

LATE_SECONDS: Final = 5.0
"""In peace a due row is released by then."""
_BEGIN: Final = (
    "BEGIN ISOLATION LEVEL REPEATABLE READ; LOCK TABLE message, message_key, held, counter IN ACCESS SHARE MODE NOWAIT"
)
_WRONG_COUNTS: Final = """
SELECT * FROM (
    SELECT lane,
        sum(n) FILTER (WHERE kind IN ('parked', 'restored')) AS came,
        coalesce(sum(n) FILTER (WHERE kind IN ('released', 'cancelled', 'compacted')), 0) AS went,
        coalesce(sum(n) FILTER (WHERE kind = 'held'), 0) AS counted_held,
        (SELECT count(*) FROM held AS h WHERE h.lane = c.lane) AS held,
        (SELECT count(*) FROM message AS m WHERE m.lane = c.lane) AS waiting
    FROM counter AS c GROUP BY lane) AS of
WHERE came <> went + held + waiting OR counted_held <> held
"""
_WRONG_KEYS: Final = """
SELECT key, id, lane FROM (SELECT key, id, lane FROM message UNION ALL SELECT key, id, lane FROM held) AS m
FULL JOIN (SELECT key, id FROM message_key) AS k USING (key, id)
WHERE key IS NOT NULL AND (k IS NULL OR m IS NULL) AND id IS NOT NULL
"""
_LATE: Final = """
SELECT 'row', lane, id, due_at FROM message WHERE due_at < clock_timestamp() - interval '{seconds} s'
UNION ALL
SELECT 'held', lane, id, retry_at FROM held WHERE retry_at < clock_timestamp() - interval '{seconds} s'
LIMIT 5
"""
_STANDING: Final = "SELECT (SELECT count(*) FROM message), (SELECT count(*) FROM held)"


class Watch:
    def __init__(self, store: SimulatedStore, nodes: Sequence[Node], trouble: Trouble) -> None:
        self._store = store
        self._nodes = nodes
        self._trouble = trouble

    async def run(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.look()

    def look(self) -> None:
        """Raises AssertionError."""
        ask = self._store.watch.query
        self._store.set_clock()
        try:
            ask(_BEGIN)
            self._check(ask)
        except Locked:  # partitions are being attached
            pass
        finally:
            ask("ROLLBACK")

    def _check(self, ask: Callable[[str], list[tuple[str | None, ...]]]) -> None:
        wrong = ask(_WRONG_COUNTS)
        assert not wrong, f"counters differ from rows (lane, came, went, counted held, held, waiting): {wrong}"
        wrong = ask(_WRONG_KEYS)
        assert not wrong, f"keys differ from rows: {wrong[:5]}"
        if self._trouble.is_peace:
            late = ask(_LATE.format(seconds=LATE_SECONDS))
            assert not late, f"nobody looks at these rows: {late}"
            owners = Counter(number for node in self._nodes for number in node.lanes())
            assert all(count == 1 for count in owners.values()), f"lanes by their number of owners: {owners}"

    def standing(self) -> dict[str, int]:
        [(waiting, held)] = self._store.watch.query(_STANDING)
        return {"waiting": int(waiting or 0), "held": int(held or 0)}
