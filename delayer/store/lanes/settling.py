"""Writes the outcome of claimed rows, in the transaction of their claim.

If the database rejects the data of a row, a savepoint keeps the claim. The rows are then written by halves until the
bad row is found. So the claim still commits, and no message is published again. The bad row gets a plain reason and no
history. If the database rejects even that, the row returns to its old place, and the lane's claims skip it for a while.
So does an occurrence whose schedule cannot be written: it comes again, instead of none ever.

A claim that the database rejects is repeated with half as many rows, until only the row to skip is left. The pauses
grow like those of held rows. Skipped rows stay where they are, so the scan of the lane's next owner finds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple

import asyncpg
import structlog
from asyncpg import Connection, Record

from delayer.core.backoff import pause_ms
from delayer.core.errors import Rejected
from delayer.core.hold import Hold, HoldKind
from delayer.core.message import Due, is_occurrence
from delayer.format.rows import COLUMNS_WITH_ID, HELD_COLUMNS, hold_columns, moved_row
from delayer.schedule.record import Fate
from delayer.store import pool, statements
from delayer.store.clock import StoreClock
from delayer.store.errors import describe, plain_reason
from delayer.store.lanes.cursor import NEVER_MS
from delayer.store.rows import history, keys
from delayer.store.schedules.occurrences import EndedOccurrence, write_next

log = structlog.get_logger()

MOST: Final = 100
"""Maximum number of skipped rows. If the database rejects more, the rows are not the cause."""
MOST_COUNTED: Final = 10_000
"""Maximum number of rows whose skips are counted. The row counted first is forgotten, and its next pause is short."""
NEXT_STEP: Final = 'find what rejects it: triggers, constraints (docs/operations.md, "A row that the database rejects")'
NO_LIMIT: Final = 1 << 30


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
        """Whether no more rows can be skipped. A claim that meets another rejected row then finds none to release."""
        return len(self._paused) >= MOST

    def add(self, id: int, due_ms: int, reason: str) -> None:
        """Skip the row for a pause, unless too many are skipped."""
        if self.full:
            return
        self._times[id] += 1
        if len(self._times) > MOST_COUNTED:
            del self._times[next(iter(self._times))]
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

    def rejected(self, limit: int, first: Record | None, error: asyncpg.PostgresError) -> Rejected:
        """Record a rejected claim of ``limit`` rows: the next takes half as many, or skips its only row, which
        ``first`` (of NEXT_DUE) names."""
        self.limit = max(1, limit // 2)
        if first is not None and first["id"] is not None:
            self.add(first["id"], first["due_at"], describe(error))
        return Rejected(f"lane {self._lane}: claim: {describe(error)}")


class Settled(NamedTuple):
    """The outcome of a claimed row. ``hold``: why it is held; None if it was released, or expired. ``at_ms``: when."""

    due: Due
    hold: Hold | None
    at_ms: float
    expired: bool = False
    """Whether it is an occurrence of a schedule that came too late to be sent."""

    def ended(self, lane: int) -> EndedOccurrence | None:
        """The occurrence that this ends; None unless the row was the waiting occurrence of a schedule."""
        key = self.due.parcel.key
        if key is None or not is_occurrence(key):
            return None
        sent_ms = None if self.expired or self.hold is not None else round(self.at_ms)
        return EndedOccurrence(key, self.due.id, lane, Fate.MISSED if self.expired else Fate.SENT, sent_ms)


def outcomes_of(
    released: Sequence[Due],
    held: Sequence[tuple[Due, Hold]],
    expired: Sequence[Due],
    released_ms: Sequence[float],
    now_ms: int,
) -> list[Settled]:
    """The outcomes of a claim. ``released_ms``: when each of ``released`` was written to the broker; empty: now."""
    at_ms = released_ms or [now_ms] * len(released)
    rows = [Settled(due, None, at) for due, at in zip(released, at_ms, strict=True)]
    rows += [Settled(due, hold, now_ms) for due, hold in held]
    return rows + [Settled(due, None, now_ms, expired=True) for due in expired]


@dataclass(slots=True)
class Settlement:
    """The writes for one claim. ``now_ms``: upper bound of the store's clock."""

    connection: Connection
    lane: int
    skipped: SkippedRows
    now_ms: int
    history: bool
    counted: Counter[str] = field(default_factory=Counter)
    retry_ms: int = NEVER_MS
    next_dues: list[int] = field(default_factory=list)
    """The due instants of the occurrences that were written into the lane, in place of those of the claim."""

    async def write(self, rows: Sequence[Settled]) -> None:
        """Write ``rows``, and with little data those that the database rejects. Raises the driver's other errors."""
        try:
            return await self._try(rows, history=self.history)
        except Rejected as error:
            rejected = error
        if len(rows) == 1:
            return await self._write_plain(rows[0], rejected)
        middle = len(rows) // 2
        await self.write(rows[:middle])
        await self.write(rows[middle:])

    async def _write_plain(self, row: Settled, rejected: Rejected) -> None:
        """Write a rejected row with as little data as possible. If the database does not even delete it from ``held``,
        it stays there."""
        (due, hold, *_), reason = row, str(rejected)
        log.error("row rejected", lane=self.lane, id=due.id, reason=reason, next_step=NEXT_STEP)
        text = plain_reason(rejected.__cause__)
        if hold is not None:
            hold = replace(hold, text=text)
        elif due.attempts:
            hold = Hold(HoldKind.UNFIT, f"delivered, but {text}", may_be_delivered=True)
        with suppress(Rejected):
            return await self._try([row._replace(hold=hold)], history=False)
        if hold is None and not is_occurrence(due.parcel.key):
            # Only its key is left behind, without a message.
            self.counted["cancelled" if row.expired else "released"] += 1
            return
        if not due.attempts:
            records = [(*moved_row(due, self.lane), due.id)]
            await self.connection.copy_records_to_table("message", records=records, columns=COLUMNS_WITH_ID)
        self.skipped.add(due.id, due.due_ms, reason)

    async def _try(self, rows: Sequence[Settled], *, history: bool) -> None:
        """Write ``rows``, or none if the database rejects their data. Raises Rejected."""
        await pool.in_savepoint(self.connection, partial(self._write, rows, history=history))

    async def _write(self, rows: Sequence[Settled], *, history: bool) -> None:
        """Write ``rows``. Waiting rows are already deleted; held ones (``attempts`` > 0) are still in ``held``."""
        gone = [row.due for row in rows if row.hold is None]
        held = [(row.due, row.hold) for row in rows if row.hold is not None]
        over = [one for row in rows if (one := row.ended(self.lane)) is not None]
        if history:
            await _write_history(self.connection, rows)
        tried_again = [due.id for due in gone if due.attempts]
        if tried_again:
            await self.connection.execute("DELETE FROM held WHERE id = ANY($1)", tried_again)
        retry_ms = await _hold(self.connection, self.lane, held, self.now_ms) if held else NEVER_MS
        keyed = {(due.parcel.key, due.id) for due in gone if due.parcel.key is not None}
        keyed |= {(one.key, one.id) for one in over}  # Those of held occurrences, too.
        if keyed:
            await keys.forget(self.connection, keyed)
        written = await write_next(self.connection, over) if over else []
        self.next_dues += [one.due_ms for one in written]
        self.retry_ms = min(self.retry_ms, retry_ms)
        expired = sum(row.expired for row in rows)
        self.counted["parked"] += len(written)
        self.counted["cancelled"] += expired
        self.counted["released"] += len(gone) - expired
        self.counted["held"] += sum(not due.attempts for due, _ in held) - len(tried_again)


async def _write_history(connection: Connection, rows: Sequence[Settled]) -> None:
    entries = []
    for due, hold, at_ms, expired in rows:
        what, kind = (history.RELEASED, None) if hold is None else (history.HELD, hold.kind)
        what = history.CANCELLED if expired else what
        if hold is None or not due.attempts:
            entries.append(history.of_parcel(what, due.id, due.parcel, at_ms, parked_ms=due.parked_ms, kind=kind))
    await history.write(connection, entries)


async def _hold(connection: Connection, lane: int, held: Sequence[tuple[Due, Hold]], now_ms: int) -> int:
    """Insert claimed rows into held, or update them there, each with its next retry. Returns the first retry."""
    first, again, soonest = [], [], NEVER_MS
    for due, hold in held:
        retry_ms = hold.retry_ms(now_ms + pause_ms(due.attempts + 1, due.id))
        soonest = soonest if retry_ms is None else min(soonest, retry_ms)
        if due.attempts:
            again.append((due.id, *hold_columns(hold), retry_ms))
        else:
            # The next occurrence of a schedule takes over the key of the last one.
            kept = due._replace(parcel=due.parcel._replace(key=None)) if is_occurrence(due.parcel.key) else due
            first.append((*moved_row(kept, lane), due.id, retry_ms, 1, *hold_columns(hold), None))
    if first:
        await connection.copy_records_to_table("held", records=first, columns=HELD_COLUMNS)
    if again:
        await connection.execute(statements.HOLD_AGAIN, *map(list, zip(*again, strict=True)))
    return soonest
