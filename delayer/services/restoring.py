"""Restoring segments ahead of time: their messages wait in a lane of ours again long before they are due.

Any daemon restores any segment, the soonest first; several share them, since each is locked while it is restored. One
segment at a time, with a rest after each, so that the traffic has the machine for most of the time; only what is due
at any moment, because every daemon was down when it should have been restored, is restored without a rest.

What does not read back is marked and stands in nobody's way. It is tried again at every start and every hour: a disk or
a memory may have been at fault, a backup may have been put back, or this is the newer version that packed it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from delayer.core.backoff import Sparing
from delayer.core.errors import StoreLost
from delayer.core.segment import Broken, Locked, Restored
from delayer.services.counting import Counters
from delayer.services.failures import LOSSES, raise_first, take_failures
from delayer.services.lanes import Lanes
from delayer.services.retry import Retry

log = structlog.get_logger(__name__)

LOOK: Final = 60.0
"""Seconds between two looks that found nothing to restore. Packing takes what is due in days, so nothing is missed."""
TRY_AGAIN: Final = 3600.0
"""Seconds between two tries of what did not read back; each is told."""
LOOK_AGAIN: Final = 2.0
"""Seconds until the next look while others are restoring what is due: one of them may die at it."""
REST: Final = 3.0
"""How much longer than the restoring of a segment the rest after it takes."""
URGENT_MS: Final = 300_000
"""What is due within this time is restored without rests."""

_MEMORY: Final = "not enough memory to unpack a segment"


class Restoring:
    """The part of a daemon's life that brings segments back."""

    def __init__(self, lanes: Lanes, *, ahead_ms: Callable[[], int], counters: Counters) -> None:
        """``ahead_ms`` says how long before its first message is due a segment is restored."""
        self._lanes = lanes
        self._ahead_ms = ahead_ms
        self._counters = counters

    async def run(self, stopping: asyncio.Event) -> None:
        """Look, and restore what is found, until stopping is set. Raises what is a bug."""
        work = asyncio.create_task(self._work(stopping), name="restoring: work")
        stop = asyncio.create_task(stopping.wait(), name="stopping")
        try:
            await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            work.cancel()  # half of a segment is rolled back: it is a segment again
            await asyncio.wait([work])
        raise_first(take_failures({work}), unless=LOSSES)

    async def _work(self, stopping: asyncio.Event) -> None:
        retry, sparing, running = Retry(stopping, _unwatched), Sparing(), asyncio.get_running_loop()
        again_at = running.time()
        while not stopping.is_set():
            await self._lanes.ready.wait()
            seconds: float | None = None
            try:
                if running.time() >= again_at:
                    await self.try_again()
                    again_at = running.time() + TRY_AGAIN
                seconds = await self.look()
            except StoreLost as lost:
                advice = {"next_step": lost.advice} if lost.advice else {}
                if sparing.worth(str(lost), running.time()):
                    log.warning("restoring interrupted", reason=str(lost), **advice)
            except MemoryError:
                # It is rolled back. What is released meanwhile must not end with it.
                if sparing.worth(_MEMORY, running.time()):
                    log.warning("restoring interrupted", reason=_MEMORY)
            if seconds is None:
                await retry.pause()
                continue
            retry.succeeded()
            sparing.over()
            await asyncio.sleep(seconds)

    async def look(self) -> float:
        """Restore the soonest segment, if it is time; return the seconds until the next look. Raises StoreLost."""
        running = asyncio.get_running_loop()
        began = running.time()
        found = await self._lanes.restore(self._ahead_ms())
        took = running.time() - began
        match found:
            case None:
                return LOOK
            case Restored():
                self._tell_restored(found, took)
                return 0.0 if self._urgent(found.first_due_ms) else REST * took
            case Locked():
                return LOOK_AGAIN
            case Broken():
                self._tell_broken(found)
                return 0.0

    async def try_again(self) -> None:
        """Try what did not read back before, and tell what still does not. Raises StoreLost."""
        running = asyncio.get_running_loop()
        for segment in await self._lanes.doubtful(self._ahead_ms()):
            began = running.time()
            found = await self._lanes.restore_again(segment)
            took = running.time() - began
            if isinstance(found, Restored):
                self._tell_restored(found, took)
            elif isinstance(found, Broken):
                self._tell_broken(found)
            await asyncio.sleep(REST * took)

    def _tell_restored(self, found: Restored, took: float) -> None:
        self._counters.add("restored", found.messages)
        log.info(
            "segment restored",
            segment=found.segment,
            messages=found.messages,
            first_due_ms=found.first_due_ms,
            seconds=round(took, 3),
        )

    def _tell_broken(self, found: Broken) -> None:
        self._counters.add("broken_segments", 1)
        log.error(
            "segment broken",
            segment=found.segment,
            messages=found.messages,
            first_due_ms=found.first_due_ms,
            reason=found.reason,
            next_step=found.advice,
        )

    def _urgent(self, due_ms: int) -> bool:
        now_ms = self._lanes.now_ms()
        return now_ms is not None and due_ms < now_ms + URGENT_MS


def _unwatched() -> None:
    """The watchdog is about the traffic, which goes on without us; each of our statements has its own deadline."""
