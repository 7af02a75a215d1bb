"""Executors beside the traffic: one of them works at a time, a piece after another, and rests after each.

Pieces are transactions, so nobody waits for what rests. What daemons do is looked at after each of them; without
traffic all executors work at once, and none rests. On the machine that they share with daemons, broker and database
they come last.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import asyncpg

from delayer.core.giving_way import Pace
from delayer.store import traffic

POLL_SECONDS: Final = 0.05
LOOK_SECONDS: Final = 1.0
"""How often who waits for its turn looks whether there is still somebody to make way for."""
HUNG: Final = "60s"
SESSION: Final[Mapping[str, str]] = {
    # An executor that hangs in the middle of a transaction lets go of its rows after this time, and of its turn.
    "idle_in_transaction_session_timeout": HUNG,
    "idle_session_timeout": HUNG,
}
LAST: Final = 19

_pace = Pace()
"""One for each process: a worker of Spark's has many tasks, one after the other."""


def step_back() -> None:
    """Let this process, and what it starts, have the processor when nobody else wants it. What the database does for it
    is not meant: see :class:`Turns`."""
    os.setpriority(os.PRIO_PROCESS, 0, LAST)


class Turns:
    """The turns of the executor behind ``connection``."""

    def __init__(self, connection: asyncpg.Connection, pace: Pace = _pace, *, hurried: bool = False) -> None:
        """``hurried``: its work is the traffic of the next minutes, and gives way to nobody."""
        self._connection = connection
        self._pace = pace
        self._hurried = hurried

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Pace]:
        """For one piece of work: waits until it may begin, and rests after it. Raises the driver's errors."""
        if self._hurried:
            yield Pace(giving_way=False)
            return
        self._pace.look(await traffic.look(self._connection))
        held = await self._wait()
        began = time.monotonic()
        try:
            yield self._pace
            if held:
                took = time.monotonic() - began
                self._pace.look(await traffic.look(self._connection))
                await asyncio.sleep(self._pace.rest(took))
        finally:
            if held and not self._connection.is_closed():
                await traffic.end_turn(self._connection)

    async def _wait(self) -> bool:
        """Whether the turn is ours; not where nobody needs to wait for it."""
        looked = time.monotonic()
        while self._pace.giving_way:
            if await traffic.take_turn(self._connection):
                return True
            await asyncio.sleep(POLL_SECONDS)
            if time.monotonic() - looked >= LOOK_SECONDS:
                self._pace.look(await traffic.look(self._connection))
                looked = time.monotonic()
        return False
