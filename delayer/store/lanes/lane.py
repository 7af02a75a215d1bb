"""A lane: a part of the waiting and held messages, which this process owns while its connections live.

An ordinary lane has two sessions, each with a claimer. The first session holds the lane's advisory lock. A claimer has
at most one open claim, so the next claim begins while the last one is published and settled. The lane of a limited
route has one claimer, and shares its session with other such lanes (locks.py).

A lane ends when it loses any of its connections. A claim open on another connection may still settle: its rows are
locked, so the lane's next owner waits for it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import asyncpg
import structlog
from asyncpg import Connection

from delayer.core.errors import LaneLost, StoreLost
from delayer.core.heartbeat import STUCK_SECONDS
from delayer.core.message import WINDOW_MS
from delayer.core.units import DAY_MS
from delayer.store import pool, statements
from delayer.store.clock import StoreClock
from delayer.store.errors import DRIVER_ERRORS, describe
from delayer.store.lanes.claimer import HORIZON_MS, PostgresClaimer
from delayer.store.lanes.cursor import ReleaseCursor, RowPlace
from delayer.store.lanes.session import KEEPALIVE_SECONDS, LaneSession
from delayer.store.lanes.settling import SkippedRows
from delayer.store.rows.partitions import Days

log = structlog.get_logger()

WATERMARK_SECONDS: Final = 5.0
FIRST_SCAN_SECONDS: Final = 5.0
LONGEST_SLEEP: Final = 60.0
BEHIND_SECONDS: Final = 2.0
"""A lane with due rows for this long is behind. One second would be too short: a broker that starts a new log file
confirms nothing for that long."""
STUCK_ADVICE: Final = 'look for this lane above; see "A lane that does not advance" in docs/operations.md'


@dataclass(eq=False)
class PostgresLane:
    """Implements release.ports.Lane. Created by locks.py.

    ``epoch``: the number of this ownership; each owner raises it, and the store rejects writes with an older number.
    ``cursor``: where and when claims begin. ``unlock``: frees the lane, and closes sessions that no other lane shares.
    ``lock``: the connection that holds the advisory lock. ``pool``: the connections for scans. ``days``: the days that
    have a partition. ``release_seconds``: how long an open claim is kept from the server's idle timeout. ``history``:
    whether settlements write the history.
    """

    number: int
    route: bytes | None
    epoch: int
    cursor: ReleaseCursor
    sessions: Sequence[LaneSession]
    unlock: Callable[[], Awaitable[None]]
    lock: Connection
    clock: StoreClock
    pool: asyncpg.Pool
    days: Days
    release_seconds: float
    history: bool = False

    def __post_init__(self) -> None:
        self.claimers = [PostgresClaimer(self, session) for session in self.sessions]
        # Limited routes claim rows only once they are due: waiting in a claim would block the other routes' session.
        self.window_ms = WINDOW_MS if self.route is None else 0
        self.skipped = SkippedRows(self.number, self.clock)
        self.closed = False
        self.leaving = asyncio.Event()
        self.ended = asyncio.Event()
        """Set after :meth:`close`."""
        self.on_end: Callable[[], object] = bool
        """Called when the lane loses a connection, and when it is closed. ``bool`` does nothing."""
        self.advanced_at = -math.inf
        """When it last settled a claim, in monotonic seconds."""
        self._busy_since: float | None = None
        self._closing = asyncio.Event()
        self._last_watermark: int | None = None
        self._watermark_at = self.clock.monotonic()
        self._connections = {self.lock, *(session.connection for session in self.sessions)}
        for connection in self._connections:
            connection.add_termination_listener(self._wake)
        self._keeper = asyncio.create_task(self._keep(), name=f"lane {self.number}: keep")
        self._scanner = asyncio.create_task(self._scan_on(), name=f"lane {self.number}: scan")

    @property
    def owned(self) -> bool:
        return not self.closed and not any(connection.is_closed() for connection in self._connections)

    def check_owned(self, doing: str) -> None:
        """Raises LaneLost if a connection of the lane is gone."""
        if not self.owned:
            raise LaneLost(f"lane {self.number}: {doing}: one of its connections is gone")

    def ids_left_out(self, place: RowPlace) -> list[int]:
        """The messages after ``place`` that a claim leaves out: skipped rows, and rows locked by an open claim."""
        open_claims = [claimer.opened for claimer in self.claimers if claimer.opened is not None]
        return self.skipped.ids + [
            due.id
            for claim in open_claims
            if claim.next_start > place
            for due in (*claim.rows, *claim.expired)
            if not due.attempts and (due.due_ms, due.id) > place
        ]

    @property
    def watermark(self) -> int:
        """A due instant before which the lane has no rows, even if all its open claims are rolled back."""
        starts = [claimer.opened.start[0] for claimer in self.claimers if claimer.opened is not None]
        return min(self.cursor.place[0], self.clock.now_lower_ms(), *starts)

    @property
    def behind(self) -> bool:
        """Whether the lane has had due rows for BEHIND_SECONDS without a break. ``max_rate`` may be the reason."""
        return self._busy_since is not None and self.clock.monotonic() - self._busy_since > BEHIND_SECONDS

    @property
    def stuck(self) -> bool:
        """Whether the lane has had due rows for STUCK_SECONDS and settled no claim."""
        busy = self._busy_since
        return busy is not None and self.clock.monotonic() - max(busy, self.advanced_at) > STUCK_SECONDS

    def leave(self) -> None:
        self.leaving.set()
        self.cursor.woken.set()

    def note_occurrences(self, dues: Sequence[int]) -> None:
        """Note occurrences that a settlement wrote into the lane. Their days may need a partition, which the upkeep
        makes: the settlement cannot wait for that."""
        if dues:
            self.cursor.note_parked(min(dues))
            self.days.want(due_ms // DAY_MS for due_ms in dues)

    def _wake(self, _: object) -> None:
        self.cursor.woken.set()
        self.on_end()

    def sleep_hint(self) -> float:
        self.check_owned("look for the next claim")
        self.cursor.forget_after_step()
        seconds = 0.0 if self.cursor.more else max(self.clock.seconds_until(self.cursor.wake_ms()), 0.0)
        self._busy_since = None if seconds else self._busy_since or self.clock.monotonic()
        return min(seconds, LONGEST_SLEEP)

    async def wait(self, seconds: float) -> None:
        """Return early if the lane is lost or to be left, or if a clock step makes ``seconds`` wrong."""
        deadline = self.clock.monotonic() + seconds
        while self.owned and not self.leaving.is_set() and not self.cursor.clock_stepped:
            self.cursor.woken.clear()
            left = min(deadline - self.clock.monotonic(), self.clock.seconds_until(self.cursor.wake_ms()))
            if left <= 0.0:
                return
            # Some event loops round a timeout down to milliseconds, and waking early costs an empty claim.
            with suppress(TimeoutError):
                await asyncio.wait_for(self.cursor.woken.wait(), math.ceil(left * 1000) / 1000)

    async def close(self) -> None:
        """Close the lane. The server rolls back open claims and frees the lock."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.cursor.woken.set()
        self._scanner.cancel()
        await asyncio.wait([self._keeper, self._scanner])
        await self._write_watermark(at_once=True)
        for claimer in self.claimers:
            if self.route is None:
                claimer.end()  # The server rolls it back.
            else:
                await claimer.give_up()
        self.closed = True
        for connection in self._connections:
            connection.remove_termination_listener(self._wake)
        await self.unlock()
        self.ended.set()
        self.on_end()

    async def _keep(self) -> None:
        """Keep the watermark up to date, log that the lane is stuck, and wake a sleeper after a clock step."""
        told = False
        while not await self._closed_within(KEEPALIVE_SECONDS) and self.owned:
            await self._write_watermark()
            if self.stuck and not told:
                log.error("lane stuck", lane=self.number, seconds=STUCK_SECONDS, next_step=STUCK_ADVICE)
            told = self.stuck
            for due_ms in self.skipped.end_pauses():
                self.cursor.note_parked(due_ms)
            if self.cursor.clock_stepped:
                self.cursor.woken.set()

    async def _write_watermark(self, *, at_once: bool = False) -> None:
        """Save the watermark for the next owner; skip it for now if a claim is open or a park has the row locked."""
        now, watermark = self.clock.monotonic(), self.watermark
        first = self.claimers[0]
        if not at_once and (now < self._watermark_at + WATERMARK_SECONDS or self._last_watermark == watermark):
            return
        if not self.owned or first.session.claims.locked() or first.session.turn.locked():
            return
        try:
            async with first.locked_connection("write watermark") as connection:
                result = await connection.execute(statements.WRITE_WATERMARK, self.number, watermark, self.epoch)
        except StoreLost as error:
            log.warning("lane connection broken", lane=self.number, error=str(error))
        else:
            self._watermark_at = now
            self._last_watermark = watermark if result != "UPDATE 0" else None

    async def _scan_on(self) -> None:
        pause = FIRST_SCAN_SECONDS
        while not await self._closed_within(pause) and self.owned:
            pause = LONGEST_SLEEP
            try:
                await self.scan()
            except (*DRIVER_ERRORS, StoreLost) as error:
                log.warning("store unreachable", doing="scan", lane=self.number, error=describe(error))

    async def scan(self) -> None:
        """Find rows that arrived without a notification: written by hand, by another tool, or by a commit in doubt. It
        uses a pooled connection, so no claim waits for it. Raises StoreLost, the driver's errors."""
        watermark, horizon_ms = self.watermark, self.clock.now_upper_ms() + HORIZON_MS
        where = self.number, pool.BEGINNING_MS, 0, horizon_ms, self.skipped.ids
        async with pool.borrow(self.pool) as connection:
            first_ms = await connection.fetchval(statements.NEXT_DUE, *where)
            retry_ms = await connection.fetchval(statements.NEXT_RETRY, self.number)
        self.cursor.note_scan(watermark, first_ms, retry_ms)

    async def _closed_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)
        return self._closing.is_set()
