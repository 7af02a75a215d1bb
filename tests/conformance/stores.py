"""The stores of the suites for the ports of intake and release: the one on Postgres, and its fake in memory."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Protocol

from delayer.core.counters import Counters
from delayer.core.hold import Hold
from delayer.core.message import Due, Parcel
from delayer.core.operations import Applied, Operation
from delayer.intake.ports import Backlog, Clock
from delayer.release.ports import Lane, Releases
from delayer.store.backlog import PostgresBacklog
from delayer.store.lanes.lane import PostgresLane
from delayer.store.postgres import PostgresStore
from tests.support.fakes import Heartbeat
from tests.support.memory_store import MemoryBacklog, MemoryLane, MemoryStore
from tests.support.rows import conserved
from tests.support.store import MANY, ROOM, cut, release_all, sql

POLL_SECONDS = 0.05


class StorePart(Backlog, Clock, Releases, Protocol):
    """The store as one daemon sees it."""

    async def run(self, stopping: asyncio.Event) -> None: ...


class Daemon:
    """A daemon's part of a store. The test is its release: it claims from :attr:`lanes`."""

    def __init__(self, backlog: StorePart) -> None:
        self.backlog = backlog
        self.lanes: list[Lane] = []
        self.stopping = asyncio.Event()
        self.began = False
        """Whether it began a term; its first operations begin one."""
        self._taken = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.backlog.run(self.stopping)), asyncio.create_task(self._take())]
        try:
            yield
        finally:
            self.stopping.set()
            await asyncio.gather(*tasks)
            for task in self._closing:
                task.cancel()

    async def _take(self) -> None:
        async for lane in self.backlog.lanes():
            self.lanes.append(lane)
            self._taken.set()
            self._closing.add(asyncio.create_task(self._close_when_left(lane)))

    async def _close_when_left(self, lane: Lane) -> None:
        await lane.leaving.wait()
        self.lanes.remove(lane)
        await lane.close()

    async def has(self, count: int) -> list[Lane]:
        """Wait until it has this many lanes, and return them."""
        while len(self.lanes) < count:
            self._taken.clear()
            await self._taken.wait()
        return self.lanes

    @property
    def now_ms(self) -> int:
        return self.backlog.now_upper_ms()

    async def apply(self, *operations: Operation) -> Applied:
        if not self.began:
            self.began = True
            self.backlog.begin_term()
        return await self.backlog.apply(operations)

    async def release_all(self) -> list[Due]:
        """Release every due row of its lanes."""
        return [row for lane in tuple(self.lanes) for row in await release_all(lane)]


Standing = tuple[Sequence[tuple[object, ...]], Counter[tuple[object, ...]], dict[str, int], Counter[tuple[object, ...]]]
"""Waiting messages in the order of (due, arrival), held ones, counters of all lanes, and the history."""


def waiting(parcel: Parcel) -> tuple[object, ...]:
    return parcel.due_ms, parcel.route, parcel.target, parcel.properties, parcel.body, parcel.key


class MemoryStores:
    """A store in memory."""

    def __init__(self, lanes: int) -> None:
        self.store = MemoryStore(lambda: int(time.time() * 1000), lanes)

    @asynccontextmanager
    async def daemon(self, routes: Collection[bytes] = ()) -> AsyncIterator[Daemon]:
        daemon = Daemon(MemoryBacklog(self.store, routes, POLL_SECONDS))
        async with daemon.running():
            yield daemon

    async def lose(self, lane: Lane) -> None:
        """Terminate the sessions of a lane, as the server does if a process hangs."""
        assert isinstance(lane, MemoryLane)
        lane.end()

    async def hurry(self, lane: Lane) -> None:
        """Let the held messages be retried now."""
        for one in self.store.messages.values():
            if one.retry_ms is not None:
                one.retry_ms = self.store.now_ms()
        self.store.wake(lane.number)

    async def totals(self) -> dict[str, int]:
        """The counters of all lanes together, after a check of the law of conservation."""
        return {kind: n for kind, n in self.store.conserved().items() if n}

    async def lanes_of_waiting(self) -> Counter[int]:
        return Counter(one.lane for one in self.store.messages.values() if one.hold is None)

    async def standing(self) -> Standing:
        there = sorted(self.store.messages.values(), key=lambda one: (one.parcel.due_ms, one.id))
        assert self.store.keys == {one.parcel.key: one for one in there if one.parcel.key is not None}
        return (
            [waiting(one.parcel) for one in there if one.hold is None],
            Counter((*waiting(one.parcel), one.hold.kind, one.attempts) for one in there if one.hold is not None),
            await self.totals(),
            Counter(self.store.history),
        )


_WHAT = "due_at, route, to_exchange, to_key, properties, body, key"
_KEYS = "SELECT key, id FROM message_key ORDER BY key"
_KEYED = "SELECT key, id FROM (SELECT key, id FROM message UNION ALL SELECT key, id FROM held) m WHERE key IS NOT NULL"
# In order: two sessions that lock the same rows in different orders would deadlock.
_HURRY = (
    "UPDATE held SET retry_at = now()"
    " WHERE id IN (SELECT id FROM held WHERE retry_at IS NOT NULL ORDER BY id FOR UPDATE)"
)


class PostgresStores:
    """A database."""

    def __init__(self, url: str, lanes: int) -> None:
        self.url = url
        self._lanes = lanes

    @asynccontextmanager
    async def daemon(self, routes: Collection[bytes] = ()) -> AsyncIterator[Daemon]:
        async with sql(self.url) as admin:
            await admin.execute("DELETE FROM lane WHERE number > $1 AND route IS NULL", self._lanes)
        link = SimpleNamespace(current=True, connects=1)
        backlog = PostgresBacklog(link, heartbeat=Heartbeat(), counters=Counters(), poll_seconds=POLL_SECONDS)
        backlog.configure(lambda: PostgresStore.connect(lambda: self.url, history_days=1), routes)
        daemon = Daemon(backlog)  # type: ignore[arg-type]
        async with daemon.running():
            yield daemon

    async def lose(self, lane: Lane) -> None:
        await cut(self.url, f"delayer lane {lane.number}")
        with suppress(TimeoutError):
            await asyncio.wait_for(lane.wait(60.0), 10.0)

    async def hurry(self, lane: Lane) -> None:
        assert isinstance(lane, PostgresLane)
        async with sql(self.url) as hand:
            await hand.execute(_HURRY)
        await lane.scan()

    async def totals(self) -> dict[str, int]:
        async with sql(self.url) as admin:
            return {kind: n for kind, n in (await conserved(admin)).items() if n}

    async def lanes_of_waiting(self) -> Counter[int]:
        async with sql(self.url) as admin:
            return Counter(dict(await admin.fetch("SELECT lane, count(*) FROM message GROUP BY lane")))

    async def standing(self) -> Standing:
        async with sql(self.url) as admin:
            rows = await admin.fetch(f"SELECT {_WHAT} FROM message ORDER BY due_at, id")
            held = await admin.fetch(f"SELECT {_WHAT}, kind, attempts FROM held")
            changes = await admin.fetch("SELECT what, route, to_exchange, to_key, due_at FROM history")
            assert sorted(await admin.fetch(_KEYED)) == await admin.fetch(_KEYS)
        return (
            [_nested(row, 2) for row in rows],
            Counter(_nested(row, 2) for row in held),
            await self.totals(),
            Counter(_nested(row, 2) for row in changes),
        )


def _nested(row: Sequence[object], at: int) -> tuple[object, ...]:
    """The values of a row, with exchange and key of the target as one."""
    return (*row[:at], tuple(row[at : at + 2]), *row[at + 2 :])


Stores = MemoryStores | PostgresStores


@asynccontextmanager
async def one_lane(stores: Callable[[int], Stores]) -> AsyncIterator[tuple[Daemon, Lane]]:
    """A daemon, and its only lane."""
    async with stores(1).daemon() as daemon:
        [lane] = await daemon.has(1)
        yield daemon, lane


async def hold_all(lane: Lane, hold: Hold) -> list[Due]:
    """Hold every due row."""
    rows = await lane.claimers[0].claim(MANY, ROOM)
    await lane.claimers[0].settle([], [(row, hold) for row in rows])
    return rows


@asynccontextmanager
async def waking(lane: Lane) -> AsyncIterator[None]:
    """The block wakes the waiting lane long before its time."""
    sleeper = asyncio.create_task(lane.wait(50.0))
    await asyncio.sleep(0)
    assert not sleeper.done()
    yield
    async with asyncio.timeout(40.0):
        await sleeper
