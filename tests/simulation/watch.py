"""Invariants of store mode, asked once a second: counters equal rows, every lane has one owner at most, nobody
overlooks a due row, the daemons' memory is bounded, and no message is gone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import count
from typing import Final

from delayer.store.lanes.cursor import NEVER_MS
from delayer.store.lanes.lane import PostgresLane
from delayer.store.pool import BEGINNING_MS, COMMAND_SECONDS
from tests.simulation import memory
from tests.simulation.faults import Trouble
from tests.simulation.pauses import is_paused
from tests.simulation.scheduled import INCONSISTENT
from tests.simulation.store.process import Locked
from tests.simulation.store.server import SimulatedStore
from tests.simulation.whereabouts import EACH_SECONDS, Whereabouts
from tests.simulation.world import Node


class Kind(StrEnum):
    """What a row of an answer tells."""

    STATE = "state"
    LATE = "late"
    BEHIND = "behind"
    COUNTERS = "counters"
    KEYS = "keys"
    OCCURRENCES = "occurrences"


LATE_SECONDS: Final = 5.0
"""In peace a due row is released by then."""
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
_ROWS: Final = f"""
SELECT '{Kind.COUNTERS}', one::text FROM ({_WRONG_COUNTS}) AS one
UNION ALL SELECT '{Kind.KEYS}', one::text FROM ({_WRONG_KEYS}) AS one
UNION ALL SELECT '{Kind.OCCURRENCES}', one::text FROM ({INCONSISTENT}) AS one
"""
_LOOK: Final = f"""
SELECT '{Kind.STATE}', pg_current_snapshot()::text, NULL, NULL
UNION ALL
(SELECT '{Kind.LATE}', 'row', id::text, due_at::text FROM message
 WHERE due_at < clock_timestamp() - interval '{LATE_SECONDS} s' LIMIT 5)
UNION ALL
(SELECT '{Kind.LATE}', 'held', id::text, retry_at::text FROM held
 WHERE retry_at < clock_timestamp() - interval '{LATE_SECONDS} s' LIMIT 5)
UNION ALL
(SELECT '{Kind.LATE}', 'segment', id::text, first_due::text FROM segment
 WHERE first_due < clock_timestamp() - interval '{LATE_SECONDS} s' LIMIT 5)
UNION ALL
SELECT '{Kind.BEHIND}', m.lane::text, m.id::text, NULL FROM unnest($1::int[], $2::bigint[], $3::bigint[])
AS place (lane, due_ms, id) JOIN message AS m ON m.lane = place.lane AND m.id <> ALL($4::bigint[])
AND (m.due_at, m.id) <= (timestamptz 'epoch' + place.due_ms * interval '1 millisecond', place.id)
"""
_BEGIN: Final = "BEGIN; LOCK TABLE message, message_key, held, counter, schedule, segment IN ACCESS SHARE MODE NOWAIT"
_PREPARE: Final = f"PREPARE rows AS {_ROWS}; PREPARE look AS {_LOOK}"
LASTING_LOOKS: Final = 15
"""A notification may be on its way to a lane for so many seconds."""
OWNERS_LOOKS: Final = round(COMMAND_SECONDS) + 5
"""After a fault, a statement without an answer may hide for so many seconds that a lane is lost."""
_STANDING: Final = (
    "SELECT (SELECT count(*) FROM message), (SELECT count(*) FROM held), (SELECT count(*) FROM delayer_inbox),"
    " (SELECT count(*) FROM segment)"
)


class Watch:
    def __init__(
        self, store: SimulatedStore, nodes: Sequence[Node], trouble: Trouble, whereabouts: Whereabouts | None
    ) -> None:
        self._store = store
        self._whereabouts = whereabouts
        self._nodes = nodes
        self._trouble = trouble
        self._looks: dict[object, int] = {}
        """For how many looks in a row something has been so."""
        self._state: str | None = ""
        """Postgres's snapshot at the last check of rows. Only a transaction that may have written changes it."""
        store.watch.query(_PREPARE)

    async def run(self) -> None:
        for number in count(1):
            await asyncio.sleep(1.0)
            self.look()
            if number % memory.EACH_SECONDS == 0:
                for node in self._nodes:
                    memory.check(node)
            if number % EACH_SECONDS == 0 and self._whereabouts:
                self._whereabouts.check()

    def look(self) -> None:
        """Raises AssertionError."""
        self._store.set_clock()
        try:
            self._check()
        except Locked:  # partitions are being attached
            self._store.watch.query("ROLLBACK")

    def _ask(self, statement: str) -> list[tuple[str | None, ...]]:
        """Raises Locked within a transaction. A wait for a lock would last forever, because nothing else runs."""
        return self._store.watch.query(f"{_BEGIN}; {statement}; ROLLBACK")

    def _check(self) -> None:
        """Nothing else runs meanwhile, so several statements see the same state."""
        owned = [lane for node in self._nodes if not is_paused(node.host) for lane in node.lanes()]
        owners = Counter(lane.number for lane in owned)
        lanes = {lane.number: lane for lane in owned if owners[lane.number] == 1}
        found = _by_kind(self._ask(_look_at(lanes.values())))
        [(state, *_)] = found[Kind.STATE]
        if state != self._state:
            wrong = _by_kind(self._ask("EXECUTE rows"))
            counters, keys, occurrences = (wrong[kind][:5] for kind in (Kind.COUNTERS, Kind.KEYS, Kind.OCCURRENCES))
            assert not counters, f"counters differ from rows ({_COUNTS}): {counters}"
            assert not keys, f"keys differ from rows (key, id, lane): {keys}"
            assert not occurrences, f"schedules and their occurrences differ: {occurrences}"
            self._state = state
        late = found[Kind.LATE] if self._trouble.is_peace else ()
        assert not late, f"nobody looks at these rows: {late}"
        self._check_lasting(owners, lanes, found[Kind.BEHIND])

    def _check_lasting(
        self, owners: Mapping[int, int], lanes: Mapping[int, PostgresLane], behind: Sequence[tuple[str | None, ...]]
    ) -> None:
        """What may be for a moment, or until a process notices a fault, but not for long."""
        overlooked = {(lanes[int(number or 0)], row): 0 for number, row, *_ in behind}
        shared = {number: many for number, many in owners.items() if many > 1}
        self._looks = {what: self._looks.get(what, 0) + 1 for what in (*overlooked, *shared)}
        for lane, row in overlooked:
            looks = self._looks[lane, row]
            assert looks < LASTING_LOOKS, f"row {row} is behind the cursor of lane {lane.number}: {lane.cursor}"
        for number, many in shared.items():
            looks, most = self._looks[number], LASTING_LOOKS if self._trouble.is_peace else OWNERS_LOOKS
            assert looks < most, f"lane {number} has {many} owners"

    def standing(self) -> dict[str, int]:
        [counts] = self._store.watch.query(_STANDING)
        return dict(zip(("waiting", "held", "inbox", "segments"), (int(count or 0) for count in counts), strict=True))


def _by_kind(answer: Sequence[tuple[str | None, ...]]) -> dict[Kind, list[tuple[str | None, ...]]]:
    return {kind: [row[1:] for row in answer if row[0] == kind] for kind in Kind}


def _look_at(lanes: Iterable[PostgresLane]) -> str:
    """Ask also for rows at a lane's place or before it that it has not claimed: it would not claim them next."""
    lanes = [lane for lane in lanes if BEGINNING_MS < lane.cursor.place[0] < NEVER_MS]
    claims = [claimer.opened for lane in lanes for claimer in lane.claimers if claimer.opened is not None]
    taken = [due.id for claim in claims for due in (*claim.rows, *claim.expired)]
    taken += [id_ for lane in lanes for id_ in lane.skipped.ids]
    places = [lane.cursor.place for lane in lanes]
    columns = [[lane.number for lane in lanes], [due_ms for due_ms, _ in places], [id_ for _, id_ in places], taken]
    return "EXECUTE look ({})".format(", ".join(f"'{{{','.join(map(str, column))}}}'" for column in columns))
