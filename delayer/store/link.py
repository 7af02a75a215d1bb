"""The one connection of a lane, and the rule that no failure leaves a transaction open on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import structlog

from delayer.core.errors import LaneLost, StoreLost
from delayer.store import session
from delayer.store.errors import DRIVER_ERRORS, describe

log = structlog.get_logger()


class Link:
    """Holds a lane's lock for as long as it is open. One talk at a time."""

    def __init__(self, number: int, connection: asyncpg.Connection) -> None:
        self.number = number
        self._connection = connection
        self._turn = asyncio.Lock()
        self._released = False

    @property
    def alive(self) -> bool:
        return not self._released and not self._connection.is_closed()

    @property
    def quiet(self) -> bool:
        """Alive, and nobody is talking."""
        return self.alive and not self._turn.locked()

    @property
    def idle(self) -> bool:
        """Quiet, and no transaction is open."""
        return self.quiet and not self._connection.is_in_transaction()

    @property
    def connection(self) -> asyncpg.Connection:
        """For EXPLAIN in tests; everything else talks."""
        return self._connection

    @asynccontextmanager
    async def talking(self, doing: str) -> AsyncIterator[asyncpg.Connection]:
        """The connection for one talk. Raises LaneLost when it is gone, StoreLost when the store refused something.

        After a failure the transaction is rolled back. Where that is not certain the connection is cut, and the server
        does it: a transaction that stayed open would be committed by the next one, with deletions nobody knows of.
        """
        async with self._turn:
            if not self.alive:
                raise LaneLost(f"lane {self.number}: {doing}: the connection that holds its lock is gone")
            try:
                yield self._connection
            except DRIVER_ERRORS as error:
                if isinstance(error, TimeoutError):
                    self._connection.terminate()  # the server is silent: nobody knows what it did
                await self._roll_back()
                lost = StoreLost if self.alive else LaneLost
                raise lost(f"lane {self.number}: {doing}: {describe(error)}") from error
            except BaseException:
                # Cancelled between two statements or inside one, or a bug.
                self._connection.terminate()
                raise

    async def roll_back(self) -> None:
        """Take back the open transaction. Does not raise for a connection that is gone."""
        async with self._turn:
            await self._roll_back()

    async def _roll_back(self) -> None:
        if self._connection.is_closed():
            return
        try:
            await self._connection.execute("ROLLBACK")
        except DRIVER_ERRORS as error:
            self._connection.terminate()
            log.warning("rollback failed", lane=self.number, error=describe(error))
        except BaseException:
            self._connection.terminate()
            raise

    async def release(self) -> None:
        """Close; the server rolls back what is open and lets go of the lock. Safe to call twice."""
        self._released = True
        await session.close(self._connection)
