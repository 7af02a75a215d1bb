"""Invariants of store mode, asked once a second: counters equal rows, every lane has one owner at most, and nobody
overlooks a due row."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from delayer.store.lanes.cursor import NEVER_MS
from delayer.store.lanes.lane import PostgresLane
from delayer.store.pool import COMMAND_SECONDS
from tests.simulation.faults import Trouble
from tests.simulation.pauses import is_paused
from tests.simulation.scheduled import INCONSISTENT
from tests.simulation.store.process import Locked
from tests.simulation.store.server import SimulatedStore
from tests.simulation.world import Node

LATE_SECONDS: Final = 5.0
"""In peace a due row is released by then."""
_BEGIN: Final = (
    "BEGIN ISOLATION LEVEL REPEATABLE READ;"
    " LOCK TABLE message, message_key, held, counter, schedule, segment IN ACCESS SHARE MODE NOWAIT"
)
_COUNTS: Final = "lane, came, went, counted held, held, waiting, counted packed, packed"
_WRONG_COUNTS: Final = """
SELECT * FROM (
    SELECT lane,
        sum(n) FILTER (WHERE kind IN ('parked', 'restored')) AS came,
        coalesce(sum(n) FILTER (WHERE kind IN ('released', 'cancelled', 'compacted')), 0) AS went,
        coalesce(sum(n) FILTER (WHERE kind = 'held'), 0) AS counted_held,
        (SELECT count(*) FROM held AS h WHERE h.lane = c.lane) AS held,
        (SELECT count(*) FROM message AS m WHERE m.lane = c.lane) AS waiting,
        coalesce(sum(CASE kind WHEN 'compacted' THEN n WHEN 'restored' THEN -n END), 0) AS counted_packed,
        (SELECT coalesce(sum(s.messages), 0) FROM segment AS s WHERE s.lane = c.lane) AS packed
    FROM counter AS c GROUP BY lane) AS of
WHERE came <> went + held + waiting OR counted_held <> held OR counted_packed <> packed
"""
_WRONG_KEYS: Final = """
SELECT key, id, lane FROM (SELECT key, id, lane FROM message UNION ALL SELECT key, id, lane FROM held) AS m
FULL JOIN (SELECT key, id FROM message_key WHERE segment IS NULL) AS k USING (key, id)
WHERE key IS NOT NULL AND (k IS NULL OR m IS NULL) AND id IS NOT NULL
UNION ALL
SELECT k.key, k.id, k.lane FROM message_key AS k LEFT JOIN segment AS s ON s.id = k.segment AND s.lane = k.lane
WHERE k.segment IS NOT NULL AND (s IS NULL OR s.ids[k.position + 1] IS DISTINCT FROM k.id
    OR CASE WHEN k.position / 8 < length(s.gone) THEN get_bit(s.gone, k.position) = 1 ELSE false END)
"""
"""Keys without their message, and messages without their key. Of those in segments, the keys without their message."""
_LATE: Final = """
SELECT 'row', lane, id, due_at FROM message WHERE due_at < clock_timestamp() - interval '{seconds} s'
UNION ALL
SELECT 'held', lane, id, retry_at FROM held WHERE retry_at < clock_timestamp() - interval '{seconds} s'
UNION ALL
SELECT 'segment', lane, id, first_due FROM segment WHERE first_due < clock_timestamp() - interval '{seconds} s'
LIMIT 5
"""
_BEHIND: Final = """
SELECT id FROM message WHERE lane = {lane} AND id <> ALL('{{{taken}}}')
AND (due_at, id) <= (timestamptz 'epoch' + {place[0]} * interval '1 millisecond', {place[1]})
"""
LASTING_LOOKS: Final = 15
"""A notification may be on its way to a lane for so many seconds."""
OWNERS_LOOKS: Final = round(COMMAND_SECONDS) + 5
"""After a fault, a statement without an answer may hide for so many seconds that a lane is lost."""
_STANDING: Final = (
    "SELECT (SELECT count(*) FROM message), (SELECT count(*) FROM held), (SELECT count(*) FROM delayer_inbox),"
    " (SELECT count(*) FROM segment)"
)


Ask = Callable[[str], list[tuple[str | None, ...]]]


class Watch:
    def __init__(self, store: SimulatedStore, nodes: Sequence[Node], trouble: Trouble) -> None:
        self._store = store
        self._nodes = nodes
        self._trouble = trouble
        self._looks: dict[tuple[object, ...], int] = {}
        """For how many looks in a row something has been so."""

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

    def _check(self, ask: Ask) -> None:
        wrong = ask(_WRONG_COUNTS)
        assert not wrong, f"counters differ from rows ({_COUNTS}): {wrong}"
        wrong = ask(_WRONG_KEYS)
        assert not wrong, f"keys differ from rows: {wrong[:5]}"
        wrong = ask(INCONSISTENT)
        assert not wrong, f"schedules and their occurrences differ: {wrong[:5]}"
        self._check_lasting(ask)
        if self._trouble.is_peace:
            late = ask(_LATE.format(seconds=LATE_SECONDS))
            assert not late, f"nobody looks at these rows: {late}"

    def _check_lasting(self, ask: Ask) -> None:
        """What may be for a moment, or until a process notices a fault, but not for long."""
        found: dict[tuple[object, ...], str] = {}
        lanes = [lane for node in self._nodes if not is_paused(node.host) for lane in node.lanes()]
        owners = Counter(lane.number for lane in lanes)
        for lane in lanes:
            for row in self._overlooked(ask, lane) if owners[lane.number] == 1 else ():
                found[id(lane), row] = f"row {row} is behind the cursor of lane {lane.number}: {lane.cursor}"
        for number, count in owners.items():
            if count > 1:
                found["lane", number] = f"lane {number} has {count} owners"
        self._looks = {what: self._looks.get(what, 0) + 1 for what in found}
        for what, looks in self._looks.items():
            in_trouble = what[0] == "lane" and not self._trouble.is_peace
            assert looks < (OWNERS_LOOKS if in_trouble else LASTING_LOOKS), found[what]

    @staticmethod
    def _overlooked(ask: Ask, lane: PostgresLane) -> list[str | None]:
        """Rows at the lane's place or before it that it has not claimed: it would not claim them next."""
        if lane.cursor.place[0] >= NEVER_MS:
            return []
        claims = [claimer.opened for claimer in lane.claimers if claimer.opened is not None]
        taken = [*lane.skipped.ids, *(due.id for claim in claims for due in (*claim.rows, *claim.expired))]
        asked = _BEHIND.format(lane=lane.number, place=lane.cursor.place, taken=",".join(map(str, taken)))
        return [row[0] for row in ask(asked)]

    def standing(self) -> dict[str, int]:
        [counts] = self._store.watch.query(_STANDING)
        return dict(zip(("waiting", "held", "inbox", "segments"), (int(count or 0) for count in counts), strict=True))
