"""The release cursor of a lane: the place where its claims begin, and the instant of its next row. No connection, no
SQL.

The *watermark* is a due instant before which the lane has no rows. Claims begin there, so they never read dead index
entries again, which slow other Postgres queues down. The watermark moves at three places:

- settle: to the last row of the claim. After an empty claim: to the next row, or to the lower bound of the store's
  clock if that is sooner.
- note: back to a row that was put before it. A note during a claim is kept until the claim ends.
- scan: once a minute the lane is read from its beginning, on another connection, for unannounced rows.

The lane writes the watermark into its row every few seconds, for the next owner.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Final, NamedTuple

from delayer.store import pool
from delayer.store.clock import StoreClock
from delayer.store.lanes.notify import WAITING, Notification

NEVER_MS: Final = 1 << 60
LOCKED_MS: Final = 1_000
"""How long a claim leaves held rows alone that another transaction has locked: no event says when they are free."""


class Start(NamedTuple):
    """The state of a lane that its new owner found in the store."""

    epoch: int
    watermark: int
    retry_ms: int | None


class Turn(Enum):
    """The share of due held rows in a claim."""

    NONE = "none"
    SHARE = "share"
    """A tenth, beside waiting rows."""
    SPARE = "spare"
    """The rest of the claim if no row waits: the claim is of one row only, and it is the waiting rows' turn."""


class ReleaseCursor:
    """The lane reports its claims, parks and notifications; the cursor answers where and when to claim next."""

    def __init__(self, start: Start, clock: StoreClock) -> None:
        self._clock = clock
        self._clock_steps = clock.steps
        self.woken = asyncio.Event()
        """Set when something is due sooner than was known."""
        self.watermark = start.watermark
        self.noted = NEVER_MS  # The soonest row noted since the last claim began.
        self.retry_ms = NEVER_MS if start.retry_ms is None else start.retry_ms  # The soonest retry of a held row.
        self.more = True
        """Whether rows may be due already: the last claim was full, or was rolled back."""
        self.next: int | None = None  # The next due instant that the last claim saw, if it took no row.
        self._passed_over_ms = pool.BEGINNING_MS  # Claims take no held rows before this instant.
        self._held_turn = False
        self._crowded = False

    @property
    def clock_stepped(self) -> bool:
        """Whether the store's clock was set since :meth:`forget_after_step`."""
        return self._clock_steps != self._clock.steps

    def forget_after_step(self) -> None:
        """Forget a watermark that was taken from a clock that was set since."""
        if self.clock_stepped:
            self._clock_steps = self._clock.steps
            self.watermark = self._passed_over_ms = pool.BEGINNING_MS
            self.more = True

    def claiming(self) -> None:
        """A claim begins."""
        self.forget_after_step()
        self.noted, self.next = NEVER_MS, None

    def turn(self, limit: int) -> tuple[int, Turn]:
        """The number of rows that a claim of ``limit`` takes, and its turn.

        A claim of one row cannot be shared, so waiting and held rows take turns. If the last claim left no bytes for
        held rows, the next one takes a single held row.
        """
        if self.next_retry_ms() > self._clock.now_upper_ms():
            return limit, Turn.NONE
        if limit > 1:
            return 1 if self._crowded else limit, Turn.SHARE
        self._held_turn = not self._held_turn
        return limit, Turn.SHARE if self._held_turn else Turn.SPARE

    def claimed(self, *, crowded: bool) -> None:
        """A claim ended; ``crowded``: it wanted held rows and had no bytes left for them."""
        self._crowded = crowded

    def settled(self, watermark: int, *, full: bool, next_ms: int | None) -> None:
        """A claim was committed."""
        self.watermark = min(watermark, self.noted)
        self.more = full
        self.next = next_ms

    def next_ms(self, soonest: int | None) -> int:
        """The next due instant, if the next unannounced row is due at ``soonest``."""
        return min(self.noted, self.next_retry_ms(), NEVER_MS if soonest is None else soonest)

    def next_retry_ms(self) -> int:
        """From when on a claim asks for held rows."""
        return max(self.retry_ms, self._passed_over_ms)

    def pass_over_retries(self) -> None:
        """Held rows were due, and a claim got none of them: another transaction has them locked."""
        self._passed_over_ms = self._clock.now_upper_ms() + LOCKED_MS

    def note_parked(self, due_ms: int) -> None:
        """A row that is due at ``due_ms`` was put into the lane."""
        self.watermark = min(self.watermark, due_ms)
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

    def notified(self, one: Notification) -> None:
        """Another process put a row into the lane."""
        (self.note_parked if one.kind == WAITING else self.note_held)(one.at_ms)

    def scanned(self, watermark: int, first_ms: int | None, retry_ms: int | None) -> None:
        """A scan that began at ``watermark`` found the lane's first waiting row, and its first retry."""
        if first_ms is not None and first_ms < min(watermark, self.watermark):
            self.note_parked(first_ms)
        if retry_ms is not None:
            self.note_held(retry_ms)
