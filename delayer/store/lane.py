"""A lane: the part of the store that this process owns, for as long as one connection lives.

That connection holds the lane's advisory lock and runs its release transactions. So "we do not own the lane any more"
and "our open release is rolled back" are one event, and no release of ours can commit after somebody else adopted the
lane.

Where its claims begin, and until when its owner may sleep: foresight.py.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import asyncpg
import structlog

from delayer.core.errors import LaneLost, StoreLost
from delayer.core.hold import Hold
from delayer.core.message import Due, Parcel
from delayer.core.pace import Scope
from delayer.faultpoint import reach
from delayer.store import handover, session, settling, statements, taking
from delayer.store.claiming import HORIZON_MS, LONGEST_SLEEP, Claim
from delayer.store.clock import StoreClock
from delayer.store.errors import DRIVER_ERRORS, describe
from delayer.store.foresight import Foresight
from delayer.store.link import Link
from delayer.store.outlook import IDLE_MS, Looks, Start
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
        looks: Looks,
        *,
        release_seconds: float,
    ) -> None:
        """``release_seconds``: for how long an open release is fed."""
        self.epoch = start.epoch
        self._link = Link(number, connection)
        self._clock = clock
        self._looks = looks
        self._known = Foresight(start, clock)
        self._releasing = asyncio.Event()
        self._claim: Claim | None = None
        self._written = start.watermark
        self._written_at = clock.monotonic()
        self._release_seconds = release_seconds
        self._fed_until = math.inf
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
        """See the port."""
        return self._known.idle

    def pace(self, scopes: Sequence[Scope]) -> None:
        """See the port."""
        self._known.pace(scopes)

    async def claim(self, limit: int, max_bytes: int, scope: Scope | None = None) -> list[Due]:
        """See the port. The rows that were held before come last, and are a tenth of ``limit`` at most."""
        if self._claim is not None:
            raise RuntimeError(f"lane {self.number}: claim before the last one was settled or given up")
        began = self._clock.monotonic()
        async with self._talking("claim") as connection:
            self._known.claiming()
            place = connection, self._clock, self.number
            take = partial(taking.take, *place, self._known, limit=limit, max_bytes=max_bytes, scope=scope)
            try:
                self._claim = await take()
            except asyncpg.DeadlockDetectedError:
                # Against somebody who replaces several keyed messages at once. They win; then it is our turn.
                await connection.execute("ROLLBACK")
                self._claim = await take()
            if self._claim.rows and self._clock.monotonic() - began > FEED_SECONDS:
                # To the server the release was idle while its rows were on their way, perhaps for too long: then it is
                # rolled back, and whatever is published of it comes twice.
                await session.sample(connection, self._clock)
        if self._claim.rows:
            self._fed_until = self._clock.monotonic() + self._release_seconds
            reach("release.claimed")
        return self._claim.rows

    async def settle(self, released: Sequence[Due], held: Sequence[tuple[Due, Hold]]) -> None:
        """See the port. ``released`` and ``held`` together are what was claimed: committing less would lose some."""
        claim = self._claim
        if claim is None:
            raise LaneLost(f"lane {self.number}: its release was rolled back")
        if len(released) + len(held) != claim.size:
            await self.give_up()
            raise ValueError(f"claimed {claim.size}, settled {len(released)} released and {len(held)} held")
        async with self._talking("settle") as connection:
            await settling.write(connection, self.number, released, held, self._clock.now_ms())
            if held or self._known.retries.soonest_ms <= self._clock.now_ms():
                await taking.look_at_retries(connection, self._clock, self.number, self._known, claim)
            status = await connection.execute("COMMIT")
            if status != "COMMIT":
                raise StoreLost(f"settle: the store answered COMMIT by {status}")
            self._claim, self._fed_until = None, math.inf
        self._known.settled(claim)
        if claim.size:
            reach("release.committed")

    async def give_up(self) -> None:
        """See the port."""
        if self._claim is None:
            return
        self._claim, self._fed_until = None, math.inf
        self._known.more = True
        await self._link.roll_back()

    @property
    def more(self) -> bool:
        """See the port."""
        return self._known.more

    async def sleep_hint(self) -> float:
        """See the port."""
        async with self._talking("sleep hint") as connection:
            self._known.forget_after_step()
            if self._known.hurries:
                return 0.0
            soonest = self._known.next
            if soonest is None:
                horizon = self._clock.now_ms() + HORIZON_MS
                soonest = await connection.fetchval(statements.NEXT_DUE, self.number, self._known.read_to_ms, horizon)
        next_ms = self._known.next_ms(soonest)
        return min(max(self._clock.seconds_until(next_ms), 0.0), LONGEST_SLEEP)

    async def keep(self) -> None:
        """See the port."""
        async with self._talking("keep") as connection:
            await handover.keep(connection, self.number)

    def note_parked(self, due_ms: int) -> None:
        """See the port."""
        self._known.note_parked(due_ms)

    def note_parcels(self, parcels: Sequence[Parcel]) -> None:
        """As :meth:`note_parked`, of what is known: who is not meant does not look for it."""
        self._known.note_parcels(parcels)

    def note_held(self, retry_ms: int) -> None:
        """A message was put straight into held, to be tried again at ``retry_ms``."""
        self._known.note_held(retry_ms)

    def hear(self, told: Told) -> None:
        """Somebody else put something into the lane, by hand."""
        self._known.hear(told)

    async def wait(self, seconds: float) -> None:
        """See the port. Also returns when the lane is lost, and when the store's clock was set: sleep hints of the
        old time are worth nothing then."""
        deadline = self._clock.monotonic() + seconds
        while self.held_by_us and not self._known.clock_stepped:
            self._known.woken.clear()
            next_ms = min(self._known.noted, self._known.next_retry_ms())
            left = min(deadline - self._clock.monotonic(), self._clock.seconds_until(next_ms))
            if left <= 0.0:
                return
            try:
                # Loops round to milliseconds, some of them down: waking early costs a claim that finds nothing.
                async with asyncio.timeout(math.ceil(left * 1000) / 1000):
                    await self._known.woken.wait()
            except TimeoutError:
                continue

    async def release(self) -> None:
        """See the port. An open claim is rolled back by the server."""
        if self._releasing.is_set():
            return
        self._releasing.set()
        self._known.woken.set()
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
            self._known.more = True
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
            if self._known.clock_stepped:
                self._known.woken.set()

    async def _write_down(self, connection: asyncpg.Connection, *, at_once: bool = False) -> None:
        """Tell the next owner where to start. Not now, if a park holds the row: nobody waits for this."""
        now = self._clock.monotonic()
        if (at_once or now >= self._written_at + WRITE_SECONDS) and self._written != self._known.watermark:
            self._written, self._written_at = self._known.watermark, now
            await connection.execute(statements.WRITE_WATERMARK, self.number, self._known.watermark)

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
        seen = self._known.looking()
        self._known.saw(await self._looks.ahead(self.number, self._clock.now_ms() + IDLE_MS), seen)
        # Apart: it takes longer, may fail, and waits for other lanes' searches.
        seen, search = self._known.looking(), self._known.search
        if search is not None:
            self._known.searched(await self._looks.behind(self.number, search), seen)

    async def _released_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._releasing.wait()
        except TimeoutError:
            return False
        return True

    def _on_termination(self, _connection: object) -> None:
        self._known.woken.set()
