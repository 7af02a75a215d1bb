"""What lies ahead of a lane, as anybody can read it: whether it needs an owner now.

Only a lane in which something is due soon needs one. The others stay free, so that a daemon that starts again finds
lanes to own and makes no new ones, however long the backlog is: each lane costs a connection for as long as somebody
has it. Between the two limits nothing happens, so no lane goes to and fro between the free and the adopted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

import asyncpg

from delayer.store import session, statements
from delayer.store.marks import Place

SOON_MS: Final = 120_000
"""A lane without an owner is adopted when something in it is due within this time. Daemons look every second: the rest
is for a store that is out of reach meanwhile, and for the many lanes of many dead."""
IDLE_MS: Final = 600_000
"""A lane in which nothing is due within this time can be let go."""


class Start(NamedTuple):
    """What the taker of a lane found in the store."""

    epoch: int
    watermark: int
    retry_ms: int | None


class Search(NamedTuple):
    """Where to look for rows of routes that are claimed apart: they may be behind where their scope is, and not be the
    lane's first."""

    place: Place
    until_ms: int


SEARCH_ROWS: Final = 20_000
"""Rows that one statement of a search reads at most."""
SEARCHES: Final = 10
"""Such statements of one look. The next goes on where this one ended, so that a backlog of millions costs no more."""

Span = tuple[int, int]


class Outlook(NamedTuple):
    """What a lane has by a horizon, from its beginning (epoch ms)."""

    horizon_ms: int
    first_ms: int | None
    """When the first waiting row is due, if that is before the horizon."""
    retry_ms: int | None
    """When the first held row is tried again."""
    routes: Mapping[bytes, Span] = {}
    """Of which routes a search found rows, and between which instants."""
    searched: Place | None = None
    """Where the search came to, if not to its end."""

    @property
    def empty(self) -> bool:
        """Nothing is due by the horizon."""
        return self.first_ms is None and (self.retry_ms is None or self.retry_ms > self.horizon_ms)


Look = Callable[[int, int, Search | None], Awaitable[Outlook]]
"""Reads the lane of a number up to a horizon, on another connection than the lane's."""


async def ahead(connection: asyncpg.Connection, number: int, horizon_ms: int, search: Search | None = None) -> Outlook:
    """Read a lane from its beginning. Raises the driver's errors."""
    first_ms = await connection.fetchval(statements.NEXT_DUE, number, session.BEGINNING_MS, horizon_ms)
    found = Outlook(horizon_ms, first_ms, await connection.fetchval(statements.NEXT_RETRY, number))
    if search is None:
        return found
    routes, searched = await _search(connection, number, search)
    return found._replace(routes=routes, searched=searched)


async def _search(
    connection: asyncpg.Connection, number: int, search: Search
) -> tuple[dict[bytes, Span], Place | None]:
    routes: dict[bytes, Span] = {}
    place = search.place
    for _ in range(SEARCHES):
        async with session.transaction(connection):
            # Of a partition that nobody has analyzed yet a planner would rather sort the whole.
            await connection.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off")
            due_us, id_ = place
            rows = await connection.fetch(
                statements.ROUTES_BEHIND, number, due_us // 1000, id_, search.until_ms, due_us, SEARCH_ROWS
            )
        for route, first_ms, last_ms, *_ in rows:
            known = routes.get(route, (first_ms, last_ms))
            routes[route] = min(first_ms, known[0]), max(last_ms, known[1])
        if not rows or rows[0][3] < SEARCH_ROWS:
            return routes, None
        place = rows[0][4], rows[0][5]
    return routes, place


async def due_soon(connection: asyncpg.Connection, now_ms: int, *, from_the_beginning: bool) -> list[int]:
    """The lanes without an owner that need one, the soonest first. Raises the driver's errors."""
    horizon_ms = now_ms + SOON_MS
    start_ms = session.BEGINNING_MS if from_the_beginning else horizon_ms
    return [number for (number,) in await connection.fetch(statements.LANES_DUE, horizon_ms, start_ms)]
