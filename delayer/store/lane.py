"""A lane: the part of the store that this process owns, for as long as one connection lives.

That connection holds the lane's advisory lock and runs its release transactions. So "we do not own the lane any more"
and "our open release is rolled back" are one event, and no release of ours can commit after somebody else adopted the
lane.

The *watermark* is a due instant before which this lane has no rows. Claims start there, so they never read again what
they deleted: dead index entries at the head are what makes other Postgres queues slow. It only moves at three places:

    settle     to the last row of a batch; after an empty one to the next row that is due, or to the store's now (by its
               lower bound) if that is sooner
    note       back to the row that was parked, or moved there by hand (telling.py), before it; what is noted during a
               claim is kept until its end
    look back  once a minute the lane is read from its beginning, for rows that were put there without a note; on
               another connection, since that one does read the dead entries, at some 4 us each

Where it stands is written down every few seconds, so that the next owner need not begin with such a reading either.
What is written may be wrong by rows that were parked late, seconds before a crash: the first look back comes soon.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import asyncpg
import structlog

from delayer.core.errors import LaneLost, StoreLost
from delayer.core.message import Due, Parcel
from delayer.core.pace import Scope
from delayer.faultpoint import reach
from delayer.store import claiming, handover, session, settling, statements, telling
from delayer.store.claiming import HORIZON_MS, LONGEST_SLEEP, Claim
from delayer.store.clock import StoreClock
from delayer.store.errors import DRIVER_ERRORS, describe
from delayer.store.link import Link
from delayer.store.marks import Marks
from delayer.store.outlook import IDLE_MS, SOON_MS, Look, Start
from delayer.store.retries import NEVER_MS, Retries
from delayer.store.telling import Told

log = structlog.get_logger()

FEED_SECONDS = 1.0
WRITE_SECONDS = 5.0
FIRST_LOOK_SECONDS = 5.0


class PostgresLane:
    """Satisfies services.ports.Lane. Made by lanes.py, which took the lock on ``connection``."""

    def __init__(
        self,
        number: int,
        start: Start,
        connection: asyncpg.Connection,
        clock: StoreClock,
        look: Look,
        *,
        release_seconds: float,
    ) -> None:
        """``release_seconds``: for how long an open release is fed."""
        self.epoch = start.epoch
        self._link = Link(number, connection)
        self._clock = clock
        self._clock_steps = clock.steps
        self._look = look
        self._woken = asyncio.Event()
        self._releasing = asyncio.Event()
        self._claim: Claim | None = None
        self._watermark = self._written = start.watermark
        self._written_at = clock.monotonic()
        self._noted = NEVER_MS  # soonest row parked since the last claim began
        self._retries = Retries(start.retry_ms)
        self._marks = Marks()
        self._release_seconds = release_seconds
        self._fed_until = math.inf
        self._more = True
        self._next: int | None = None  # when the next row is due that the last claim saw, if it took none
        self._quiet_until = session.BEGINNING_MS  # nothing is due by then, as far as was asked
        connection.add_termination_listener(self._on_termination)
        self._keeper = asyncio.create_task(self._keep(), name=f"lane {number}: keep")
        self._looker = asyncio.create_task(self._look_around(), name=f"lane {number}: look")

    @property
    def number(self) -> int:
        return self._link.number

    @property
    def held_by_us(self) -> bool:
        return self._link.alive

    @property
    def idle(self) -> bool:
        """See the port. The look back asks; an answer that is old, or from before the clock was set, says less."""
        return self._quiet_until - self._clock.now_ms() > SOON_MS

    def pace(self, scopes: Sequence[Scope]) -> None:
        """See the port. The watermark stays what it is: a place before which there is nothing of any scope."""
        self._marks.begin(scopes, self._watermark)
        self._retries.again()

    async def claim(self, limit: int, max_bytes: int, scope: Scope | None = None) -> list[Due]:
        """See the port. The rows that were held before come last, and are a tenth of ``limit`` at most."""
        if self._claim is not None:
            raise RuntimeError(f"lane {self.number}: claim before the last one was settled or given up")
        began = self._clock.monotonic()
        async with self._talking("claim") as connection:
            self._forget_after_step()
            self._noted, self._next = NEVER_MS, None
            try:
                self._claim = await self._take(connection, limit, max_bytes, scope)
            except asyncpg.DeadlockDetectedError:
                # Against somebody who replaces several keyed messages at once. They win; then it is our turn.
                await connection.execute("ROLLBACK")
                self._claim = await self._take(connection, limit, max_bytes, scope)
            if self._claim.rows and self._clock.monotonic() - began > FEED_SECONDS:
                # To the server the release was idle while its rows were on their way, perhaps for too long: then it is
                # rolled back, and whatever is published of it comes twice.
                await session.sample(connection, self._clock)
        if self._claim.rows:
            self._fed_until = self._clock.monotonic() + self._release_seconds
            reach("release.claimed")
        return self._claim.rows

    async def _take(self, connection: asyncpg.Connection, limit: int, max_bytes: int, scope: Scope | None) -> Claim:
        with_held = self._retries.wanted(scope, limit, self._clock.now_ms())
        if with_held:
            limit = self._retries.limit(scope, limit)
        claim = await self._taken(connection, limit, max_bytes, scope, with_held=with_held)
        self._retries.crowded(scope, claim.crowded)
        return claim

    async def _taken(
        self, connection: asyncpg.Connection, limit: int, max_bytes: int, scope: Scope | None, *, with_held: bool
    ) -> Claim:
        if scope is not None:
            return await claiming.take_scoped(
                connection,
                self._clock,
                self.number,
                scope=scope,
                place=self._marks.claims(scope),
                limit=limit,
                max_bytes=max_bytes,
                with_held=with_held,
            )
        return await claiming.take(
            connection,
            self._clock,
            self.number,
            watermark=self._watermark,
            limit=limit,
            max_bytes=max_bytes,
            with_held=with_held,
        )

    async def settle(self, released: Sequence[Due], held: Sequence[tuple[Due, str]]) -> None:
        """See the port. ``released`` and ``held`` together are what was claimed: committing less would lose some."""
        claim = self._claim
        if claim is None:
            raise LaneLost(f"lane {self.number}: its release was rolled back")
        if len(released) + len(held) != claim.size:
            await self.give_up()
            raise ValueError(f"claimed {claim.size}, settled {len(released)} released and {len(held)} held")
        async with self._talking("settle") as connection:
            await settling.write(connection, self.number, released, held, self._clock.now_ms())
            if held or self._retries.soonest_ms <= self._clock.now_ms():
                await self._look_at_retries(connection, claim)
            status = await connection.execute("COMMIT")
            if status != "COMMIT":
                raise StoreLost(f"settle: the store answered COMMIT by {status}")
            self._claim, self._fed_until = None, math.inf
        if claim.scope is None:
            self._watermark = min(claim.watermark_after, self._noted)
        else:
            self._marks.passed(claim.scope, claim.place_after)
            self._watermark = self._marks.lowest_ms
        self._more = claim.full
        self._next = claim.next_ms
        if claim.size:
            reach("release.committed")

    async def _look_at_retries(self, connection: asyncpg.Connection, claim: Claim) -> None:
        known, self._retries.soonest_ms = self._retries.soonest_ms, NEVER_MS
        try:
            retry_ms = await connection.fetchval(statements.NEXT_RETRY, self.number)
        except BaseException:
            self._expect_retry(known)
            raise
        if retry_ms is None:
            return
        if retry_ms <= claim.passed_over_ms:
            self._retries.in_vain(claim.scope, self._clock.now_ms())
        # Not just the answer: it may be older than what was held, and noted, while we asked.
        self._expect_retry(retry_ms)

    async def give_up(self) -> None:
        """See the port."""
        if self._claim is None:
            return
        self._claim, self._fed_until = None, math.inf
        self._more = True
        await self._link.roll_back()

    @property
    def more(self) -> bool:
        """See the port."""
        return self._more

    async def sleep_hint(self) -> float:
        """See the port."""
        async with self._talking("sleep hint") as connection:
            self._forget_after_step()
            if self._more and not self._marks:  # of limited routes there may be more, and no reason to hurry
                return 0.0
            soonest = self._next
            if soonest is None:
                horizon = self._clock.now_ms() + HORIZON_MS
                start = self._marks.highest_ms if self._marks else self._watermark
                soonest = await connection.fetchval(statements.NEXT_DUE, self.number, start, horizon)
        noted = min(self._noted, self._marks.noted_ms)  # a claim of one scope forgets what was noted of another
        next_ms = min(noted, self._next_retry_ms(), NEVER_MS if soonest is None else soonest)
        return min(max(self._clock.seconds_until(next_ms), 0.0), LONGEST_SLEEP)

    def _next_retry_ms(self) -> int:
        return self._retries.next_ms(self._clock.now_ms(), paced=bool(self._marks))

    def _forget_after_step(self) -> None:
        """A watermark taken from a clock that was set back since is worth nothing."""
        if self._clock_steps != self._clock.steps:
            self._clock_steps = self._clock.steps
            self._watermark = session.BEGINNING_MS
            self._marks.again(session.BEGINNING_MS)
            self._retries.again()
            self._more = True

    async def keep(self) -> None:
        """See the port."""
        async with self._talking("keep") as connection:
            await handover.keep(connection, self.number)

    def note_parked(self, due_ms: int) -> None:
        """See the port."""
        self._marks.note(due_ms)
        self._note(due_ms)

    def note_parcels(self, parcels: Sequence[Parcel]) -> None:
        """As :meth:`note_parked`, of what is known: who is not meant does not look for it."""
        self._marks.note_rows((parcel.route, parcel.due_ms) for parcel in parcels)
        self._note(min(parcel.due_ms for parcel in parcels))

    def _note(self, due_ms: int) -> None:
        self._quiet_until = session.BEGINNING_MS
        self._watermark = min(self._watermark, due_ms)
        if due_ms < self._noted:
            self._noted = due_ms
            self._woken.set()

    def note_held(self, retry_ms: int) -> None:
        """A message was put straight into held, to be tried again at ``retry_ms``."""
        self._retries.again()
        self._expect_retry(retry_ms)

    def _expect_retry(self, retry_ms: int) -> None:
        self._quiet_until = session.BEGINNING_MS
        if self._retries.expect(retry_ms):
            self._woken.set()

    def hear(self, told: Told) -> None:
        """Somebody else put something into the lane, by hand."""
        if told.kind == telling.WAITING:
            self.note_parked(told.at_ms)
        else:
            self.note_held(told.at_ms)

    async def wait(self, seconds: float) -> None:
        """See the port. Also returns when the lane is lost, and when the store's clock was set: sleep hints of the
        old time are worth nothing then."""
        deadline = self._clock.monotonic() + seconds
        while self.held_by_us and self._clock_steps == self._clock.steps:
            self._woken.clear()
            next_ms = min(self._noted, self._next_retry_ms())
            left = min(deadline - self._clock.monotonic(), self._clock.seconds_until(next_ms))
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
        if self._releasing.is_set():
            return
        self._releasing.set()
        self._woken.set()
        self._looker.cancel()
        await asyncio.wait([self._keeper, self._looker])
        if self._link.idle:
            try:
                async with self._link.talking("release") as connection:
                    await self._write_down(connection, at_once=True)
            except StoreLost as error:
                log.warning("lane connection broken", lane=self.number, error=str(error))
        self._claim = None
        await self._link.release()

    @asynccontextmanager
    async def _talking(self, doing: str) -> AsyncIterator[asyncpg.Connection]:
        try:
            async with self._link.talking(doing) as connection:
                yield connection
        except BaseException:
            # Whatever was claimed is rolled back.
            self._claim, self._fed_until = None, math.inf
            self._more = True
            raise

    async def _keep(self) -> None:
        """Feed the session's idle timeout from the event loop, and ask for the store's time by the way.

        A process whose loop hangs stops feeding, and loses the lane: that is the point. An open release is fed as
        well, as its broker may be slow to confirm, but not for longer than it may take.
        """
        while not await self._released_within(FEED_SECONDS) and self._link.alive:
            if not self._link.quiet or self._clock.monotonic() > self._fed_until:
                continue
            try:
                async with self._talking("feed") as connection:
                    await session.sample(connection, self._clock, timeout=5 * FEED_SECONDS)
                    if not connection.is_in_transaction():
                        await self._write_down(connection)
            except StoreLost as error:
                log.warning("lane connection broken", lane=self.number, error=str(error))
            if self._clock_steps != self._clock.steps:
                self._woken.set()

    async def _write_down(self, connection: asyncpg.Connection, *, at_once: bool = False) -> None:
        """Tell the next owner where to start. Not now, if a park holds the row: nobody waits for this."""
        now = self._clock.monotonic()
        if (at_once or now >= self._written_at + WRITE_SECONDS) and self._written != self._watermark:
            self._written, self._written_at = self._watermark, now
            await connection.execute(statements.WRITE_WATERMARK, self.number, self._watermark)

    async def _look_around(self) -> None:
        pause = FIRST_LOOK_SECONDS
        while not await self._released_within(pause) and self._link.alive:
            pause = LONGEST_SLEEP
            try:
                await self.look_back()
            except DRIVER_ERRORS as error:
                log.warning("store unreachable", doing="look back", lane=self.number, error=describe(error))

    async def look_back(self) -> None:
        """Find what was put into the lane without a note: by hand, by another tool, by a commit in doubt; and whether
        the lane can be let go.

        Raises the driver's errors.
        """
        found = await self._look(self.number, self._clock.now_ms() + IDLE_MS)
        if found.first_ms is not None and found.first_ms < self._watermark:
            self.note_parked(found.first_ms)
        if found.retry_ms is not None:
            self.note_held(found.retry_ms)
        self._quiet_until = found.horizon_ms if found.empty else session.BEGINNING_MS

    async def _released_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._releasing.wait()
        except TimeoutError:
            return False
        return True

    def _on_termination(self, _connection: object) -> None:
        self._woken.set()
