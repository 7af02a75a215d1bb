"""Reading waiting rows in the order of (due instant, id), over all lanes, as few of them as a page needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import asyncpg

from delayer.core.filters import Filter, Token
from delayer.store import segments, session
from delayer.store.days import DAY_MS

LAST_ID: Final = (1 << 63) - 1
_LANES: Final = (
    "SELECT lane FROM counter GROUP BY lane"
    " HAVING sum(CASE WHEN kind IN ('parked', 'restored') THEN n ELSE -n END) > 0 ORDER BY lane"
)
# $1 lanes, $2 and $3 bounds of due_at, which prune partitions while planning; the place behind which to begin is ($4
# microseconds, $5 id); $6 rows of each lane at most. Where nothing but due_at is asked for, only the index is read.
_NEXT: Final = """
SELECT lane, (extract(epoch FROM due_at) * 1000000)::bigint AS due_us, id, {meant} AS meant, {properties} AS properties
FROM unnest($1::smallint[]) AS l (number)
CROSS JOIN LATERAL (
    SELECT {columns} FROM message
    WHERE lane = l.number AND due_at >= $2 AND due_at < $3
      AND (due_at, id) > ('epoch'::timestamptz + $4::bigint * interval '1 microsecond', $5::bigint)
    ORDER BY due_at, id
    LIMIT $6
) AS next
"""


class Place(NamedTuple):
    """Where a message waits. The order of a list is that of places."""

    due_us: int
    id: int
    lane: int
    segment: int | None = None

    @property
    def token(self) -> Token:
        return Token(self.id, self.due_us // 1000)


Test = Callable[[bytes], bool]
"""Whether a message is meant, by its properties: what SQL cannot read."""
BEGINNING: Final = (-(1 << 53), -1)


class Rows:
    """Rows of ``message``, read window by window: of the days ahead one, then two, then four, until there are enough.

    One statement over all partitions would open hundreds of them to read the first page of one.
    """

    def __init__(
        self, connection: asyncpg.Connection, wanted: Filter, test: Test | None, limit: int, scan: int
    ) -> None:
        self.places: list[Place] = []
        self._connection = connection
        self._wanted = wanted
        self._test = test
        self._limit = limit
        self._left = scan
        self._each = limit + 1
        """Rows of each lane that are read at once: few first, as the first may be those that are meant."""

    async def read(self, after: tuple[int, int]) -> tuple[int, int] | None:
        """Read behind ``after``. The last place up to which everything that is meant was found; None for the end."""
        lanes = [lane for (lane,) in await self._connection.fetch(_LANES)]
        last_ms = segments.FOREVER_MS if self._wanted.due_before_ms is None else self._wanted.due_before_ms
        if self._wanted.due_from_ms is not None:
            after = max(after, (self._wanted.due_from_ms * 1000 - 1, LAST_ID))
        width = DAY_MS
        low_ms = session.BEGINNING_MS if after <= BEGINNING else after[0] // 1000
        now_ms = await self._connection.fetchval("SELECT now()")
        while lanes and low_ms < last_ms:
            high_ms = min(max(low_ms, now_ms) + width, last_ms)
            if high_ms > now_ms + 1000 * DAY_MS:
                high_ms = last_ms  # behind every partition of a day
            stopped = await self._window(lanes, low_ms, high_ms, after)
            if stopped is not None:
                after = stopped
                low_ms = after[0] // 1000
                if len(self.places) > self._limit or self._left <= 0:
                    return after
                continue
            low_ms, width = high_ms, width * 2
            if len(self.places) > self._limit:
                return (high_ms * 1000 - 1, LAST_ID)
        return None

    async def _window(
        self, lanes: Sequence[int], low_ms: int, high_ms: int, after: tuple[int, int]
    ) -> tuple[int, int] | None:
        """Read the rows due from ``low_ms`` to before ``high_ms``. The place up to which every lane was read; None when
        that is all of the window."""
        narrow = self._wanted.narrow
        each = max(min(self._left // len(lanes), self._each), 1) if narrow else self._limit + 1
        self._each *= 4
        meant, given = conditions(self._wanted, first=7)
        columns = ", route, to_exchange, to_key" if given else ""
        properties = "NULL::bytea" if self._test is None else f"CASE WHEN {meant} THEN properties END"
        statement = _NEXT.format(
            meant=meant,
            properties=properties,
            columns=f"lane, due_at, id{columns}{', properties' if self._test else ''}",
        )
        rows = await self._connection.fetch(statement, lanes, low_ms, high_ms, *after, each, *given)
        counted: dict[int, int] = {}
        last: dict[int, tuple[int, int]] = {}
        for lane, due_us, number, _, _ in rows:
            counted[lane] = counted.get(lane, 0) + 1
            last[lane] = max(last.get(lane, BEGINNING), (due_us, number))
        if narrow:
            self._left -= len(rows)
        end = min((last[lane] for lane, n in counted.items() if n == each), default=None)
        self.places += [
            Place(due_us, number, lane)
            for lane, due_us, number, hit, raw in rows
            if hit and (end is None or (due_us, number) <= end) and (self._test is None or self._test(raw))
        ]
        return end


def conditions(wanted: Filter, first: int) -> tuple[str, list[bytes]]:
    """What no index knows, as SQL with parameters from ``first`` on, and these parameters."""
    asked = {"route": wanted.route, "to_exchange": wanted.exchange, "to_key": wanted.routing_key}
    given = {column: value for column, value in asked.items() if value is not None}
    terms = [f"{column} = ${number}" for number, column in enumerate(given, first)]
    return " AND ".join(terms) or "true", list(given.values())
