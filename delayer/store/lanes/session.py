"""A connection for the claims of lanes. An ordinary lane has two. The lanes of all limited routes of a
process share a few, because a limit makes their claims small and rare."""

from __future__ import annotations

import asyncio
import math
from contextlib import ExitStack
from typing import Final

import structlog
from asyncpg import Connection

from delayer.store import pool
from delayer.store.clock import StoreClock
from delayer.store.errors import DRIVER_ERRORS, describe

log = structlog.get_logger(__name__)

KEEPALIVE_SECONDS: Final = 1.0
TURN_SECONDS: Final = 1.0
"""How long a claim waits for its locks. Then its caller feeds the watchdog and tries again."""


class LaneSession:
    """One connection, with one open claim at a time."""

    def __init__(self, connection: Connection, clock: StoreClock, name: str, large_turn: asyncio.Lock) -> None:
        """``large_turn``: held by the one claim of the process that may take a large row."""
        self.connection = connection
        self.turn = asyncio.Lock()  # One statement or transaction at a time.
        self.claims = asyncio.Lock()  # Held while a claim is open.
        self.kept_alive_until = math.inf
        """When to stop keeping an open claim from the server's idle timeout, in monotonic seconds."""
        self._large_turn = large_turn
        self._held = ExitStack()  # Releases the locks of the open claim.
        self._clock = clock
        self._name = name
        self._closing = asyncio.Event()
        self._keeper = asyncio.create_task(self._keep(), name=f"{name}: keep")

    @property
    def is_open(self) -> bool:
        """Whether the connection is open, as far as the driver knows."""
        return not self.connection.is_closed()

    async def begin_claim(self, *, large: bool) -> None:
        """Acquire the locks of a claim. Lanes may share the session, and a claim may last as long as a publish. Raises
        TimeoutError."""
        # The large-row lock first, because waiting for it must not keep other lanes from the session.
        with ExitStack() as taken:
            async with asyncio.timeout(TURN_SECONDS):
                for turn in [self._large_turn, self.claims] if large else [self.claims]:
                    await turn.acquire()
                    taken.callback(turn.release)
            self._held = taken.pop_all()

    def end_claim(self) -> None:
        """Release the locks of the claim."""
        self.kept_alive_until = math.inf
        self._held.close()

    async def close(self) -> None:
        """Close the session, and let the server roll back an open claim. Safe to call twice."""
        if not self._closing.is_set():
            self._closing.set()
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
            await pool.close(self.connection)

    async def _keep(self) -> None:
        """Keep the session from its idle timeout by querying the store's time. A process whose event loop hangs loses
        its lanes. An open claim is kept alive until ``kept_alive_until``, because its broker may confirm slowly."""
        while self.is_open:
            await asyncio.sleep(KEEPALIVE_SECONDS)
            if self.turn.locked() or self._clock.monotonic() > self.kept_alive_until:
                continue
            try:
                async with self.turn:
                    await pool.sample(self.connection, self._clock, timeout=5 * KEEPALIVE_SECONDS)
            except DRIVER_ERRORS as error:
                log.warning("lane connection broken", session=self._name, error=describe(error))
                self.connection.terminate()
