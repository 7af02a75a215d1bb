"""Restoring segments ahead of time: their messages wait in their lane again long before they are due.

Any daemon restores any segment, the soonest first; several share them, since each is locked while it is restored. One
segment at a time, with a rest after each, so that the traffic has the machine for most of the time; only what is due
at any moment, because every daemon was down when it should have been restored, is restored without a rest.

What does not read back is marked and stands in nobody's way. It is tried again at every start and every hour: a disk or
a memory may have been at fault, a backup may have been put back, or this is the newer version that packed it. What is
urgent and sound comes first, and one such try between two looks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import structlog

from delayer.broker.retry import LOSSES, Retry, raise_first, take_failures
from delayer.core.backoff import Sparing
from delayer.core.counters import Counters
from delayer.core.errors import StoreLost
from delayer.core.segment import Broken, Locked, Restored
from delayer.release.lane_manager import LaneManager

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

    def __init__(self, lanes: LaneManager, *, ahead_ms: Callable[[], int], counters: Counters) -> None:
        """``ahead_ms`` says how long before its first message is due a segment is restored."""
        self._lanes = lanes
        self._ahead_ms = ahead_ms
        self._counters = counters
        self._sparing, self._sparing_again = Sparing(), Sparing()
        self._again: deque[int] = deque()
        """What is still to be tried again of what did not read back."""
        self._again_at = 0.0

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
        retry = Retry(stopping, _unwatched)
        while not stopping.is_set():
            await self._lanes.ready.wait()
            await self._list_again()  # before the look, which may mark some more: those have an hour
            seconds: float | None = None
            try:
                seconds = await self.look()
            except (StoreLost, MemoryError) as error:
                self._tell_interrupted(error, self._sparing)
            # After a failed look too: it fails for as long as a page is damaged, and that keeps no others back.
            tried = None if seconds == 0.0 else await self._try_one_again(lost=seconds is None)
            if seconds is None:
                await retry.pause()
                continue
            retry.succeeded()
            self._sparing.over()
            if tried is None:
                await asyncio.sleep(seconds)
            else:
                await asyncio.sleep(tried if seconds in (LOOK, LOOK_AGAIN) else seconds + tried)

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

    async def _list_again(self) -> None:
        """Note what did not read back before, if it is time for it."""
        now = asyncio.get_running_loop().time()
        if self._again or now < self._again_at:
            return
        self._again_at = now + min(LOOK, TRY_AGAIN)  # should this fail
        try:
            self._again.extend(await self._lanes.doubtful(self._ahead_ms()))
        except StoreLost as error:
            self._tell_interrupted(error, self._sparing_again)
        else:
            self._again_at = now + TRY_AGAIN

    async def _try_one_again(self, *, lost: bool) -> float | None:
        """Try one of what did not read back before, and tell if it still does not; the seconds of the rest after it,
        None if there is none. What fails is told, and the next one comes. ``lost``: the look before failed."""
        if not self._again:
            return None
        running = asyncio.get_running_loop()
        began = running.time()
        segment = self._again.popleft()
        try:
            found = await self._lanes.restore_again(segment)
        except (StoreLost, MemoryError) as error:
            self._tell_interrupted(error, self._sparing_again, segment)
            if lost:
                self._again.append(segment)  # perhaps it was not the segment's fault
            return REST * (running.time() - began)
        took = running.time() - began
        if isinstance(found, Restored):
            self._tell_restored(found, took)
        elif isinstance(found, Broken):
            self._tell_broken(found)
        return REST * took

    def _tell_interrupted(self, error: StoreLost | MemoryError, sparing: Sparing, segment: int | None = None) -> None:
        """A lack of memory too is rolled back; what is released meanwhile must not end with it."""
        reason = str(error) if isinstance(error, StoreLost) else _MEMORY
        advice = {"next_step": error.advice} if isinstance(error, StoreLost) and error.advice else {}
        where = {} if segment is None else {"segment": segment}
        if sparing.worth(f"{segment}: {reason}", asyncio.get_running_loop().time()):
            log.warning("restoring interrupted", reason=reason, **where, **advice)

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
        """An error, and counted, when it is news; a warning afterwards, and where it only takes a newer version."""
        facts = found._asdict() | {"next_step": found.advice}
        del facts["newer"], facts["known"]
        if found.known or found.newer:
            log.warning("segment broken", **facts)
        else:
            self._counters.add("broken_segments", 1)
            log.error("segment broken", **facts)

    def _urgent(self, due_ms: int) -> bool:
        now_ms = self._lanes.now_ms()
        return now_ms is not None and due_ms < now_ms + URGENT_MS


def _unwatched() -> None:
    """The watchdog is about the traffic, which goes on without us; each of our statements has its own deadline."""
