"""A lane: the part of the store that this process owns, for as long as one connection lives.

That connection holds the lane's advisory lock and runs its release transactions. So "we do not own the lane any more"
and "our open release is rolled back" are one event, and no release of ours can commit after somebody else adopted the
lane.

The *watermark* is a due instant before which this lane has no rows. Claims start there, so they never read again what
they deleted: dead index entries at the head are what makes other Postgres queues slow. It only moves at three places:

    settle     to the last row of a full batch, or to the store's now (by its lower bound) after a short one
    note       back to the row that was parked before it; what is noted during a claim is kept until its end
    look back  once a minute the lane is read from its beginning, for rows that were put there without a note
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import asyncpg
import structlog

from delayer.core.errors import LaneLost, StoreLost
from delayer.core.message import Due
from delayer.faultpoint import reach
from delayer.store import envelope, session, statements
from delayer.store.clock import StoreClock
from delayer.store.errors import DRIVER_ERRORS, describe
from delayer.store.keys import forget_released
from delayer.store.retry import pause_ms

log = structlog.get_logger()

NEVER_MS = 1 << 60
LONGEST_SLEEP = 60.0
FEED_SECONDS = 1.0
_HORIZON_MS = 61_000  # what can be due before somebody sleeps for LONGEST_SLEEP and wakes


@dataclass(slots=True)
class _Claim:
    """What an open release transaction took."""

    watermark_after: int = session.BEGINNING_MS
    full: bool = False
    size: int = 0
    rows: list[Due] = field(default_factory=list)


class PostgresLane:
    """Satisfies services.ports.Lane. Made by lanes.py, which took the lock on ``connection``."""

    def __init__(
        self, number: int, epoch: int, connection: asyncpg.Connection, clock: StoreClock, retry_ms: int | None
    ) -> None:
        """``retry_ms`` is when the soonest held row of the lane is tried again, None without any."""
        self._number = number
        self.epoch = epoch
        self._connection = connection
        self._clock = clock
        self._turn = asyncio.Lock()
        self._woken = asyncio.Event()
        self._stopping = asyncio.Event()
        self._claim: _Claim | None = None
        self._watermark = session.BEGINNING_MS
        self._noted = NEVER_MS  # soonest row parked since the last claim began
        self._retry = NEVER_MS if retry_ms is None else retry_ms
        self._more = True
        self._look_back_at = clock.monotonic() + LONGEST_SLEEP
        self._clock_steps = clock.steps
        connection.add_termination_listener(self._on_termination)
        self._keeper = asyncio.create_task(self._keep(), name=f"lane {number}: keep")

    @property
    def number(self) -> int:
        return self._number

    @property
    def held_by_us(self) -> bool:
        return not self._stopping.is_set() and not self._connection.is_closed()

    async def claim(self, limit: int, max_bytes: int) -> list[Due]:
        """See the port. The rows that were held before come last, and are a tenth of ``limit`` at most."""
        if self._claim is not None:
            raise RuntimeError(f"lane {self._number}: claim before the last one was settled or given up")
        async with self._talking("claim") as connection:
            self._forget_after_step()
            self._noted = NEVER_MS
            try:
                self._claim = await self._take(connection, limit, max_bytes)
            except asyncpg.DeadlockDetectedError:
                # Against somebody who replaces several keyed messages at once. They win; then it is our turn.
                await connection.execute("ROLLBACK")
                self._claim = await self._take(connection, limit, max_bytes)
        if self._claim.rows:
            reach("release.claimed")
        return self._claim.rows

    async def _take(self, connection: asyncpg.Connection, limit: int, max_bytes: int) -> _Claim:
        upper = self._clock.now_ms()
        after = self._clock.lower_ms()  # before the statement is sent, so not after the instant that it judges by
        retries = max(1, limit // 10) if self._retry <= upper else 0
        await connection.execute("BEGIN")
        records = await connection.fetch(
            statements.CLAIM, self._number, self._watermark, upper + _HORIZON_MS, limit - retries, max_bytes
        )
        rows = sorted(map(envelope.read, records), key=_due_then_arrival)
        taken = sum(len(due.parcel.body) + len(due.parcel.properties) for due in rows)
        full = len(rows) >= limit - retries or taken >= max_bytes
        if full:
            after = rows[-1].due_ms if rows else self._watermark
        if retries and (taken < max_bytes or not rows):
            held = await connection.fetch(statements.CLAIM_HELD, self._number, retries, max(max_bytes - taken, 1))
            rows += [envelope.read(record, record["attempts"]) for record in held]
        return _Claim(after, full, len(rows), rows)

    async def settle(self, released: Sequence[Due], held: Sequence[tuple[Due, str]]) -> None:
        """See the port. ``released`` and ``held`` together are what was claimed: committing less would lose some."""
        claim = self._claim
        if claim is None:
            raise LaneLost(f"lane {self._number}: its release was rolled back")
        if len(released) + len(held) != claim.size:
            await self.give_up()
            raise ValueError(f"claimed {claim.size}, settled {len(released)} released and {len(held)} held")
        async with self._talking("settle") as connection:
            tried = Counter(due.attempts > 0 for due in released)
            await self._leave_held(connection, [due for due in released if due.attempts])
            await self._hold(connection, held)
            await forget_released(connection, released)
            net_held = sum(not due.attempts for due, _ in held) - tried[True]
            await self._count(connection, released=len(released), held=net_held)
            status = await connection.execute("COMMIT")
            if status != "COMMIT":
                raise StoreLost(f"settle: the store answered COMMIT by {status}")
            self._claim = None
        self._watermark = min(claim.watermark_after, self._noted)
        self._more = claim.full
        if claim.size:
            reach("release.committed")

    async def _leave_held(self, connection: asyncpg.Connection, released: Sequence[Due]) -> None:
        if released:
            await connection.execute("DELETE FROM held WHERE id = ANY($1)", [due.id for due in released])

    async def _hold(self, connection: asyncpg.Connection, held: Sequence[tuple[Due, str]]) -> None:
        """Put what would not go into held, or back into it with its next pause."""
        if held:
            now_ms = self._clock.now_ms()
            first, again = [], []
            for due, reason in held:
                retry_at = now_ms + pause_ms(due.attempts + 1, due.id)
                text = envelope.reason_text(reason)
                if due.attempts:
                    again.append((due.id, text, retry_at))
                else:
                    first.append((*envelope.row_again(due, self._number), due.id, retry_at, 1, text))
            if first:
                await connection.copy_records_to_table("held", records=first, columns=envelope.HELD_COLUMNS)
            if again:
                await connection.execute(statements.HOLD_AGAIN, *map(list, zip(*again, strict=True)))
        if held or self._retry <= self._clock.now_ms():
            await self._look_at_retries(connection)

    async def _count(self, connection: asyncpg.Connection, **numbers: int) -> None:
        changed = [(kind, n) for kind, n in sorted(numbers.items()) if n]
        if changed:
            kinds, added = zip(*changed, strict=True)
            await connection.execute(statements.COUNT, [self._number] * len(kinds), kinds, added)

    async def give_up(self) -> None:
        """See the port."""
        if self._claim is None:
            return
        self._claim = None
        self._more = True
        async with self._turn:
            await self._roll_back()

    async def sleep_hint(self) -> float:
        """See the port."""
        async with self._talking("sleep hint") as connection:
            if self._clock.monotonic() >= self._look_back_at:
                await self._look_back(connection)
            self._forget_after_step()
            if self._more:
                return 0.0
            horizon = self._clock.now_ms() + _HORIZON_MS
            soonest = await connection.fetchval(statements.NEXT_DUE, self._number, self._watermark, horizon)
        next_ms = min(self._noted, self._retry, NEVER_MS if soonest is None else soonest)
        return min(max(self._clock.seconds_until(next_ms), 0.0), LONGEST_SLEEP)

    async def _look_back(self, connection: asyncpg.Connection) -> None:
        """Find what was put into the lane without a note: by hand, by another tool, by a commit in doubt."""
        self._look_back_at = self._clock.monotonic() + LONGEST_SLEEP
        horizon = self._clock.now_ms() + _HORIZON_MS
        first = await connection.fetchval(statements.NEXT_DUE, self._number, session.BEGINNING_MS, horizon)
        if first is not None:
            self._watermark = min(self._watermark, first)
        await self._look_at_retries(connection)

    async def _look_at_retries(self, connection: asyncpg.Connection) -> None:
        retry_ms = await connection.fetchval(statements.NEXT_RETRY, self._number)
        self._retry = NEVER_MS if retry_ms is None else retry_ms

    def _forget_after_step(self) -> None:
        """A watermark taken from a clock that was set back since is worth nothing."""
        if self._clock_steps != self._clock.steps:
            self._clock_steps = self._clock.steps
            self._watermark = session.BEGINNING_MS
            self._more = True

    def note_parked(self, due_ms: int) -> None:
        """See the port."""
        self._watermark = min(self._watermark, due_ms)
        if due_ms < self._noted:
            self._noted = due_ms
            self._woken.set()

    def note_held(self, retry_ms: int) -> None:
        """A message was put straight into held, to be tried again at ``retry_ms``."""
        if retry_ms < self._retry:
            self._retry = retry_ms
            self._woken.set()

    async def wait(self, seconds: float) -> None:
        """See the port. Also returns when the lane is lost, and when the store's clock was set: sleep hints of the
        old time are worth nothing then."""
        deadline = self._clock.monotonic() + seconds
        while self.held_by_us and self._clock_steps == self._clock.steps:
            self._woken.clear()
            left = min(deadline - self._clock.monotonic(), self._clock.seconds_until(min(self._noted, NEVER_MS)))
            if left <= 0.0:
                return
            try:
                # Loops round to milliseconds, some of them down: waking early costs a claim that finds nothing.
                async with asyncio.timeout(math.ceil(left * 1000) / 1000):
                    await self._woken.wait()
            except TimeoutError:
                continue

    async def release(self) -> None:
        """See the port. An open claim is rolled back by the server."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._claim = None
        self._woken.set()
        await asyncio.wait([self._keeper])
        await session.close(self._connection)

    @asynccontextmanager
    async def _talking(self, doing: str) -> AsyncIterator[asyncpg.Connection]:
        """One talk at a time on the lane's connection; a failed one leaves no transaction open."""
        async with self._turn:
            if not self.held_by_us:
                self._claim = None
                raise LaneLost(f"lane {self._number}: {doing}: the connection that holds its lock is gone")
            try:
                yield self._connection
            except DRIVER_ERRORS as error:
                self._claim = None
                self._more = True
                if isinstance(error, TimeoutError):
                    self._connection.terminate()  # the server is silent: nobody knows what it did
                await self._roll_back()
                lost = LaneLost if self._connection.is_closed() else StoreLost
                raise lost(f"lane {self._number}: {doing}: {describe(error)}") from error
            except asyncio.CancelledError:
                # Cancelled between two statements or inside one: let the server roll back, whatever was under way.
                self._claim = None
                self._connection.terminate()
                raise

    async def _roll_back(self) -> None:
        if self._connection.is_closed():
            return
        try:
            await self._connection.execute("ROLLBACK")
        except DRIVER_ERRORS as error:
            self._connection.terminate()
            log.warning("rollback failed", lane=self._number, error=describe(error))

    async def _keep(self) -> None:
        """Feed the session's idle timeout from the event loop, and ask for the store's time by the way.

        A process whose loop hangs stops feeding, and loses the lane: that is the point. An open transaction has a
        timeout of its own, which nothing feeds.
        """
        while self.held_by_us:
            try:
                async with asyncio.timeout(FEED_SECONDS):
                    await self._stopping.wait()
            except TimeoutError:
                pass
            if self._claim is not None or self._turn.locked() or not self.held_by_us:
                continue
            async with self._turn:
                try:
                    await session.sample(self._connection, self._clock, timeout=5 * FEED_SECONDS)
                except DRIVER_ERRORS as error:
                    self._connection.terminate()
                    log.warning("lane connection broken", lane=self._number, error=describe(error))
            if self._clock_steps != self._clock.steps:
                self._woken.set()

    def _on_termination(self, _connection: object) -> None:
        self._woken.set()


def _due_then_arrival(due: Due) -> tuple[int, int]:
    return due.due_ms, due.id
