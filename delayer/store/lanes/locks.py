"""Ownership of lanes: presence of live processes, the locks of lanes, and one look at both.

There are two advisory locks. A process holds its *presence* on a connection of its own. The lock is shared by all
processes, so the number of its holders is the number of live processes. A lane's lock is held on the lane's connection.
Both end with their session. The server ends the session when a process dies, hangs or is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import asyncpg
from asyncpg import Connection

from delayer.core.message import LaneRow, LaneTable
from delayer.store import pool, statements
from delayer.store.clock import StoreClock
from delayer.store.errors import translated
from delayer.store.lanes.cursor import ReleaseCursor
from delayer.store.lanes.lane import PostgresLane
from delayer.store.lanes.notify import listen

LOOK_TIMEOUT: Final = 5.0
"""How long a look may take."""

_PRESENCE = "SELECT pg_try_advisory_lock_shared('lane'::regclass::oid::int, 0), pg_backend_pid()"
_LOCK = "SELECT pg_try_advisory_lock('lane'::regclass::oid::int, $1)"
_TAKE = "UPDATE lane SET epoch = epoch + 1, owner = $2, broker = $3 WHERE number = $1 RETURNING epoch, watermark, route"
ADD: Final = (
    "INSERT INTO lane (number, epoch, owner, route)"
    " SELECT coalesce(max(number), 0) + 1, 0, '', $1 FROM lane ON CONFLICT DO NOTHING"
)
# The server's idle timeouts do not act while it waits for the client in the middle of a statement: between Parse and
# Bind, or in a COPY. A process that freezes there would keep its lanes, its presence, and the locks of its parks.
_END_FROZEN = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE datname = current_database() AND usename = current_user AND state = 'active' AND wait_event = 'ClientRead'
  AND query_start < clock_timestamp() - make_interval(secs => CASE
      WHEN application_name LIKE 'delayer lane %' OR application_name = 'delayer presence' THEN $1::float8
      WHEN application_name IN ('delayer park', 'delayer act') THEN $2::float8 END)
"""
FROZEN_SECONDS: Final = 60.0
"""After how long a park is ended that says nothing in the middle of a COPY. Its rows come in within milliseconds."""


def application_of(lane: int) -> str:
    """The name of the sessions of ``lane``. The first holds its lock."""
    return f"delayer lane {lane}"


class LaneLocks:
    """Looks, and takes lanes, for one process."""

    def __init__(
        self,
        url: str,
        pool: asyncpg.Pool,
        clock: StoreClock,
        *,
        owner: str,
        idle: float,
        releasing: float,
        broker: Callable[[], str] = str,
        history: bool = False,
    ) -> None:
        """``idle``: seconds after which the server ends a connection of a lane, or of the presence, that says nothing,
        in a transaction or not; ``releasing``: for how long a release is kept from that. ``broker``: its mark.
        ``history``: whether its lanes write one."""
        self._url = url
        self._pool = pool
        self._clock = clock
        self._owner = owner
        self._releasing = releasing
        self._broker = broker
        self._history = history
        self._presence: Connection | None = None
        self._pid = 0
        self._idle_seconds = idle
        self._idle = {"idle_session_timeout": f"{idle * 1000:.0f}ms", "tcp_user_timeout": f"{idle * 1000:.0f}ms"}
        self._lane_settings = self._idle | {
            "idle_in_transaction_session_timeout": f"{idle * 1000:.0f}ms",
            # The claim's plan must be an index range and a join by place, also with wrong statistics of a partition
            # that was just filled. A wrong plan took 122 ms a claim instead of 4.
            "enable_seqscan": "off",
            "enable_bitmapscan": "off",
            "enable_hashjoin": "off",
            "enable_mergejoin": "off",
        }

    async def look(self, frozen_seconds: float = FROZEN_SECONDS) -> LaneTable:
        """Look at lanes and live processes. The first look makes this process present. Every look ends the sessions of
        parks that said nothing for ``frozen_seconds``. Raises StoreLost."""
        if self._presence is None or self._presence.is_closed():
            self._presence, self._pid = await pool.connect(self._url, "delayer presence", self._idle), 0
        try:
            with translated("look at lanes"):
                if not self._pid:
                    self._pid = await self._presence.fetchval(_PRESENCE, column=1)
                await self._presence.execute(_END_FROZEN, self._idle_seconds, frozen_seconds, timeout=LOOK_TIMEOUT)
                rows = await self._presence.fetch(statements.LOOK, timeout=LOOK_TIMEOUT)
        except BaseException:
            self.leave()
            raise
        present = sorted(pid for row in rows[:1] for pid in row["present"])
        lanes = [LaneRow(row["number"], row["route"], row["owned"], row["broker"]) for row in rows if row["number"]]
        return LaneTable(lanes, len(present), present.index(self._pid))

    def leave(self) -> None:
        """End the presence: the other processes share this one's lanes. A later look begins it again."""
        if self._presence is not None:
            self._presence.terminate()
            self._presence = None

    async def take(self, number: int) -> PostgresLane | None:
        """Take a lane; None if another process was quicker. Raises StoreLost."""
        connection = await pool.connect(self._url, application_of(number), self._lane_settings)
        second: Connection | None = None
        cursor = ReleaseCursor(self._clock)
        try:
            with translated(f"take lane {number}"):
                if not await connection.fetchval(_LOCK, number):
                    await pool.close(connection)
                    return None
                # Before anything is read: a row that others put into the lane from here on is either notified or seen.
                await listen(connection, number, cursor.notified)
                second = await pool.connect(self._url, application_of(number), self._lane_settings)
                # Waits for parks that are under way in the old epoch; when it returns, all of them can be seen.
                epoch, watermark, route = await connection.fetchrow(_TAKE, number, self._owner, self._broker())
                await pool.sample(connection, self._clock)
                cursor.begin(watermark, await connection.fetchval(statements.NEXT_RETRY, number))
        except BaseException:
            connection.terminate()
            if second is not None:
                second.terminate()
            raise
        return PostgresLane(
            number,
            route,
            epoch,
            cursor,
            (connection, second),
            clock=self._clock,
            pool=self._pool,
            release_seconds=self._releasing,
            history=self._history,
        )

    async def add_routes(self, routes: Collection[bytes]) -> None:
        """Make lanes for limited routes that have none. Raises StoreLost."""
        with translated("make lanes of routes"):
            async with pool.borrowed(self._pool) as connection:
                for route in sorted(routes):
                    await connection.execute(ADD, route)
