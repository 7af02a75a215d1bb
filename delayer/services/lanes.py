"""The lanes of this process: taken at the start, released from, adopted from the dead, let go at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count

import structlog

from delayer.core.errors import LaneLost, StoreLost
from delayer.core.message import Parcel
from delayer.services.counting import Counters
from delayer.services.holding import report
from delayer.services.ports import Lane, Store
from delayer.services.release import Release
from delayer.services.retry import Retry

log = structlog.get_logger(__name__)

LOOK_AROUND = 1.0
"""Seconds between two looks for lanes without an owner."""
MAINTAIN = 60.0
"""Seconds between two rounds of partition upkeep."""


class Lanes:
    """Keeps ``wanted`` lanes of its own and any number of adopted ones, each with a release loop.

    Parks go to our own lanes in turn; adopted lanes are only emptied.
    """

    def __init__(
        self,
        store: Store,
        wanted: int,
        release: Callable[[Lane], Release],
        *,
        beat: Callable[[], None],
        counters: Counters,
    ) -> None:
        self._store = store
        self._wanted = wanted
        self._release = release
        self._beat = beat
        self._counters = counters
        self._own: list[Lane] = []
        self._loops: dict[asyncio.Task[None], Lane] = {}
        self._turn = count()
        self._ready = asyncio.Event()

    @property
    def ready(self) -> asyncio.Event:
        """Set while at least one lane of ours can be parked into."""
        return self._ready

    @property
    def numbers(self) -> list[int]:
        """The lanes that we release from, our own and adopted."""
        return sorted(lane.number for lane in self._loops.values())

    async def park(self, parcels: Sequence[Parcel], cancels: Sequence[bytes]) -> None:
        """Satisfies ports.Parking. A lane lost under our hands costs one try; the next one is another lane."""
        for _ in range(len(self._own)):
            lane = self._next()
            try:
                await self._store.park(lane, parcels, cancels)
            except LaneLost as lost:
                self._disown(lane, lost)
            else:
                return
        raise StoreLost("no lane of ours is left to park into")

    async def hold(self, items: Sequence[tuple[Parcel, str]]) -> None:
        """Satisfies ports.Holder."""
        await self._store.hold(self._next(), items)
        report(items, self._counters)

    async def run(self, stopping: asyncio.Event) -> None:
        """Own, adopt and maintain until stopping is set; then wait for the release loops to let go."""
        retry = Retry(stopping, self._beat)
        rounds = count()
        try:
            while not stopping.is_set():
                self._beat()
                try:
                    await self._own_what_is_wanted(stopping)
                    for lane in await self._store.adopt():
                        log.info("lane adopted", lane=lane.number)
                        self._start(lane, stopping)
                    if next(rounds) % round(MAINTAIN / LOOK_AROUND) == 0:
                        await self._store.maintain()
                    retry.succeeded()
                except StoreLost as lost:
                    log.warning("store unreachable", reason=str(lost))
                    await retry.pause()
                await self._until_next_look(stopping)
        finally:
            self._ready.clear()
            if self._loops:
                await asyncio.wait(self._loops)

    def _next(self) -> Lane:
        if not self._own:
            raise StoreLost("no lane of ours is left to park into")
        return self._own[next(self._turn) % len(self._own)]

    def _disown(self, lane: Lane, lost: LaneLost) -> None:
        log.warning("lane lost", lane=lane.number, reason=str(lost))
        if lane in self._own:
            self._own.remove(lane)
        if not self._own:
            self._ready.clear()

    async def _own_what_is_wanted(self, stopping: asyncio.Event) -> None:
        missing = self._wanted - len(self._own)
        if missing <= 0:
            return
        for lane in await self._store.own_lanes(missing):
            log.info("lane owned", lane=lane.number)
            self._own.append(lane)
            self._start(lane, stopping)
        if self._own:
            self._ready.set()

    def _start(self, lane: Lane, stopping: asyncio.Event) -> None:
        task = asyncio.create_task(self._release(lane).run(stopping), name=f"release lane {lane.number}")
        self._loops[task] = lane

    async def _until_next_look(self, stopping: asyncio.Event) -> None:
        """Wait for a loop to end, for the order to stop, or for the time of the next look."""
        stop = asyncio.create_task(stopping.wait(), name="stopping")
        await asyncio.wait([stop, *self._loops], timeout=LOOK_AROUND, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        for task in [task for task in self._loops if task.done()]:
            lane = self._loops.pop(task)
            if lane in self._own:
                self._own.remove(lane)
            task.result()  # a bug in a loop stops the daemon, loudly
        if not self._own:
            self._ready.clear()
