"""What lies ahead of a lane, as anybody can read it: whether it needs an owner now.

Only a lane in which something is due soon needs one. The others stay free, so that a daemon that starts again finds
lanes to own and makes no new ones, however long the backlog is: each lane costs a connection for as long as somebody
has it. Between the two limits nothing happens, so no lane goes to and fro between the free and the adopted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import asyncpg

from delayer.store import session, statements

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


Look = Callable[[int, int], Awaitable[Outlook]]
"""Reads the lane of a number up to a horizon, on another connection than the lane's."""


async def ahead(connection: asyncpg.Connection, number: int, horizon_ms: int) -> Outlook:
    """Read a lane from its beginning. Raises the driver's errors."""
    first_ms = await connection.fetchval(statements.NEXT_DUE, number, session.BEGINNING_MS, horizon_ms)
    return Outlook(horizon_ms, first_ms, await connection.fetchval(statements.NEXT_RETRY, number))


async def due_soon(connection: asyncpg.Connection, now_ms: int, *, from_the_beginning: bool) -> list[int]:
    """The lanes without an owner that need one, the soonest first. Raises the driver's errors."""
    horizon_ms = now_ms + SOON_MS
    start_ms = session.BEGINNING_MS if from_the_beginning else horizon_ms
    return [number for (number,) in await connection.fetch(statements.LANES_DUE, horizon_ms, start_ms)]
