"""What lies ahead of a lane, as anybody can read it: whether it needs an owner now.

Only a lane in which something is due soon needs one. The others stay free, so that a daemon that starts again finds
lanes to own and makes no new ones, however long the backlog is: each lane costs a connection for as long as somebody
has it. Between the two limits nothing happens, so no lane goes to and fro between the free and the adopted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

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
    halvings: int = 0
    """How often the number of rows that one statement reads is halved: what took too long is tried in less."""


SEARCH_ROWS: Final = 20_000
"""Rows that one statement of a search reads at most."""
SEARCHES: Final = 10
"""Such statements of one look. The next goes on where this one ended, so that a backlog of millions costs no more."""
SEARCH_SECONDS: Final = 2.0
"""How long one of them may take: it has one of the connections that others park by."""
MOST_HALVINGS: Final = 6
_ANSWER_SECONDS: Final = SEARCH_SECONDS + 5.0

Span = tuple[int, int]


class Outlook(NamedTuple):
    """What a lane has by a horizon, from its beginning (epoch ms)."""

    horizon_ms: int
    first_ms: int | None
    """When the first waiting row is due, if that is before the horizon."""
    retry_ms: int | None
    """When the first held row is tried again."""

    @property
    def empty(self) -> bool:
        """Nothing is due by the horizon."""
        return self.first_ms is None and (self.retry_ms is None or self.retry_ms > self.horizon_ms)


class Behind(NamedTuple):
    """What a search found."""

    routes: Mapping[bytes, Span]
    """Of which routes there are rows, and between which instants."""
    searched: Place | None
    """Where the search came to, if not to its end."""
    slow: bool
    """It ended where a statement took too long."""


class Looks(Protocol):
    """Reads lanes, by their numbers, on another connection than theirs. Raises the driver's errors."""

    async def ahead(self, number: int, horizon_ms: int) -> Outlook: ...

    async def behind(self, number: int, search: Search) -> Behind: ...


class PooledLooks:
    """Satisfies Looks, by the pool that others park by: never more than one search at a time has a connection of it."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool
        self._searching = asyncio.Lock()

    async def ahead(self, number: int, horizon_ms: int) -> Outlook:
        async with session.borrowed(self._pool) as connection:
            return await ahead(connection, number, horizon_ms)

    async def behind(self, number: int, search: Search) -> Behind:
        async with self._searching, session.borrowed(self._pool) as connection:
            return await behind(connection, number, search)


async def ahead(connection: asyncpg.Connection, number: int, horizon_ms: int) -> Outlook:
    """Read a lane from its beginning. Raises the driver's errors."""
    first_ms = await connection.fetchval(statements.NEXT_DUE, number, session.BEGINNING_MS, horizon_ms)
    return Outlook(horizon_ms, first_ms, await connection.fetchval(statements.NEXT_RETRY, number))


async def behind(connection: asyncpg.Connection, number: int, search: Search) -> Behind:
    """Search a lane for the routes of its rows, some way. Raises the driver's errors, but of a statement that took too
    long: what was found before it counts."""
    routes: dict[bytes, Span] = {}
    place = search.place
    at_once = max(SEARCH_ROWS >> search.halvings, 1)
    for _ in range(SEARCHES):
        try:
            rows = await _next_routes(connection, number, place, search.until_ms, at_once)
        except asyncpg.QueryCanceledError:
            return Behind(routes, place, slow=True)
        for route, first_ms, last_ms, *_ in rows:
            known = routes.get(route, (first_ms, last_ms))
            routes[route] = min(first_ms, known[0]), max(last_ms, known[1])
        if not rows or rows[0][3] < at_once:
            return Behind(routes, None, slow=False)
        place = rows[0][4], rows[0][5]
    return Behind(routes, place, slow=False)


async def _next_routes(
    connection: asyncpg.Connection, number: int, place: Place, until_ms: int, at_once: int
) -> list[asyncpg.Record]:
    due_us, id_ = place
    async with session.transaction(connection):
        # Of a partition that nobody has analyzed yet a planner would rather sort the whole.
        await connection.execute(
            "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off;"
            f"SET LOCAL statement_timeout = {SEARCH_SECONDS * 1000:.0f}"
        )
        found: list[asyncpg.Record] = await connection.fetch(
            statements.ROUTES_BEHIND, number, due_us // 1000, id_, until_ms, due_us, at_once, timeout=_ANSWER_SECONDS
        )
    return found


async def due_soon(connection: asyncpg.Connection, now_ms: int, *, from_the_beginning: bool) -> list[int]:
    """The lanes without an owner that need one, the soonest first. Raises the driver's errors."""
    horizon_ms = now_ms + SOON_MS
    start_ms = session.BEGINNING_MS if from_the_beginning else horizon_ms
    return [number for (number,) in await connection.fetch(statements.LANES_DUE, horizon_ms, start_ms)]
