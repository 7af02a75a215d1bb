"""Ownership of lanes: the presence of live processes, the locks of lanes, and a query of both.

There are two kinds of advisory lock. Each process holds its *presence* on a dedicated connection. This lock is shared,
so the number of its holders is the number of live processes. The lane's connection holds the lock of an ordinary lane,
and the presence holds those of limited routes. The server frees the locks when it ends the session of a process that
dies, hangs or is cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import asyncpg
import structlog
from asyncpg import Connection

from delayer.core.errors import StoreLost
from delayer.core.message import LaneRow, LaneTable
from delayer.store import foreign_locks, pool, statements
from delayer.store.clock import StoreClock
from delayer.store.errors import DRIVER_ERRORS, describe, translate_errors
from delayer.store.foreign_locks import ForeignLocks
from delayer.store.lanes.cursor import ReleaseCursor
from delayer.store.lanes.lane import PostgresLane
from delayer.store.lanes.notify import INBOX, INBOX_READER, listen
from delayer.store.lanes.session import LaneSession
from delayer.store.pool import INDEX_ONLY, SameServer
from delayer.store.rows.partitions import Days

log = structlog.get_logger(__name__)

Unlock = Callable[[], Awaitable[None]]

LOOK_TIMEOUT: Final = 5.0
LIMITED_SESSIONS: Final = 3
"""Sessions shared by the lanes of all limited routes of a process."""

_PRESENCE = "SELECT pg_try_advisory_lock_shared('lane'::regclass::oid::int, 0), pg_backend_pid()"
_LOCK = "SELECT pg_try_advisory_lock('lane'::regclass::oid::int, $1)"
_LOCK_EACH = (
    "SELECT number, pg_try_advisory_lock('lane'::regclass::oid::int, number::int) FROM unnest($1::smallint[]) AS number"
)
_LOCK_INBOX = "SELECT pg_try_advisory_lock('delayer_inbox'::regclass::oid::int, 0)"
_UNLOCK = "SELECT pg_advisory_unlock('lane'::regclass::oid::int, $1)"
_TAKE = (
    "UPDATE lane SET epoch = epoch + 1, owner = $2 WHERE number = ANY($1::smallint[])"
    " RETURNING number, epoch, watermark, route"
)
_RETRIES = "SELECT lane, min(retry_at) FROM held WHERE lane = ANY($1::smallint[]) GROUP BY lane"
ADD: Final = (
    "INSERT INTO lane (number, epoch, owner, route)"
    " SELECT coalesce(max(number), 0) + 1, 0, '', $1 FROM lane ON CONFLICT DO NOTHING"
)
# The server's idle timeouts do not apply while it waits for the client in the middle of a statement, between Parse and
# Bind or in a COPY. A process that freezes there would keep its lanes, its presence and the locks of its parks.
_END_FROZEN = f"""
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE datname = current_database() AND usename = current_user AND state = 'active' AND wait_event = 'ClientRead'
  AND query_start < clock_timestamp() - make_interval(secs => CASE
      WHEN application_name LIKE 'delayer lane %' OR application_name LIKE 'delayer presence%'
          OR application_name = '{INBOX_READER}' THEN $1::float8
      WHEN application_name IN ('delayer park', 'delayer act') THEN $2::float8 END)
"""
_NAME_PRESENCE: Final = "SELECT set_config('application_name', $1, false)"
FROZEN_SECONDS: Final = 60.0
"""When to terminate a park that is silent in the middle of a COPY. Its rows normally arrive within milliseconds."""


def application_of(lane: int) -> str:
    """The name of the sessions of ``lane``, of which the first holds its lock."""
    return f"delayer lane {lane}"


@dataclass(eq=False)
class LaneLocks:
    """Queries and acquires lanes for one process. ``idle``: seconds after which the server ends a silent connection of
    a lane or the presence, even in a transaction. ``releasing``: how long a release is exempt from that."""

    url: Callable[[], str]
    pool: asyncpg.Pool
    clock: StoreClock
    owner: str
    idle: float
    releasing: float
    history: bool = False
    days: Days = field(default_factory=lambda: Days(()))
    server: SameServer = field(default_factory=SameServer)

    def __post_init__(self) -> None:
        self.routes: Mapping[bytes, int] = {}
        """The lane of each limited route, by the last look."""
        self.zone_version = ""
        """The zone data of this process. The name of the presence has it, for `check`."""
        self._presence: Connection | None = None
        self._turn = asyncio.Lock()  # The presence runs one statement at a time.
        self._large_turn = asyncio.Lock()
        self._pid, self._named = 0, ""
        self._limited: list[LaneSession] = []
        idle = f"{self.idle * 1000:.0f}ms"
        self._presence_settings = {"idle_session_timeout": idle, "tcp_user_timeout": idle}
        self._lane_settings = self._presence_settings | {
            "idle_in_transaction_session_timeout": idle,
            **INDEX_ONLY,  # A wrong plan took 122 ms per claim instead of 4.
        }

    async def look(self, frozen_seconds: float = FROZEN_SECONDS) -> LaneTable:
        """Query lanes and live processes, ending sessions of parks that were silent for ``frozen_seconds``. The first
        call makes this process present. Raises StoreLost."""
        try:
            async with self._turn:
                if self._presence is None or self._presence.is_closed():
                    self._presence, self._pid = await self._connect("delayer presence", self._presence_settings), 0
                    self._named = ""
                presence = self._presence  # Another task may leave during a query.
                with translate_errors("look at lanes"):
                    foreign = await foreign_locks.find(presence, LOOK_TIMEOUT)
                    if not self._pid:
                        self._pid = await _take_presence(presence, foreign)
                    await presence.execute(_END_FROZEN, self.idle, frozen_seconds, timeout=LOOK_TIMEOUT)
                    if self._named != self.zone_version:
                        name = f"delayer presence {self.zone_version} {self.owner}"
                        await presence.execute(_NAME_PRESENCE, name, timeout=LOOK_TIMEOUT)
                        self._named = self.zone_version
                    rows = await presence.fetch(statements.LOOK, timeout=LOOK_TIMEOUT)
        except BaseException:
            self.leave()
            raise
        present = sorted(pid for row in rows[:1] for pid in row["present"])
        lanes = [LaneRow(row["number"], row["route"], row["owned"]) for row in rows if row["number"]]
        rank, strangers = present.index(self._pid), list(map(str, foreign))
        table = LaneTable(lanes, len(present), rank, rows[0]["intake"], strangers)
        self.routes = table.routes
        return table

    @property
    def presence(self) -> int:
        """The server process behind the presence; 0 if there is none."""
        return 0 if self._presence is None else self._pid

    def leave(self) -> None:
        """End the presence, so that other processes take over this one's lanes. The next look restores it."""
        if self._presence is not None:
            self._presence.terminate()
            self._presence = None

    async def take(self, number: int) -> PostgresLane | None:
        """Acquire an ordinary lane; None if another process got it first. Raises StoreLost."""
        sessions: list[LaneSession] = []

        async def close() -> None:
            await asyncio.gather(*(session.close() for session in sessions))

        try:
            lock = await self._open_session(application_of(number), sessions)
            with translate_errors(f"take lane {number}"):
                async with sessions[0].turn:  # Else its keeper would interrupt another statement.
                    if not await lock.fetchval(_LOCK, number):
                        lane = None
                    else:
                        cursor = ReleaseCursor(self.clock)
                        # Listen before reading, so that each row added by others from now on is notified or seen.
                        await listen(lock, number, cursor.note_notification)
                        await self._open_session(application_of(number), sessions)
                        [lane] = await self._begin(lock, {number: cursor}, lambda _: (sessions, close))
            if lane is None:
                await close()
        except BaseException:
            await close()
            raise
        return lane

    async def take_limited(self, numbers: Sequence[int]) -> list[PostgresLane]:
        """Acquire those lanes of limited routes that no other process gets first. The presence holds their locks, and
        they share LIMITED_SESSIONS sessions. Raises StoreLost."""
        presence = self._presence
        if presence is None or not numbers:
            return []
        self._limited = [session for session in self._limited if session.is_open]
        while len(self._limited) < LIMITED_SESSIONS:
            await self._open_session("delayer lane limited", self._limited)

        forget: dict[int, Unlock] = {}

        def placed(number: int) -> tuple[Sequence[LaneSession], Unlock]:
            return [self._limited[number % LIMITED_SESSIONS]], partial(self._unlock, presence, number, forget[number])

        try:
            async with self._turn:
                with translate_errors("take lanes of limited routes"):
                    rows = await presence.fetch(_LOCK_EACH, numbers)
                    cursors = {number: ReleaseCursor(self.clock, lead_ms=0) for number, locked in rows if locked}
                    for number, cursor in cursors.items():
                        forget[number] = await listen(presence, number, cursor.note_notification)
                    return await self._begin(presence, cursors, placed)
        except BaseException:
            self.leave()  # Its locks would keep all processes from these lanes.
            raise

    async def take_inbox(self, wake: Callable[[], None]) -> LaneSession | None:
        """Acquire the SQL inbox, and call ``wake`` for each notification about it. Returns the session with its lock;
        None if another process has the inbox. Raises StoreLost."""
        sessions: list[LaneSession] = []
        lock = await self._open_session(INBOX_READER, sessions)
        [session] = sessions
        try:
            with translate_errors("take the SQL inbox"):
                async with session.turn:
                    if await lock.fetchval(_LOCK_INBOX):
                        await lock.add_listener(INBOX, lambda *_: wake())
                        return session
        except BaseException:
            await session.close()
            raise
        await session.close()
        return None

    async def _begin(
        self,
        lock: Connection,
        cursors: Mapping[int, ReleaseCursor],
        placed: Callable[[int], tuple[Sequence[LaneSession], Unlock]],
    ) -> list[PostgresLane]:
        """Begin the lanes locked by ``lock``, each with its sessions. Raises the driver's errors."""
        # Waits for parks under way in the old epoch. When it returns, all of them are visible.
        taken = await lock.fetch(_TAKE, list(cursors), self.owner)
        await pool.sample(lock, self.clock)
        retries = dict(await lock.fetch(_RETRIES, list(cursors)))
        lanes = []
        for number, epoch, watermark, route in taken:
            cursors[number].begin(watermark, retries.get(number))
            sessions, unlock = placed(number)
            lanes.append(
                PostgresLane(
                    number,
                    route,
                    epoch,
                    cursors[number],
                    sessions,
                    unlock=unlock,
                    lock=lock,
                    clock=self.clock,
                    pool=self.pool,
                    days=self.days,
                    release_seconds=self.releasing,
                    history=self.history,
                )
            )
        return lanes

    async def _open_session(self, application: str, sessions: list[LaneSession]) -> Connection:
        """Open a session and add it to ``sessions``. Raises StoreLost."""
        connection = await self._connect(application, self._lane_settings)
        sessions.append(LaneSession(connection, self.clock, application, self._large_turn))
        return connection

    async def _connect(self, application: str, more: Mapping[str, str]) -> Connection:
        """Raises StoreLost."""
        with pool.translate_reconnect_errors():
            connection = await pool.connect(self.url(), application, more)
            await self.server.check(connection)
            return connection

    async def _unlock(self, presence: Connection, number: int, forget: Unlock) -> None:
        """Free the lane of a limited route, and ``forget`` its notifications."""
        if not presence.is_closed():
            async with self._turn:
                try:
                    await forget()
                    await presence.execute(_UNLOCK, number, timeout=LOOK_TIMEOUT)
                except DRIVER_ERRORS as error:
                    log.warning("lane connection broken", session="delayer presence", error=describe(error))
                    presence.terminate()

    async def close(self) -> None:
        """End the presence and the sessions of limited routes."""
        self.leave()
        await asyncio.gather(*(session.close() for session in self._limited))

    async def add_routes(self, routes: Collection[bytes]) -> None:
        """Create lanes for limited routes that have none. Raises StoreLost."""
        with translate_errors("make lanes of routes"):
            async with pool.borrow(self.pool) as connection:
                for route in sorted(routes):
                    await connection.execute(ADD, route)


async def _take_presence(connection: Connection, foreign: Sequence[ForeignLocks]) -> int:
    """Take the lock that all live processes share. Returns the server process behind it. Raises StoreLost, the driver's
    errors."""
    taken, pid = await connection.fetchrow(_PRESENCE)
    if not taken:
        why = "; ".join(map(str, foreign)) or "another session has the lock that all processes share"
        raise StoreLost(f"become present: {why}", foreign_locks.ADVICE)
    return int(pid)
