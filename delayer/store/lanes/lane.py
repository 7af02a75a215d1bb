"""A lane: a part of the waiting and held messages, which this process owns while its connections live.

An ordinary lane has two sessions, each with a claimer. The first session holds the lane's advisory lock. A claimer has
at most one open claim. While one publishes and settles its claim, the other begins the next. The lane of a limited
route has one claimer, and shares its session with other such lanes (locks.py).

A lane ends when it loses any of its connections. A claim open on another connection may still settle: its rows are
locked, so the lane's next owner waits for it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

import asyncpg
import structlog
from asyncpg import Connection

from delayer.core.errors import LaneLost, Rejected, StoreLost
from delayer.core.faultpoint import reach
from delayer.core.heartbeat import STUCK_SECONDS
from delayer.core.hold import Hold
from delayer.core.message import WINDOW_MS, Due
from delayer.core.units import DAY_MS
from delayer.format.rows import read_held_row, read_row
from delayer.retry import first_set
from delayer.store import pool, statements
from delayer.store.clock import StoreClock
from delayer.store.errors import DRIVER_ERRORS, REJECTED, describe, to_store_lost
from delayer.store.lanes.cursor import NEVER_MS, NOTHING, Claim, ReleaseCursor, RowPlace, place_of
from delayer.store.lanes.session import KEEPALIVE_SECONDS, LaneSession
from delayer.store.lanes.settling import NO_LIMIT, Settlement, SkippedRows, outcomes_of
from delayer.store.rows.partitions import Days
from delayer.store.schedules import occurrences

log = structlog.get_logger()

WATERMARK_SECONDS: Final = 5.0
FIRST_SCAN_SECONDS: Final = 5.0
LONGEST_SLEEP: Final = 60.0
BEHIND_SECONDS: Final = 2.0
"""A lane with due rows for this long is behind. One second would be too short: a broker that starts a new log file
confirms nothing for that long."""
STUCK_ADVICE: Final = 'look for this lane above; see "A lane that does not advance" in docs/operations.md'
ANY_SIZE: Final = 1 << 62
HORIZON_MS: Final = 61_000
"""How far ahead a claim looks for the next row. If it finds none, the lane claims again when this time is over."""
Take = Callable[[Connection, int, int], Awaitable[Claim]]


class PostgresClaimer:
    """Implements release.ports.Claimer, on one of the connections of ``lane``."""

    def __init__(self, lane: PostgresLane, session: LaneSession) -> None:
        self.session = session
        self.opened: Claim | None = None
        self._has_session = False
        self._large: Take | None = None
        """The method by which the next claim takes a single row, without a byte limit; usually None. Set when rows were
        due and the last claim took none, probably because the first of them is too large. Only one claim of the process
        at a time does this (session.py)."""
        self._lane = lane
        self._clock = lane.clock

    async def claim(self, limit: int, max_bytes: int) -> list[Due]:
        lane = self._lane
        if self.opened is not None:
            raise RuntimeError(f"lane {lane.number}: claim before the last one was settled or given up")
        try:
            await self.session.begin_claim(large=self._large is not None)
        except TimeoutError:
            if self._large == self._claim_held:
                lane.cursor.pass_over_retries()  # The next claims take waiting rows.
            self._large = None
            return []
        self._has_session = True
        try:
            claim = await self._claim(limit, max_bytes)
        finally:
            if self.opened is None:
                self.end()
        if claim.rows:
            self.session.kept_alive_until = self._clock.monotonic() + lane.release_seconds
            reach("release.claimed")
        elif claim.expired:
            await self.settle((), ())
        elif not (lane.cursor.more or self._large):
            lane.busy_since = None  # Nothing is due, even if notifications keep the lane awake.
            await asyncio.sleep(lane.cursor.vain_pause())
        elif lane.skipped.full:  # No further row can be skipped until a pause ends, so do not spin.
            await asyncio.sleep(1.0)
        return claim.rows

    async def _claim(self, limit: int, max_bytes: int) -> Claim:
        began = self._clock.monotonic()
        self._lane.check_owned("claim")
        async with self.locked_connection("claim") as connection:
            try:
                claim = await self._claim_once(connection, limit, max_bytes)
            except (asyncpg.DeadlockDetectedError, Rejected):
                # A deadlock with a park that replaces several keyed messages, which the park wins; or the database
                # rejects a row, which SkippedRows has noted. In both cases the lane claims again.
                self._forget()
                await connection.execute("ROLLBACK")
                return NOTHING
            if claim.rows and self._clock.monotonic() - began > KEEPALIVE_SECONDS:
                # For the server the transaction was idle while its rows travelled, perhaps for too long. Check now,
                # because messages of a rolled-back claim would be published twice.
                await pool.sample(connection, self._clock)
        return claim

    async def _claim_once(self, connection: Connection, limit: int, max_bytes: int) -> Claim:
        """Begin a transaction and claim waiting and held rows by turns. If one kind has no rows, claim the other."""
        if connection.is_in_transaction():
            raise RuntimeError(f"lane {self._lane.number}: a transaction is open that no claim began")
        await connection.execute("BEGIN")
        kinds: list[Take] = [self._claim_waiting]
        if (held_first := self._lane.cursor.take_held_turn()) is not None:
            kinds.insert(not held_first, self._claim_held)
        if large := self._large:
            kinds, limit, max_bytes = [large], 1, ANY_SIZE
        for take in kinds:
            claim = await take(connection, limit, max_bytes)
            if large:
                self._large = None  # Only after success: after a rejected claim, the next tries the same kind.
            if claim.rows or claim.expired:
                self.opened = claim
                return claim
        await connection.execute("ROLLBACK")
        return claim

    async def _claim_held(self, connection: Connection, limit: int, max_bytes: int) -> Claim:
        """Take held rows due for a retry, at most a tenth of ``limit``."""
        number, cursor, before = self._lane.number, self._lane.cursor, self._clock.now_lower_ms()
        skipped = self._lane.skipped.ids
        held = await connection.fetch(statements.CLAIM_HELD, number, max(1, limit // 10), max_bytes, skipped)
        if held:
            cursor.retrying = True
        elif await self._find_next_retry(connection) <= before:
            if max_bytes == ANY_SIZE:  # The size was not the reason, so another transaction has the due rows locked.
                cursor.pass_over_retries()
            self._large = self._claim_held
        return Claim((NEVER_MS, 0), (NEVER_MS, 0), [read_held_row(record) for record in held], retries=bool(held))

    async def _claim_waiting(self, connection: Connection, limit: int, max_bytes: int) -> Claim:
        """Take waiting rows due within the window."""
        lane, cursor, clock = self._lane, self._lane.cursor, self._clock
        cursor.prepare_claim()
        horizon_ms, start = clock.now_upper_ms() + HORIZON_MS, cursor.place
        before = clock.now_lower_ms()  # Read before the statements are sent, so not later than the instants they use.
        claimed, limit = lane.ids_left_out(start), min(limit, lane.skipped.limit)
        where, skipped = (lane.number, *start, horizon_ms, claimed), lane.skipped
        first = await connection.fetchrow(statements.NEXT_DUE, *where) if skipped.limit == 1 else None
        try:
            records = await connection.fetch(statements.CLAIM, *where, lane.window_ms, limit, max_bytes)
        except REJECTED as error:
            raise skipped.rejected(limit, first, error) from error
        skipped.limit = min(2 * skipped.limit, NO_LIMIT)
        rows = sorted([read_row(one, parked_ms=one["parked_at"]) for one in records], key=place_of)
        full = len(rows) >= limit or sum(len(due.parcel.body) + len(due.parcel.properties) for due in rows) >= max_bytes
        last, next_ms = place_of(rows[-1]) if rows else start, None
        if not full or (rows and rows[-1].due_ms > before):
            # Query what follows. Due rows may follow even a claim that is not full, because a cancel can remove some of
            # its rows while it waits for their locks. If its last row is not due yet by our estimate, the store's clock
            # may have been set, so this query also reads the clock.
            asked = clock.monotonic()
            following = await connection.fetchrow(statements.NEXT_DUE, lane.number, *last, horizon_ms, claimed)
            next_ms, server_ms, _ = following
            clock.observe(asked, server_ms, clock.monotonic())
            next_ms = horizon_ms if next_ms is None else next_ms  # The claim at the horizon finds rows beyond it.
            if not rows:
                self._large = self._claim_waiting if next_ms <= before + lane.window_ms else self._large
                last = max(start, (min(before, next_ms), 0))
        cursor.note_claim(last, more=full or next_ms is None or next_ms <= before + lane.window_ms, next_ms=next_ms)
        keyed = [due for due in rows if due.parcel.key is not None]
        expired = await occurrences.find_expired(connection, keyed, before) if keyed else ()
        sent = [due for due in rows if due.id not in expired] if expired else rows
        return Claim(start, last, sent, [due for due in rows if due.id in expired] if expired else [])

    async def settle(
        self,
        released: Sequence[Due],
        held: Sequence[tuple[Due, Hold]],
        written_ms: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        """``released`` and ``held`` together must be the whole claim. Committing a part would lose the rest."""
        lane, claim = self._lane, self.opened
        if claim is None:
            lane.check_owned("settle")
            if released or held:
                raise LaneLost(f"lane {lane.number}: its release was rolled back")
            return
        if len(released) + len(held) != len(claim.rows):
            await self.give_up()
            raise ValueError(f"claimed {len(claim.rows)}, settled {len(released)} released and {len(held)} held")
        async with self.locked_connection("settle") as connection:
            if self.opened is not claim:  # While we waited, a keepalive of the session failed.
                raise LaneLost(f"lane {lane.number}: its release was rolled back")
            settlement = await self._write_results(connection, claim, released, held, written_ms)
            await pool.commit(connection)
            self.end()
            lane.advanced_at = self._clock.monotonic()
            lane.cursor.expect_retry(settlement.retry_ms)
            lane.note_occurrences(settlement.next_dues)
        reach("release.committed")

    async def _write_results(
        self,
        connection: Connection,
        claim: Claim,
        released: Sequence[Due],
        held: Sequence[tuple[Due, Hold]],
        written_ms: Callable[[], Sequence[float]],
    ) -> Settlement:
        """Write the claim's outcome in its open transaction, counters last. The claim has already deleted the waiting
        rows, so most releases write only the counters."""
        lane, clock, expired = self._lane, self._clock, claim.expired
        settlement = Settlement(connection, lane.number, lane.skipped, clock.now_upper_ms(), lane.history)
        if held or expired or lane.history or any(due.attempts or due.parcel.key is not None for due in released):
            await settlement.write(outcomes_of(released, held, expired, written_ms(), clock.now_lower_ms()))
        else:
            settlement.counted["released"] = len(released)
        if changed := [(kind, n) for kind, n in sorted(settlement.counted.items()) if n]:
            kinds, numbers = zip(*changed, strict=True)
            await connection.execute(statements.COUNT, [lane.number] * len(kinds), kinds, numbers)
        if claim.retries:
            settlement.retry_ms = min(settlement.retry_ms, await self._find_next_retry(connection))
        return settlement

    async def _find_next_retry(self, connection: Connection) -> int:
        """Query the lane's next retry, including the changes of this transaction, and set it in the cursor."""
        cursor = self._lane.cursor
        soonest, cursor.retry_ms = cursor.retry_ms, NEVER_MS
        try:
            found: int | None = await connection.fetchval(statements.NEXT_RETRY, self._lane.number)
        except BaseException:
            cursor.expect_retry(soonest)
            raise
        retry_ms = NEVER_MS if found is None else found
        # Keep a sooner retry that was noted while the query ran.
        cursor.expect_retry(retry_ms)
        return retry_ms

    async def give_up(self) -> None:
        if self.opened is None:
            return
        self._forget()
        async with self.session.turn:
            await self._roll_back()

    @asynccontextmanager
    async def locked_connection(self, doing: str) -> AsyncIterator[Connection]:
        """Lend the connection to one caller at a time. Raises LaneLost if the lane is gone, else StoreLost. A failure
        rolls back or, if that is uncertain, cuts the connection, so that the server rolls back. Otherwise the next
        transaction would unknowingly commit the deletions."""
        async with self.session.turn:
            connection = self.session.connection
            if self._lane.closed or connection.is_closed():
                self._forget()
                raise LaneLost(f"lane {self._lane.number}: {doing}: its connection is gone")
            try:
                yield connection
            except DRIVER_ERRORS as error:
                self._forget()
                if isinstance(error, TimeoutError):
                    connection.terminate()  # The server is silent, so the statement's result is unknown.
                await self._roll_back()
                doing = f"lane {self._lane.number}: {doing}"
                if not self._lane.owned:
                    raise LaneLost(f"{doing}: {describe(error)}") from error
                raise to_store_lost(doing, error) from error
            except BaseException:
                # Cancelled between or inside statements, or a bug.
                self._forget()
                connection.terminate()
                raise

    def end(self) -> Claim | None:
        claim, self.opened = self.opened, None
        if claim is not None and claim.retries:
            self._lane.cursor.retrying = False
        if self._has_session:
            self._has_session = False
            self.session.end_claim()
        return claim

    def _forget(self) -> None:
        """Forget the open claim, which is or will be rolled back."""
        claim = self.end()
        self._lane.cursor.note_rollback(None if claim is None else claim.start)

    async def _roll_back(self) -> None:
        connection = self.session.connection
        if connection.is_closed():
            return
        try:
            await connection.execute("ROLLBACK")
        except DRIVER_ERRORS as error:
            connection.terminate()
            log.warning("rollback failed", lane=self._lane.number, error=describe(error))
        except BaseException:
            connection.terminate()
            raise


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
    history: bool

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
        self.busy_since: float | None = None
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
        return self.busy_since is not None and self.clock.monotonic() - self.busy_since > BEHIND_SECONDS

    @property
    def stuck(self) -> bool:
        """Whether the lane has had due rows for STUCK_SECONDS and settled no claim."""
        busy = self.busy_since
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
        self.busy_since = None if seconds else self.busy_since or self.clock.monotonic()
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
        return bool(await first_set(self._closing, seconds=seconds))
