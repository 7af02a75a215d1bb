"""The release cursor of a lane: the place where its claims begin, and the instant of its next claim. No connection, no
SQL.

A claim takes the rows that are due within the *window*. The *place* is a due instant and an id, before which the lane
has no rows but those of open claims. Claims begin there, so they never read dead index entries again, which slow other
Postgres queues down. The place moves at these moments:

- claim: to the last row that was taken. After an empty claim: to the next row, or to the lower bound of the store's
  clock if that is sooner.
- note: back to a row that was put before it. A note during a claim is kept until the claim is made.
- rollback: back to the place where the claim began.
- scan: back to an unannounced row. Once a minute another connection reads the lane from its beginning.

The lane writes a watermark into its row every few seconds, for the next owner: the due instant of this place, or of an
open claim's beginning.
"""

from __future__ import annotations

import asyncio
from typing import Final

from delayer.store import pool
from delayer.store.clock import StoreClock
from delayer.store.lanes.notify import WAITING

NEVER_MS: Final = 1 << 60
LOCKED_MS: Final = 1_000
"""How long claims take no held rows after another transaction had them locked: no event says when they are free."""
LEAD_MS: Final = 40
"""A claim begins this long before its first message is due. The claim itself takes as long on a busy machine."""

RowPlace = tuple[int, int]
"""A due instant in epoch milliseconds, and an id."""


class ReleaseCursor:
    """The lane reports its claims, parks and notifications; the cursor answers where and when to claim next.

    It takes notifications before its owner knows where the lane begins: :meth:`begin`."""

    def __init__(self, clock: StoreClock, lead_ms: int = LEAD_MS) -> None:
        """``lead_ms``: how long before its first message is due a claim begins."""
        self._clock = clock
        self._lead_ms = lead_ms
        self._clock_steps = clock.steps
        self.woken = asyncio.Event()
        """Set when something is due sooner than was known."""
        self.place: RowPlace = (NEVER_MS, 0)
        self.noted = NEVER_MS  # The soonest row noted, or given back, since the last claim began.
        self.retry_ms = NEVER_MS  # The soonest retry of a held row.
        self.more = True
        """Whether to claim at once: the last claim may have left due rows, or was rolled back."""
        self.retrying = False
        """Whether an open claim has held rows: the others take none."""
        self._next = NEVER_MS  # The due instant of the first row after the last claim, or the horizon of that claim.
        self._passed_over_ms = pool.BEGINNING_MS  # Claims take no held rows before this instant.
        self._held_turn = False

    def begin(self, watermark: int, retry_ms: int | None) -> None:
        """The lane has no rows before ``watermark``, and its first held row is retried at ``retry_ms``."""
        self.place = min(self.place, (watermark, 0))
        if retry_ms is not None:
            self.expect_retry(retry_ms)

    @property
    def clock_stepped(self) -> bool:
        """Whether the store's clock was set since :meth:`forget_after_step`."""
        return self._clock_steps != self._clock.steps

    def forget_after_step(self) -> None:
        """Forget a place that was taken from a clock that was set since."""
        if self.clock_stepped:
            self._clock_steps = self._clock.steps
            self.place, self._passed_over_ms = (pool.BEGINNING_MS, 0), pool.BEGINNING_MS
            self.more = True

    def claiming(self) -> None:
        """A claim of waiting rows begins."""
        self.forget_after_step()
        self.noted = NEVER_MS

    def held_turn(self) -> bool | None:
        """Take the next turn: whether it is that of held rows. None if no retry is due."""
        if self.next_retry_ms() > self._clock.now_upper_ms():
            return None
        self._held_turn = not self._held_turn
        return self._held_turn

    def claimed(self, last: RowPlace, *, next_ms: int | None, more: bool) -> None:
        """Waiting rows were claimed, up to ``last``. ``next_ms``: the due instant of the first row after it, or the
        horizon, if that was asked for; ``more``: that row is due within the window, or may be."""
        self.place = min(last, (self.noted, 0))
        self.more = more
        self._next = NEVER_MS if next_ms is None else next_ms

    def rolled_back(self, start: RowPlace | None) -> None:
        """The claim that began at ``start`` was rolled back, or a claim failed."""
        if start is not None:
            self.place = min(self.place, start)
            self.noted = min(self.noted, start[0])
        self.more = True
        self.woken.set()

    def wake_ms(self) -> int:
        """When the next claim begins, unless there is more to claim already."""
        return min(min(self.noted, self._next) - self._lead_ms, self.next_retry_ms())

    def next_retry_ms(self) -> int:
        """From when on a claim asks for held rows."""
        return NEVER_MS if self.retrying else max(self.retry_ms, self._passed_over_ms)

    def pass_over_retries(self) -> None:
        """Held rows were due, and a claim got none of them: another transaction has them locked."""
        self._passed_over_ms = self._clock.now_upper_ms() + LOCKED_MS

    def note_parked(self, due_ms: int) -> None:
        """A row that is due at ``due_ms`` was put into the lane."""
        self.place = min(self.place, (due_ms, 0))
        if due_ms < self.noted:
            self.noted = due_ms
            self.woken.set()

    def note_held(self, retry_ms: int) -> None:
        """A held row was put into the lane, to be retried at ``retry_ms``."""
        self._passed_over_ms = pool.BEGINNING_MS
        self.expect_retry(retry_ms)

    def expect_retry(self, retry_ms: int) -> None:
        """A held row is to be retried at ``retry_ms``."""
        if retry_ms < self.retry_ms:
            self.retry_ms = retry_ms
            self.woken.set()

    def notified(self, kind: str, at_ms: int) -> None:
        """Another process put a row into the lane."""
        (self.note_parked if kind == WAITING else self.note_held)(at_ms)

    def scanned(self, watermark: int, first_ms: int | None, retry_ms: int | None) -> None:
        """A scan of the lane found its first waiting row and its first retry. ``watermark``: that of the scan's start,
        before which no claim has rows."""
        place_ms = self.place[0]
        if first_ms is not None and (first_ms < min(watermark, place_ms) or place_ms < first_ms < self._next):
            self.note_parked(first_ms)
        if retry_ms is not None:
            self.note_held(retry_ms)
