"""The lanes of this process: its even share of the store's lanes.

Once a second the process queries how many processes live and which lanes have an owner. It drops lanes above its share,
and takes free lanes up to it. Lanes of limited routes are shared separately. Their remainder goes to the last
processes, so that no process has two lanes more than another. A process without its broker for 10 seconds drops all
lanes and its presence, so that others take them. It takes no lane before its first connection to the broker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Final, Protocol

import structlog

from delayer.core.errors import StoreLost
from delayer.core.message import LaneTable
from delayer.store.foreign_locks import ADVICE
from delayer.store.lanes.lane import PostgresLane
from delayer.store.lanes.locks import LaneLocks

log = structlog.get_logger(__name__)

MORE_LANES: Final = "`delayer db lanes N` raises the number of lanes"
AWAY_SECONDS: Final = 10.0
LOGGED_LANES: Final = 20
"""Maximum number of limited routes' lanes named in one log line."""


class BrokerLink(Protocol):
    """The connection to the broker to which the lanes publish."""

    @property
    def current(self) -> object | None:
        """The open connection; None if closed."""

    @property
    def connects(self) -> int:
        """How often it was opened."""


def share(lanes: int, live: int, rank: int) -> int:
    """How many of ``lanes`` the process of this rank owns, among ``live`` processes.

    >>> [share(5, 3, rank) for rank in range(3)]
    [2, 2, 1]
    """
    return lanes // live + (rank < lanes % live)


class LaneOwnership:
    def __init__(self, link: BrokerLink, away_seconds: float) -> None:
        self.own: Sequence[PostgresLane] = ()
        """The lanes of this process to park into, without those of limited routes."""
        self.ordinary: Sequence[int] = ()
        """All lanes without a limited route, also those of other processes."""
        self.usable = asyncio.Event()
        """Set while there is a lane to park into."""
        self.spare = asyncio.Event()
        """Set while this process has no share, because there are more processes than lanes."""
        self.intake = 0
        """The epoch of the intake at the last look."""
        self.live = 0
        """The number of live processes of the store at the last look."""
        self.routes: Collection[bytes] = ()
        """The limited routes. Each needs its own lane."""
        self.foreign: Sequence[str] = ()
        """The sessions of other roles that had locks of the store at the last look."""
        self._link = link
        self._away_seconds = away_seconds
        self._away_since: float | None = None
        self._lanes: list[PostgresLane] = []  # In the order taken, until they are closed.
        self._taken: asyncio.Queue[PostgresLane | None] = asyncio.Queue()

    @property
    def numbers(self) -> list[int]:
        """The lanes from which this process releases."""
        return sorted(lane.number for lane in self._lanes)

    @property
    def stuck(self) -> list[int]:
        """The lanes of this process that do not advance."""
        return sorted(lane.number for lane in self._lanes if lane.stuck)

    async def lanes(self) -> AsyncIterator[PostgresLane]:
        """Yield each lane taken, until :meth:`close`."""
        while (lane := await self._taken.get()) is not None:
            yield lane

    async def look(self, locks: LaneLocks, stopping: asyncio.Event) -> None:
        """Take and drop lanes once; without a broker drop all. Raises StoreLost."""
        self._lanes = [lane for lane in self._lanes if not lane.ended.is_set()]
        if self._is_away():
            self.drop(self._held(), "no broker")
            locks.leave()
            return
        table = await self.ensure_lanes(locks, self.routes)
        self.live, self.intake = table.live, table.intake
        self._log_foreign(table.foreign)
        self.ordinary = [row.number for row in table.lanes if row.route is None]
        if not self.ordinary:
            raise StoreLost("the store has no lanes", "run `delayer db upgrade`")
        await self._take_share(locks, table, stopping)

    async def ensure_lanes(self, locks: LaneLocks, routes: Collection[bytes]) -> LaneTable:
        """Query the lanes, and create those missing for limited ``routes``. Raises StoreLost."""
        table = await locks.look()
        if missing := set(routes) - set(table.routes):
            await locks.add_routes(missing)
            table = await locks.look()
        return table

    def drop(self, lanes: Sequence[PostgresLane], reason: str) -> None:
        """Ask the releases of these lanes to end after their open claims."""
        for lane in lanes:
            lane.leave()
            if lane.route is None:
                log.info("lane dropped", lane=lane.number, reason=reason)
        if limited := [lane for lane in lanes if lane.route is not None]:
            log.info("limited lanes dropped", **_few(limited), reason=reason)
        self._update()

    async def end(self) -> None:
        """Drop all lanes and wait until their releases have closed them."""
        for lane in self._lanes:
            lane.leave()
        for lane in self._lanes:
            await lane.ended.wait()
        self._update()

    async def close(self) -> None:
        """Close all lanes, without waiting for their releases."""
        self._taken.put_nowait(None)
        await asyncio.gather(*(lane.close() for lane in self._lanes))
        self._update()

    def _is_away(self) -> bool:
        """Whether the broker has been unreachable for ``away_seconds``, or since the start."""
        now = time.monotonic()
        if self._link.current is not None:
            self._away_since = None
            return False
        if not self._link.connects:
            return True
        self._away_since = self._away_since or now
        return now - self._away_since >= self._away_seconds

    async def _take_share(self, locks: LaneLocks, table: LaneTable, stopping: asyncio.Event) -> None:
        """Raises StoreLost."""
        free = {row.number for row in table.lanes if not row.owned}
        part = share(len(self.ordinary), table.live, table.rank)
        self._log_spare(spare=part == 0, live=table.live)
        for number in self._missing(self.ordinary, part, table):
            if len([lane for lane in self._held() if lane.route is None]) >= part or stopping.is_set():
                break
            if number in free and (lane := await locks.take(number)) is not None:
                log.info("lane taken", lane=lane.number)
                self._add(lane)
        limited = sorted(table.routes.values())
        wanted = share(len(limited), table.live, table.live - 1 - table.rank)
        numbers = [number for number in self._missing(limited, wanted, table) if number in free]
        ours = len([lane for lane in self._held() if lane.route is not None])
        if numbers and ours < wanted and not stopping.is_set():
            lanes = await locks.take_limited(numbers[: wanted - ours])
            if lanes:
                log.info("limited lanes taken", **_few(lanes))
            for lane in lanes:
                self._add(lane)

    def _missing(self, numbers: Sequence[int], part: int, table: LaneTable) -> list[int]:
        """Drop lanes above ``part`` of ``numbers``. Returns all ``numbers`` in the order in which to take them."""
        self.drop([lane for lane in self._held() if lane.number in numbers][part:], "above the share of this process")
        # Each process begins at a different lane, so that fewer compete for the same lane.
        begin = table.rank * len(numbers) // table.live
        return [*numbers[begin:], *numbers[:begin]]

    def _add(self, lane: PostgresLane) -> None:
        self._lanes.append(lane)
        lane.on_end = self._update
        self._taken.put_nowait(lane)
        self._update()

    def _held(self) -> list[PostgresLane]:
        """The lanes to keep, in the order taken."""
        return [lane for lane in self._lanes if lane.owned and not lane.leaving.is_set()]

    def _update(self) -> None:
        self.own = [lane for lane in self._held() if lane.route is None]
        (self.usable.set if self.own else self.usable.clear)()

    def _log_foreign(self, found: Sequence[str]) -> None:
        for one in set(found) - set(self.foreign):
            log.error("store locked by another role", reason=one, next_step=ADVICE)
        self.foreign = found

    def _log_spare(self, *, spare: bool, live: int) -> None:
        if spare and not self.spare.is_set():
            log.warning("no lane", processes=live, lanes=len(self.ordinary), next_step=MORE_LANES)
        (self.spare.set if spare else self.spare.clear)()


def _few(lanes: Sequence[PostgresLane]) -> dict[str, object]:
    """Log details about the lanes of limited routes, of which there may be hundreds."""
    return {"count": len(lanes), "lanes": [lane.number for lane in lanes[:LOGGED_LANES]]}
