"""Rows that a lane's claims skip for a while, because the database rejects every statement that moves them.

A rejected claim is repeated with half as many rows, until only the row to skip is left. The pauses grow like those of
held rows. The rows stay where they are, so the scan of the lane's next owner finds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import asyncpg
import structlog
from asyncpg import Connection, Record

from delayer.core.backoff import pause_ms
from delayer.core.errors import Rejected
from delayer.store.clock import StoreClock
from delayer.store.errors import describe

log = structlog.get_logger()

MOST: Final = 100
"""Maximum number of skipped rows. If the database rejects more, the rows are not the cause."""
NEXT_STEP: Final = 'find what rejects it: triggers, constraints (docs/operations.md, "A row that the database rejects")'
NO_LIMIT: Final = 1 << 30
_FIRST: Final = """
SELECT id, due_at FROM message
WHERE lane = $1 AND due_at >= $2 AND (due_at, id) > ($2, $3) AND due_at <= $4 AND id <> ALL($5)
ORDER BY due_at, id LIMIT 1
"""
"""The first row of a claim, with the arguments of claim.sql."""


class SkippedRows:
    def __init__(self, lane: int, clock: StoreClock) -> None:
        self.limit = NO_LIMIT
        """How many rows a claim may take. It shrinks to find a rejected row."""
        self.ids: list[int] = []
        self._lane = lane
        self._clock = clock
        self._times: Counter[int] = Counter()  # How often each row was skipped.
        self._paused: dict[int, tuple[int, float]] = {}  # By id: the due instant, and the end of the pause.

    @property
    def full(self) -> bool:
        """Whether no more rows can be skipped. The lane then must not release anything."""
        return len(self._paused) >= MOST

    def add(self, id: int, due_ms: int, reason: str) -> None:
        """Skip the row for a pause, unless too many are skipped."""
        if self.full:
            return
        self._times[id] += 1
        pause = pause_ms(self._times[id], id) / 1000
        self._paused[id] = due_ms, self._clock.monotonic() + pause
        self.ids = list(self._paused)
        log.error("row skipped", lane=self._lane, id=id, reason=reason, seconds=round(pause), next_step=NEXT_STEP)

    def end_pauses(self) -> list[int]:
        """Remove pauses that are over. Returns the due instants of their rows."""
        now = self._clock.monotonic()
        over = [id for id, (_, until) in self._paused.items() if until <= now]
        due_ms = [self._paused.pop(id)[0] for id in over]
        self.ids = list(self._paused)
        return due_ms

    async def find_first(self, connection: Connection, where: Sequence[object]) -> Record | None:
        """Return the first row of a claim. ``where``: the first arguments of claim.sql. Raises the driver's errors."""
        return await connection.fetchrow(_FIRST, *where)

    def rejected(self, limit: int, first: Record | None, error: asyncpg.PostgresError) -> Rejected:
        """Record a rejected claim of ``limit`` rows: the next takes half as many, or skips ``first``, its only row."""
        self.limit = max(1, limit // 2)
        if first is not None:
            self.add(first["id"], first["due_at"], describe(error))
        return Rejected(f"lane {self._lane}: claim: {describe(error)}")
