"""The lanes that this process has in hand, each with its release loop, and which of its own a park goes to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

import structlog

from delayer.core.errors import LaneLost, StoreLost
from delayer.core.message import Parcel
from delayer.services.counting import Counters
from delayer.services.ports import Lane
from delayer.services.release import Release

log = structlog.get_logger(__name__)

TOGETHER: Final = 128
TOGETHER_BYTES: Final = 1 << 20
"""Messages, or bytes, of a park that goes to the lanes in turn, so that all of them release it side by side: with one
lane a process releases a fifth less in bulk. Smaller parks are a steady traffic's, and stay in one lane: what comes due
of them at a time is one claim, publish and commit instead of two half as large, which spares CPU of the daemon and of
the database (docs/performance.md, punctuality)."""
STAY: Final = 300.0
"""Seconds that small parks stay in one lane while it keeps up: what gathers for one instant, or while nothing can be
released, is in all lanes when its time comes, however little came at a time."""


class LanesInHand:
    """Our own and the adopted ones, until their loops have ended. Knows of no store: lanes.py takes them."""

    def __init__(self, release: Callable[[Lane], Release], counters: Counters) -> None:
        self._release = release
        self._counters = counters
        self.own: list[Lane] = []
        self.loops: dict[asyncio.Task[None], Lane] = {}
        self.adopted: dict[Lane, Release] = {}
        self.releases: dict[Lane, Release] = {}  # of all lanes, until their loops have ended
        self.ready = asyncio.Event()
        """Set while at least one lane of ours can be parked into."""
        self._turn = count()
        self._began = time.monotonic()

    def begin(self, lanes: Sequence[Lane], stopping: asyncio.Event) -> None:
        """Own these."""
        for lane in lanes:
            log.info("lane owned", lane=lane.number)
            self.own.append(lane)
            self._start(lane, stopping)
        if self.own:
            self.ready.set()

    async def keep_one(self) -> None:
        """Make an adopted lane one of our own: at once, and without a connection more."""
        lane = next(iter(self.adopted))
        await lane.keep()
        if self.adopted.pop(lane, None) is not None:
            log.info("lane owned", lane=lane.number)
            self.own.append(lane)
            self.ready.set()

    def adopt(self, lanes: Sequence[Lane], stopping: asyncio.Event) -> None:
        """Only empty these."""
        for lane in lanes:
            log.info("lane adopted", lane=lane.number)
            self.adopted[lane] = self._start(lane, stopping)

    def let_go(self, lane: Lane, reason: str) -> None:
        """Tell the loop of an adopted lane to end."""
        log.info("lane let go", lane=lane.number, reason=reason)
        self.adopted.pop(lane).leave()

    def let_go_own(self, reason: str) -> None:
        """Tell the loop of one of our own to end."""
        lane = self.own.pop()
        log.info("lane let go", lane=lane.number, reason=reason)
        self.releases[lane].leave()
        if not self.own:
            self.ready.clear()

    def _start(self, lane: Lane, stopping: asyncio.Event) -> Release:
        release = self.releases[lane] = self._release(lane)
        self.loops[asyncio.create_task(release.run(stopping), name=f"release lane {lane.number}")] = lane
        return release

    def place(self, *, small: bool = False) -> Lane:
        """Where the next park goes. Raises StoreLost if there is no lane of ours."""
        if not self.own:
            raise StoreLost("no lane of ours to park into")
        return (self._staying() if small else None) or self.own[next(self._turn) % len(self.own)]

    def _staying(self) -> Lane | None:
        """Where small parks go now; None while no lane keeps up."""
        first = int((time.monotonic() - self._began) / STAY) % len(self.own)
        return next((lane for lane in self.own[first:] + self.own[:first] if not self.releases[lane].behind), None)

    def disown(self, lane: Lane, lost: LaneLost) -> None:
        """It was lost under our hands; its loop will find that out."""
        self._counters.lanes_lost += 1
        log.warning("lane lost", lane=lane.number, reason=str(lost))
        if lane in self.own:
            self.own.remove(lane)
        if not self.own:
            self.ready.clear()

    def collect(self) -> None:
        """Forget the loops that have ended, and their lanes. Raises what one of them failed of: a bug."""
        failures = []
        for task in [task for task in self.loops if task.done()]:
            lane = self.loops.pop(task)
            self.adopted.pop(lane, None)
            self.releases.pop(lane, None)
            if lane in self.own:
                self.own.remove(lane)
            if not task.cancelled() and (failure := task.exception()) is not None:
                failures.append(failure)
        if not self.own:
            self.ready.clear()
        if failures:
            raise failures[0]

    async def all_let_go(self) -> None:
        """Wait until every loop has ended."""
        while self.loops:
            await asyncio.wait(self.loops)
            self.collect()


def is_small(parcels: Sequence[Parcel]) -> bool:
    """Whether a park of these is a steady traffic's."""
    return len(parcels) < TOGETHER and sum(len(parcel.body) for parcel in parcels) < TOGETHER_BYTES
