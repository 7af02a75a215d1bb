"""The store on Postgres: what services.ports.Store asks for, put together from the other modules."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import asyncpg

from delayer.core.errors import LaneLost, StoreLost
from delayer.core.faultpoint import reach
from delayer.core.hold import Hold
from delayer.core.message import Parcel
from delayer.core.segment import Restoration
from delayer.store import pool as session
from delayer.store import schema
from delayer.store.clock import StoreClock
from delayer.store.errors import DRIVER_ERRORS, WORTH_REPEATING, describe, translated
from delayer.store.lanes.lane import PostgresLane
from delayer.store.lanes.locks import LaneLocks, Look
from delayer.store.rows import park, partitions
from delayer.store.rows.park import Placement
from delayer.store.rows.partitions import DAY_MS, Days
from delayer.store.segments import catalog

ATTEMPTS: Final = 3
"""How often a park is tried when it loses against another transaction."""
IDLE_SECONDS: Final = 4.0
"""Fed every second (lane.py), and each process looks once a second: the lanes of a process that hangs are taken in
about 5 seconds."""
CLOSE_SECONDS: Final = 5.0


class PostgresStore:
    """Satisfies services.ports.Store. Made by :meth:`connect`, ended by :meth:`close`."""

    def __init__(self, pool: asyncpg.Pool, clock: StoreClock, locks: LaneLocks, days: Days) -> None:
        self._pool = pool
        self._clock = clock
        self._locks = locks
        self._days = days
        self._routes: Mapping[bytes, int] = {}
        self._turn = 0

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        owner: str | None = None,
        broker: Callable[[], str] = str,
        idle_timeout: float = IDLE_SECONDS,
        transaction_timeout: float = 10.0,
        parkers: int = 4,
    ) -> PostgresStore:
        """Connect, compare the schema, and learn the store's time and partitions.

        ``owner`` names this process in the table of lanes (default: host and process id), ``broker`` is the mark of the
        one that it publishes to (lane_locks.broker_mark). ``idle_timeout`` (seconds) is
        after how long the server takes the lanes of a process that hangs, ``transaction_timeout`` for how long a
        release may take, and after how long a park that says nothing is rolled back: it must be longer than the slowest
        publish. ``parkers`` is how many parks can run at once.

        Raises StoreLost, BadStoreUrl, SchemaOutdated.
        """
        owner = owner or f"{socket.gethostname()}:{os.getpid()}"
        timeout = f"{transaction_timeout * 1000:.0f}ms"
        size = parkers + 1  # and one that restores
        pool = await session.open_pool(url, "delayer park", size, {"idle_in_transaction_session_timeout": timeout})
        clock = StoreClock()
        try:
            with translated("connect"):
                async with session.borrowed(pool) as connection:
                    await schema.check(connection)
                    await session.sample(connection, clock)
                    days = Days(await partitions.existing(connection))
        except BaseException:
            pool.terminate()
            raise
        locks = LaneLocks(
            url, pool, clock, owner=owner, idle=idle_timeout, releasing=transaction_timeout, broker=broker
        )
        return cls(pool, clock, locks, days)

    async def close(self) -> None:
        """End the presence, and close the connections that park, after the parks that run. The lanes are released by
        their loops."""
        self._locks.leave()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._pool.close()
        except DRIVER_ERRORS:
            self._pool.terminate()

    def now_ms(self) -> int:
        """See the port."""
        return self._clock.now_ms()

    def sure_ms(self) -> int:
        """See the port."""
        return self._clock.lower_ms()

    async def park(self, lane: object | None, parcels: Sequence[Parcel], cancels: Sequence[bytes]) -> frozenset[bytes]:
        """See the port. The ``cancels`` act before the ``parcels``: a message parked by the same call stays. Without a
        ``lane``, the messages go into any one, and its owner is notified."""
        taken_out = frozenset[bytes]()
        if not parcels and not cancels:
            return taken_out
        ours = None if lane is None else _ours(lane)
        routes = self._routes
        keyed = bool(cancels) or any(parcel.key is not None for parcel in parcels)

        async def work(connection: asyncpg.Connection) -> None:
            nonlocal taken_out
            place = await self._place(connection, ours, routes)
            if keyed:
                taken_out = await park.park_keyed(connection, place, parcels, cancels)
            else:
                await park.park_plain(connection, place, parcels)

        await self._ensure_days({parcel.due_ms // DAY_MS for parcel in parcels})
        try:
            await self._write("park", ours, work)
        finally:
            # Also when the commit is in doubt: a note too many costs one claim that finds nothing.
            dues = [parcel.due_ms for parcel in parcels if parcel.route not in routes]
            if ours is not None and dues:
                ours.note_parked(min(dues))
        return taken_out

    async def hold(self, lane: object, parcels: Sequence[tuple[Parcel, Hold]]) -> None:
        """See the port. Counts them as parked, and as held."""
        if not parcels:
            return
        ours = _ours(lane)
        soonest: int | None = None

        async def work(connection: asyncpg.Connection) -> None:
            nonlocal soonest
            place = Placement(ours.number, self._routes, ours.epoch)
            soonest = await park.hold_new(connection, place, parcels, self._clock.now_ms())

        await self._write("hold", ours, work)
        if soonest is not None:
            ours.note_held(soonest)

    async def restore(self, horizon_ms: int) -> Restoration:
        """See the port."""
        with translated("restore"):
            return await catalog.restore_soonest(self._pool, horizon_ms, self._ensure_days)

    async def _ensure_days(self, days: set[int]) -> None:
        with translated("make partitions"):
            await self._days.ensure(self._pool, days, self._clock.now_ms() // DAY_MS, self._clock.monotonic())

    async def _place(
        self, connection: asyncpg.Connection, lane: PostgresLane | None, routes: Mapping[bytes, int]
    ) -> Placement:
        if lane is None:
            self._turn += 1
            return await park.anywhere(connection, self._turn)
        return Placement(lane.number, routes, lane.epoch)

    async def _write(
        self, doing: str, lane: PostgresLane | None, work: Callable[[asyncpg.Connection], Awaitable[None]]
    ) -> None:
        """One transaction around ``work``, again if it lost against another one."""
        for attempt in range(1, ATTEMPTS + 1):
            if lane is not None and not lane.held_by_us:
                raise LaneLost(f"lane {lane.number}: {doing}: the connection that holds its lock is gone")
            try:
                async with self._transaction() as connection:
                    await work(connection)
            except WORTH_REPEATING as error:
                if attempt == ATTEMPTS:
                    raise StoreLost(f"{doing}: {describe(error)}, {ATTEMPTS} times") from error
            except DRIVER_ERRORS as error:
                raise StoreLost(f"{doing}: {describe(error)}") from error
            else:
                reach("park.committed")
                return

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[asyncpg.Connection]:
        """A transaction on a pooled connection; whatever goes wrong, the connection does not come back with it open."""
        async with session.borrowed(self._pool) as connection:
            try:
                await connection.execute("BEGIN")
                yield connection
                status = await connection.execute("COMMIT")
            except (LaneLost, *WORTH_REPEATING):
                await connection.execute("ROLLBACK")
                raise
            except BaseException:
                session.end(connection)
                raise
            if status != "COMMIT":
                raise StoreLost(f"the store answered COMMIT by {status}")

    async def look(self) -> Look:
        """See the port. Raises StoreLost."""
        look = await self._locks.look()
        self._routes = look.routes
        return look

    async def take(self, number: int) -> PostgresLane | None:
        """See the port. Raises StoreLost."""
        return await self._locks.take(number)

    async def add_routes(self, routes: Collection[bytes]) -> None:
        """See the port. Raises StoreLost."""
        await self._locks.add_routes(routes)

    def leave(self) -> None:
        """See the port."""
        self._locks.leave()

    async def maintain(self) -> None:
        """See the port. Raises StoreLost."""
        with translated("maintain"):
            async with session.borrowed(self._pool) as connection:
                await partitions.keep_up(connection, self._clock, self._days)


def _ours(lane: object) -> PostgresLane:
    """The port speaks of any lane; its own are the only ones that a store can write to."""
    if not isinstance(lane, PostgresLane):
        raise TypeError(f"expected a lane of this store, found {type(lane).__name__}")
    return lane
