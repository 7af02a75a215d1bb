"""The release cursor of a lane: where its claims begin, and when it claims next. It uses no connection and no SQL.

A claim takes the rows due within the *window*. The *place* is a due instant and an id: the lane has no rows before it,
except those of open claims. Claims begin there, so they never reread dead index entries, which slow down other Postgres
queues. The place moves on four events:

- claim: to the last row taken; if empty, to the next row or the lower bound of the store's clock, whichever is sooner.
- note: back to a row parked before it. A note during a claim is kept until the claim ends.
- rollback: back to where the claim began.
- scan: back to an unannounced row. Once a minute another connection reads the lane from its beginning.

For the next owner, the lane saves a watermark in its row every few seconds: the due instant of the place, or of the
start of an open claim.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from delayer.core.message import Due
from delayer.store import pool
from delayer.store.clock import StoreClock
from delayer.store.lanes.notify import WAITING, VainPace

NEVER_MS: Final = 1 << 60
LOCKED_MS: Final = 1_000
"""How long claims skip held rows after another transaction had them locked. No event reports when they are free."""
LEAD_MS: Final = 40
"""Head start of a claim before its first message is due. The claim itself takes this long on a busy machine."""

RowPlace = tuple[int, int]
"""A due instant in epoch milliseconds, and an id."""


@dataclass(slots=True)
class Claim:
    """The rows taken by an open transaction."""

    start: RowPlace
    """Where this claim began. The next claim begins there if this claim is rolled back."""
    next_start: RowPlace
    """Where the next claim begins while this one is open."""
    rows: list[Due]
    expired: list[Due] = field(default_factory=list)
    """Occurrences of schedules that are too late to be sent. They settle with the rows."""
    retries: bool = False
    """Whether the rows were held."""


NOTHING: Final = Claim((NEVER_MS, 0), (NEVER_MS, 0), [])


def place_of(due: Due) -> RowPlace:
    return due.due_ms, due.id


class ReleaseCursor:
    """Decides where and when to claim next. Accepts notifications even before :meth:`begin`."""

    def __init__(self, clock: StoreClock, lead_ms: int = LEAD_MS) -> None:
        self._clock = clock
        self._lead_ms = lead_ms
        self._clock_steps = clock.steps
        self.woken = asyncio.Event()
        """Set when something is due sooner than expected."""
        self.place: RowPlace = (NEVER_MS, 0)
        self.noted = NEVER_MS  # The soonest row noted, or rolled back, since the last claim began.
        self.retry_ms = NEVER_MS  # The soonest retry of a held row.
        self.more = True
        """Whether to claim right away, because the last claim left due rows, may have, or was rolled back."""
        self.retrying = False
        """Whether an open claim has held rows. Other claims then take none."""
        self._next = NEVER_MS  # The due instant of the first row after the last claim, or that claim's horizon.
        self._passed_over_ms = pool.BEGINNING_MS  # Claims take no held rows before this instant.
        self._held_turn = False
        self._notified = self._claim_notified = False  # By another session: before the next claim, and the last one.
        self._vain_pace = VainPace()

    def begin(self, watermark: int, retry_ms: int | None) -> None:
        """Start at ``watermark``, before which the lane has no rows. Its first held row is retried at ``retry_ms``."""
        self.place = min(self.place, (watermark, 0))
        if retry_ms is not None:
            self.expect_retry(retry_ms)

    @property
    def clock_stepped(self) -> bool:
        """Whether the store's clock was set since the last :meth:`forget_after_step`."""
        return self._clock_steps != self._clock.steps

    def forget_after_step(self) -> None:
        """Forget a place derived from a clock that has since been set."""
        if self.clock_stepped:
            self._clock_steps = self._clock.steps
            self.place, self._passed_over_ms = (pool.BEGINNING_MS, 0), pool.BEGINNING_MS
            self.more = True

    def prepare_claim(self) -> None:
        self.forget_after_step()
        self.noted = NEVER_MS
        self._claim_notified, self._notified = self._notified, False

    def take_held_turn(self) -> bool | None:
        """Take the next turn and return whether it belongs to held rows; None if no retry is due."""
        if self.next_retry_ms() > self._clock.now_upper_ms():
            return None
        self._held_turn = not self._held_turn
        return self._held_turn

    def note_claim(self, last: RowPlace, *, next_ms: int | None, more: bool) -> None:
        """Record a claim of waiting rows up to ``last``. ``next_ms``: due instant of the first row after it, or the
        horizon; None if not queried. ``more``: whether that row is, or may be, due within the window."""
        self.place = min(last, (self.noted, 0))
        self.more = more
        self._next = NEVER_MS if next_ms is None else next_ms

    def vain_pause(self) -> float:
        """Seconds to pause after a claim that found nothing, because any role may send notifications for nothing."""
        return self._vain_pace.pause(self._clock.monotonic()) if self._claim_notified else 0.0

    def note_rollback(self, start: RowPlace | None) -> None:
        """Go back to ``start`` after a rollback; None if the claim failed before it began."""
        if start is not None:
            self.place = min(self.place, start)
            self.noted = min(self.noted, start[0])
        self.more = True
        self.woken.set()

    def wake_ms(self) -> int:
        """When to claim next, unless there is already more to claim."""
        return min(min(self.noted, self._next) - self._lead_ms, self.next_retry_ms())

    def next_retry_ms(self) -> int:
        """From when on a claim queries held rows."""
        return NEVER_MS if self.retrying else max(self.retry_ms, self._passed_over_ms)

    def pass_over_retries(self) -> None:
        """Skip held rows for LOCKED_MS: some were due, but another transaction has them locked."""
        self._passed_over_ms = self._clock.now_upper_ms() + LOCKED_MS

    def note_parked(self, due_ms: int) -> None:
        """Note a row parked in the lane."""
        self.place = min(self.place, (due_ms, 0))
        if due_ms < self.noted:
            self.noted = due_ms
            self.woken.set()

    def note_held(self, retry_ms: int) -> None:
        """Note a row held in the lane, to be retried at ``retry_ms``."""
        self._passed_over_ms = pool.BEGINNING_MS
        self.expect_retry(retry_ms)

    def expect_retry(self, retry_ms: int) -> None:
        if retry_ms < self.retry_ms:
            self.retry_ms = retry_ms
            self.woken.set()

    def note_notification(self, kind: str, at_ms: int) -> None:
        """Note a row that another process put into the lane."""
        self._notified = True
        (self.note_parked if kind == WAITING else self.note_held)(at_ms)

    def note_scan(self, watermark: int, first_ms: int | None, retry_ms: int | None) -> None:
        """Note what a scan found: the first waiting row and the first retry. ``watermark``: the lane's watermark when
        the scan started; no claim has rows before it."""
        place_ms = self.place[0]
        if first_ms is not None and (first_ms < min(watermark, place_ms) or place_ms < first_ms < self._next):
            self.note_parked(first_ms)
        if retry_ms is not None:
            self.note_held(retry_ms)
