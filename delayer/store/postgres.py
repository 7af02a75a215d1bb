"""The store on Postgres: what services.ports.Store asks for, put together from the other modules."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import structlog

from delayer.core.errors import LaneLost, StoreLost
from delayer.core.hold import Hold
from delayer.core.message import Parcel
from delayer.core.segment import Restoration
from delayer.core.values import TakenOut
from delayer.faultpoint import reach
from delayer.store import handover, owners, pagewise, parking, partitions, restoring, schema, segments, session
from delayer.store.clock import StoreClock
from delayer.store.errors import DAMAGED, DRIVER_ERRORS, WORTH_REPEATING, describe, translated
from delayer.store.lane import PostgresLane
from delayer.store.lanes import LaneTaker
from delayer.store.partitions import DAY_MS, Days

log = structlog.get_logger()

ATTEMPTS = 3
"""How often a park is tried when it loses against another transaction."""
CREATE_ATTEMPTS = 100
IDLE_SECONDS = 4.0
"""Fed every second (lane.py), and others look once a second: what a process that hangs had is adopted in about 5."""
CLOSE_SECONDS = 5.0


class PostgresStore:
    """Satisfies services.ports.Store. Made by :meth:`connect`, ended by :meth:`close`."""

    def __init__(
        self, pool: asyncpg.Pool, clock: StoreClock, taker: LaneTaker, days: Days, broker: Callable[[], str] = str
    ) -> None:
        self._broker = broker
        self._shared: list[int] = []
        self._pool = pool
        self._clock = clock
        self._taker = taker
        self._days = days

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
        one that it publishes to (owners.py), "" while that is not known. ``idle_timeout`` (seconds) is
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
        taker = LaneTaker(
            url, pool, clock, owner=owner, idle=idle_timeout, releasing=transaction_timeout, broker=broker
        )
        return cls(pool, clock, taker, days, broker)

    async def close(self) -> None:
        """Close the connections that park, after the parks that run. The lanes are released by whoever took them."""
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

    async def park(self, lane: object, parcels: Sequence[Parcel], cancels: Sequence[bytes]) -> TakenOut:
        """See the port. The ``cancels`` act before the ``parcels``: a message parked by the same call stays."""
        taken_out = TakenOut()
        if not parcels and not cancels:
            return taken_out
        ours = _ours(lane)
        keyed = bool(cancels) or any(parcel.key is not None for parcel in parcels)

        async def work(connection: asyncpg.Connection) -> None:
            nonlocal taken_out
            if keyed:
                taken_out = await parking.park_keyed(connection, ours, parcels, cancels)
            else:
                await parking.park_plain(connection, ours, parcels)

        await self._ensure_days({parcel.due_ms // DAY_MS for parcel in parcels})
        try:
            await self._write("park", ours, work)
        finally:
            # Also when the commit is in doubt: a note too many costs one claim that finds nothing.
            if parcels:
                ours.note_parcels(parcels)
        return taken_out

    async def hold(self, lane: object, parcels: Sequence[tuple[Parcel, Hold]]) -> None:
        """See the port. Counts them as parked, and as held."""
        if not parcels:
            return
        ours = _ours(lane)
        soonest: int | None = None

        async def work(connection: asyncpg.Connection) -> None:
            nonlocal soonest
            soonest = await parking.hold_new(connection, ours, parcels, self._clock.now_ms())

        await self._write("hold", ours, work)
        if soonest is not None:
            ours.note_held(soonest)

    async def restore(self, lane: object, horizon_ms: int) -> Restoration:
        """See the port."""
        with translated("restore"):
            return await restoring.restore_soonest(self._pool, _held(lane), horizon_ms, self._ensure_days)

    async def doubtful(self, horizon_ms: int) -> list[int]:
        """See the port. Raises StoreLost."""
        with translated("look for broken segments"):
            async with session.borrowed(self._pool) as connection:
                try:
                    return await segments.doubtful(connection, horizon_ms)
                except DAMAGED:  # a page of the table
                    return await pagewise.doubtful(connection, horizon_ms)

    async def restore_again(self, lane: object, segment: int) -> Restoration:
        """See the port."""
        with translated("restore"):
            return await restoring.restore_again(self._pool, _held(lane), segment, self._ensure_days)

    async def _ensure_days(self, days: set[int]) -> None:
        with translated("make partitions"):
            await self._days.ensure(self._pool, days, self._clock.now_ms() // DAY_MS, self._clock.monotonic())

    async def _write(
        self, doing: str, lane: PostgresLane, work: Callable[[asyncpg.Connection], Awaitable[None]]
    ) -> None:
        """One transaction around ``work``, again if it lost against another one."""
        for attempt in range(1, ATTEMPTS + 1):
            if not lane.held_by_us:
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

    async def own_free(self, count: int) -> list[Any]:
        """See the port. Raises StoreLost."""
        return await self._taker.take(await self._free_lanes(), count)

    async def own_lanes(self, count: int) -> list[Any]:
        """See the port. Raises StoreLost."""
        lanes: list[PostgresLane] = []
        try:
            await self._own(lanes, count)
        except StoreLost as lost:
            if not lanes:
                raise
            log.warning("store unreachable", doing="own lanes", taken=len(lanes), reason=str(lost))
        except BaseException:
            for lane in lanes:
                await lane.release()
            raise
        return lanes

    async def _own(self, lanes: list[PostgresLane], count: int) -> None:
        """Fill ``lanes`` up to ``count``. Raises StoreLost."""
        lanes += await self.own_free(count)
        if len(lanes) < count:
            lanes += await self._taker.handed_over(count - len(lanes))
        for _ in range(CREATE_ATTEMPTS):
            if len(lanes) == count:
                return
            with translated("own lanes"):
                async with session.borrowed(self._pool) as connection:
                    free = await self._taker.free(connection)
                    if not free:
                        new = await self._taker.create(connection)
                        free = [] if new is None else [new]
            lanes += await self._taker.take(free, count - len(lanes))
        raise StoreLost(f"own lanes: {count} wanted, but other daemons were quicker {CREATE_ATTEMPTS} times")

    async def _free_lanes(self) -> list[int]:
        with translated("own lanes"):
            async with session.borrowed(self._pool) as connection:
                return await self._taker.free(connection)

    async def adopt(self, count: int) -> list[Any]:
        """See the port. Raises StoreLost."""
        with translated("adopt"):
            async with session.borrowed(self._pool) as connection:
                due_soon = await self._taker.due_soon(connection)
        return await self._taker.take(due_soon, count, spare=True)

    async def wanted(self, numbers: Collection[int]) -> set[int]:
        """See the port. Raises StoreLost."""
        with translated("look for who asks for lanes"):
            async with session.borrowed(self._pool) as connection:
                return await handover.wanted(connection, numbers)

    async def maintain(self) -> None:
        """See the port. Raises StoreLost."""
        with translated("maintain"):
            async with session.borrowed(self._pool) as connection:
                await partitions.keep_up(connection, self._clock, self._days)
                await self._look_for_strangers(connection)

    async def _look_for_strangers(self, connection: asyncpg.Connection) -> None:
        """Say once that daemons of another broker own lanes here: they would publish our messages there, and we theirs
        here, whenever one of us adopts a lane of the other."""
        ours = self._broker()
        theirs = [lane for lane, mark in (await owners.brokers(connection)).items() if ours and mark != ours]
        if theirs and theirs != self._shared:
            log.warning("store shared", lanes=theirs, next_step=owners.APART)
        self._shared = theirs


def _held(lane: object) -> PostgresLane:
    """A lane to restore into. Raises LaneLost."""
    ours = _ours(lane)
    if not ours.held_by_us:
        raise LaneLost(f"lane {ours.number}: restore: the connection that holds its lock is gone")
    return ours


def _ours(lane: object) -> PostgresLane:
    """The port speaks of any lane; its own are the only ones that a store can write to."""
    if not isinstance(lane, PostgresLane):
        raise TypeError(f"expected a lane of this store, found {type(lane).__name__}")
    return lane
