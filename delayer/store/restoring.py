"""Restores segments ahead of time, so that their messages wait in their lane again long before they are due.

Any daemon restores any segment, soonest first, under a lock, so several daemons share the work. After each
segment a daemon rests, to leave the machine to the traffic, unless a segment is due within minutes, as after a time
when all daemons were down. It marks an unreadable segment and continues with the next. After a repair an operator runs
`delayer restore --all`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import structlog

from delayer.core.backoff import LogThrottle
from delayer.core.counters import Counters
from delayer.core.errors import StoreLost
from delayer.core.segment import Broken, Locked, Restored
from delayer.retry import LOSSES, Backoff, raise_first, take_failures
from delayer.store.backlog import PostgresBacklog

log = structlog.get_logger(__name__)

POLL_SECONDS: Final = 60.0
"""Seconds between polls that find nothing to restore. Compaction packs messages due in days."""
LOOK_AGAIN_SECONDS: Final = 2.0
"""Seconds between polls while other daemons restore the due segments. One of them may die doing so."""
REST: Final = 3.0
"""The rest after a segment, as a multiple of the time its restore took."""
URGENT_MS: Final = 300_000
"""Segments due within this time are restored without rests."""

_MEMORY: Final = "not enough memory to unpack a segment"
_BROKEN: Final = (
    "after the repair of disk or memory run `delayer restore --all`; if that does not help, put its row of the table "
    "segment back from a backup"
)


@dataclass(eq=False)
class SegmentRestorer:
    """Restores the segments of the store whose first message is due within ``ahead_ms()``."""

    backlog: PostgresBacklog
    ahead_ms: Callable[[], int]
    counters: Counters
    _throttle: LogThrottle = field(default_factory=LogThrottle)

    async def run(self, stopping: asyncio.Event) -> None:
        """Poll and restore until stopping is set. Raises only bugs."""
        work = asyncio.create_task(self._work(stopping), name="restoring: work")
        stop = asyncio.create_task(stopping.wait(), name="stopping")
        try:
            await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            work.cancel()  # The server rolls back a half-finished restore.
            await asyncio.wait([work])
        raise_first(take_failures({work}), unless=LOSSES)

    async def _work(self, stopping: asyncio.Event) -> None:
        # The watchdog watches only the traffic, which continues without restores. Each statement here has a deadline.
        retry = Backoff(lambda: None, stopping)
        while not stopping.is_set():
            await self.backlog.wait_usable()
            try:
                seconds = await self.poll()
            except (StoreLost, MemoryError) as error:
                # The store rolled the restore back, even if memory ran out. The release loops continue.
                reason, advice = (str(error), error.advice) if isinstance(error, StoreLost) else (_MEMORY, "")
                if self._throttle.should_log(reason, asyncio.get_running_loop().time()):
                    if advice:
                        log.error("restoring interrupted", reason=reason, next_step=advice)
                    else:
                        log.warning("restoring interrupted", reason=reason)
                await retry.pause()
            else:
                retry.succeeded()
                self._throttle.reset()
                await asyncio.sleep(seconds)

    async def poll(self) -> float:
        """Restore the soonest segment if it is time. Returns the seconds until the next poll. Raises StoreLost."""
        running = asyncio.get_running_loop()
        began = running.time()
        found = await self.backlog.restore(self.ahead_ms())
        took = running.time() - began
        match found:
            case None:
                return POLL_SECONDS
            case Restored():
                self.counters.restored += found.messages
                log.info("segment restored", **found._asdict(), seconds=round(took, 3))
                now_ms = self.backlog.now_upper_ms()
                urgent = now_ms is not None and found.first_due_ms < now_ms + URGENT_MS
                return 0.0 if urgent else REST * took
            case Locked():
                return LOOK_AGAIN_SECONDS
            case Broken():
                self.counters.broken_segments += 1
                log.error("segment broken", **found._asdict(), next_step=_BROKEN)
                return 0.0
