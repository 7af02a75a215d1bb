"""A lane: a partition of the waiting messages that this process owns while one connection lives. Its claims: the
statements of a release.

That connection holds the lane's advisory lock and runs its release transactions. So the loss of the lock also rolls
back the open release. No release of ours can commit after another process took the lane.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import asyncpg
import structlog

from delayer.core.backoff import pause_ms
from delayer.core.errors import LaneLost, StoreLost
from delayer.core.faultpoint import reach
from delayer.core.hold import Hold
from delayer.core.message import Due
from delayer.store import pool as session
from delayer.store import statements
from delayer.store.clock import StoreClock
from delayer.store.errors import DRIVER_ERRORS, describe
from delayer.store.lanes.cursor import NEVER_MS, ReleaseCursor, Start, Turn
from delayer.store.rows import envelope, keys

log = structlog.get_logger()

FEED_SECONDS: Final = 1.0
WRITE_SECONDS: Final = 5.0
FIRST_SCAN_SECONDS: Final = 5.0


class PostgresLane:
    """Satisfies broker.ports.Lane. Made by locks.py, which took the lock on ``connection``."""

    def __init__(
        self,
        number: int,
        route: bytes | None,
        start: Start,
        connection: asyncpg.Connection,
        *,
        clock: StoreClock,
        pool: asyncpg.Pool,
        release_seconds: float,
    ) -> None:
        """``pool``: for scans. ``release_seconds``: for how long an open release is kept from the idle timeout."""
        self.number = number
        self.route = route
        self.epoch = start.epoch
        self.connection = connection
        self.cursor = ReleaseCursor(start, clock)
        self._clock = clock
        self._pool = pool
        self._turn = asyncio.Lock()  # One statement or transaction of ours at a time.
        self._released = False
        self._releasing = asyncio.Event()
        self._claim: Claim | None = None
        self._written = start.watermark
        self._written_at = clock.monotonic()
        self._release_seconds = release_seconds
        self._fed_until = math.inf
        connection.add_termination_listener(lambda _: self.cursor.woken.set())
        self._keeper = asyncio.create_task(self._keep(), name=f"lane {number}: keep")
        self._scanner = asyncio.create_task(self._scan_on(), name=f"lane {number}: scan")

    @property
    def held_by_us(self) -> bool:
        """See the port."""
        return not self._released and not self.connection.is_closed()

    @property
    def more(self) -> bool:
        """See the port."""
        return self.cursor.more

    async def claim(self, limit: int, max_bytes: int) -> list[Due]:
        """See the port. The rows that were held before come last, and are a tenth of ``limit`` at most."""
        if self._claim is not None:
            raise RuntimeError(f"lane {self.number}: claim before the last one was settled or given up")
        began = self._clock.monotonic()
        async with self._talking("claim") as connection:
            self.cursor.claiming()
            try:
                self._claim = await self._claim_once(connection, limit, max_bytes)
            except asyncpg.DeadlockDetectedError:
                # Against a park that replaces several keyed messages at once. It wins; then it is our turn.
                await connection.execute("ROLLBACK")
                self._claim = await self._claim_once(connection, limit, max_bytes)
            if self._claim.rows and self._clock.monotonic() - began > FEED_SECONDS:
                # For the server the release was idle while its rows travelled, perhaps for too long. Then it is rolled
                # back, and its published messages come twice.
                await session.sample(connection, self._clock)
        if self._claim.rows:
            self._fed_until = self._clock.monotonic() + self._release_seconds
            reach("release.claimed")
        return self._claim.rows

    async def _claim_once(self, connection: asyncpg.Connection, limit: int, max_bytes: int) -> Claim:
        return await claim_due(connection, self._clock, self.number, self.cursor, limit=limit, max_bytes=max_bytes)

    async def settle(self, released: Sequence[Due], held: Sequence[tuple[Due, Hold]]) -> None:
        """See the port. ``released`` and ``held`` together are the whole claim; committing a part would lose the
        rest."""
        claim = self._claim
        if claim is None:
            raise LaneLost(f"lane {self.number}: its release was rolled back")
        if len(released) + len(held) != claim.size:
            await self.give_up()
            raise ValueError(f"claimed {claim.size}, settled {len(released)} released and {len(held)} held")
        async with self._talking("settle") as connection:
            await settle_claim(connection, self._clock, self.number, self.cursor, claim, released=released, held=held)
            status = await connection.execute("COMMIT")
            if status != "COMMIT":
                raise StoreLost(f"settle: the store answered COMMIT by {status}")
            self._claim, self._fed_until = None, math.inf
        self.cursor.settled(claim.watermark, full=claim.full, next_ms=claim.next_ms)
        if claim.size:
            reach("release.committed")

    async def give_up(self) -> None:
        """See the port."""
        if self._claim is None:
            return
        self._forget_claim()
        async with self._turn:
            await self._roll_back()

    async def sleep_hint(self) -> float:
        """See the port."""
        async with self._talking("sleep hint") as connection:
            self.cursor.forget_after_step()
            if self.cursor.more:
                return 0.0
            soonest = self.cursor.next
            if soonest is None:
                horizon = self._clock.now_upper_ms() + HORIZON_MS
                soonest = await connection.fetchval(statements.NEXT_DUE, self.number, self.cursor.watermark, horizon)
        next_ms = self.cursor.next_ms(soonest)
        return min(max(self._clock.seconds_until(next_ms), 0.0), LONGEST_SLEEP)

    def note_parked(self, due_ms: int) -> None:
        """See the port."""
        self.cursor.note_parked(due_ms)

    def note_held(self, retry_ms: int) -> None:
        """A message was put straight into held, to be retried at ``retry_ms``."""
        self.cursor.note_held(retry_ms)

    async def wait(self, seconds: float) -> None:
        """See the port. Also returns when the lane is lost, and when the store's clock was set: sleep hints of the
        old time are worth nothing then."""
        deadline = self._clock.monotonic() + seconds
        while self.held_by_us and not self.cursor.clock_stepped:
            self.cursor.woken.clear()
            next_ms = min(self.cursor.noted, self.cursor.next_retry_ms())
            left = min(deadline - self._clock.monotonic(), self._clock.seconds_until(next_ms))
            if left <= 0.0:
                return
            try:
                # Loops round to milliseconds, some of them down: waking early costs a claim that finds nothing.
                async with asyncio.timeout(math.ceil(left * 1000) / 1000):
                    await self.cursor.woken.wait()
            except TimeoutError:
                continue

    async def release(self) -> None:
        """See the port. The server rolls back an open claim and frees the lock."""
        if self._releasing.is_set():
            return
        self._releasing.set()
        self.cursor.woken.set()
        self._scanner.cancel()
        await asyncio.wait([self._keeper, self._scanner])
        if self.held_by_us and not self._turn.locked() and not self.connection.is_in_transaction():
            try:
                async with self._talking("release") as connection:
                    await self._write_down(connection, at_once=True)
            except StoreLost as error:
                log.warning("lane connection broken", lane=self.number, error=str(error))
        self._claim, self._released = None, True
        await session.close(self.connection)

    @asynccontextmanager
    async def _talking(self, doing: str) -> AsyncIterator[asyncpg.Connection]:
        """The connection, for one caller at a time. Raises LaneLost when it is gone, StoreLost when the store refused.

        After a failure the transaction is rolled back. If that is uncertain, the connection is cut, and the server
        rolls back. Otherwise the next transaction would commit deletions that it does not know of.
        """
        async with self._turn:
            if not self.held_by_us:
                self._forget_claim()
                raise LaneLost(f"lane {self.number}: {doing}: the connection that holds its lock is gone")
            try:
                yield self.connection
            except DRIVER_ERRORS as error:
                self._forget_claim()
                if isinstance(error, TimeoutError):
                    self.connection.terminate()  # The server is silent, so the result of the statement is unknown.
                await self._roll_back()
                lost = StoreLost if self.held_by_us else LaneLost
                raise lost(f"lane {self.number}: {doing}: {describe(error)}") from error
            except BaseException:
                # Cancelled between two statements or inside one, or a bug.
                self._forget_claim()
                self.connection.terminate()
                raise

    def _forget_claim(self) -> None:
        """The open claim is rolled back, or will be."""
        self._claim, self._fed_until = None, math.inf
        self.cursor.more = True

    async def _roll_back(self) -> None:
        if self.connection.is_closed():
            return
        try:
            await self.connection.execute("ROLLBACK")
        except DRIVER_ERRORS as error:
            self.connection.terminate()
            log.warning("rollback failed", lane=self.number, error=describe(error))
        except BaseException:
            self.connection.terminate()
            raise

    async def _keep(self) -> None:
        """Keep the session from its idle timeout, by asking for the store's time.

        A process whose event loop hangs stops feeding, and loses the lane. An open release is fed as well, as its
        broker may be slow to confirm, but not for longer than it may take.
        """
        while not await self._released_within(FEED_SECONDS) and self.held_by_us:
            if self._turn.locked() or self._clock.monotonic() > self._fed_until:
                continue
            try:
                async with self._talking("feed") as connection:
                    await session.sample(connection, self._clock, timeout=5 * FEED_SECONDS)
                    if not connection.is_in_transaction():
                        await self._write_down(connection)
            except StoreLost as error:
                log.warning("lane connection broken", lane=self.number, error=str(error))
            if self.cursor.clock_stepped:
                self.cursor.woken.set()

    async def _write_down(self, connection: asyncpg.Connection, *, at_once: bool = False) -> None:
        """Write the watermark for the next owner. Not now, if a park holds the row: there is no hurry."""
        now = self._clock.monotonic()
        if (at_once or now >= self._written_at + WRITE_SECONDS) and self._written != self.cursor.watermark:
            self._written, self._written_at = self.cursor.watermark, now
            await connection.execute(statements.WRITE_WATERMARK, self.number, self.cursor.watermark)

    async def _scan_on(self) -> None:
        pause = FIRST_SCAN_SECONDS
        while not await self._released_within(pause) and self.held_by_us:
            pause = LONGEST_SLEEP
            try:
                await self.scan()
            except DRIVER_ERRORS as error:
                log.warning("store unreachable", doing="scan", lane=self.number, error=describe(error))

    async def scan(self) -> None:
        """Find unannounced rows: written by hand, by another tool, or by a commit in doubt. It uses a connection of the
        pool, because it reads dead entries, at some 4 us each. Raises the driver's errors."""
        watermark, horizon_ms = self.cursor.watermark, self._clock.now_upper_ms() + HORIZON_MS
        async with session.borrowed(self._pool) as connection:
            first_ms = await connection.fetchval(statements.NEXT_DUE, self.number, session.BEGINNING_MS, horizon_ms)
            retry_ms = await connection.fetchval(statements.NEXT_RETRY, self.number)
        self.cursor.scanned(watermark, first_ms, retry_ms)

    async def _released_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._releasing.wait()
        except TimeoutError:
            return False
        return True


LONGEST_SLEEP: Final = 60.0
HORIZON_MS: Final = 61_000
"""The time until an owner wakes that sleeps for LONGEST_SLEEP, and a second more."""


@dataclass(slots=True)
class Claim:
    """The rows that an open release transaction took."""

    watermark: int
    """The instant where the next claim begins."""
    rows: list[Due] = field(default_factory=list)
    size: int = 0
    """The number of ``rows`` as claimed; the caller may take the list apart."""
    full: bool = False
    next_ms: int | None = None
    """When the next waiting row is due, if no waiting row was taken; NEVER_MS if none is by the horizon."""
    passed_over_ms: int = -NEVER_MS
    """Held rows whose retry was due by this instant were asked for, and all of them were locked."""


async def claim_due(
    connection: asyncpg.Connection,
    clock: StoreClock,
    number: int,
    cursor: ReleaseCursor,
    *,
    limit: int,
    max_bytes: int,
) -> Claim:
    """Begin a transaction and take the due rows of lane ``number``. Held rows come last, and are a tenth of ``limit``
    at most. A tenth of ``max_bytes`` is left for them, unless a single row is larger.

    Raises the driver's errors, and RuntimeError if a transaction is open already.
    """
    limit, turn = cursor.turn(limit)
    retries = max(1, limit // 10) if turn is Turn.SHARE else 0
    upper = clock.now_upper_ms()
    before = clock.now_lower_ms()  # Before the statements are sent, so not after the instants that the statements use.
    if connection.is_in_transaction():
        raise RuntimeError(f"lane {number}: a transaction is open that no claim began")
    await connection.execute("BEGIN")
    watermark = cursor.watermark
    waiting_bytes = max_bytes - max_bytes // 10 if retries else max_bytes
    records = await connection.fetch(
        statements.CLAIM, number, watermark, upper + HORIZON_MS, limit - retries, waiting_bytes
    )
    rows = sorted(map(envelope.read, records), key=_due_then_arrival)
    taken = sum(len(due.parcel.body) + len(due.parcel.properties) for due in rows)
    made = Claim(watermark, full=len(rows) >= limit - retries or taken >= waiting_bytes, rows=rows)
    if rows:
        # This holds for a claim with fewer rows as well: a row may be missing because it was cancelled while the claim
        # waited for it, and more rows may follow.
        made.watermark = rows[-1].due_ms
    elif not made.full:
        # A claim whose rows were all cancelled is empty as well. So the next row is asked for.
        soonest = await connection.fetchval(statements.NEXT_DUE, number, watermark, upper + HORIZON_MS)
        made.next_ms = NEVER_MS if soonest is None else soonest
        made.watermark = min(before, made.next_ms)
    if turn is Turn.SPARE and not rows:
        retries = limit
    crowded = bool(retries and rows and taken >= max_bytes)
    if retries and not crowded:
        held = await connection.fetch(statements.CLAIM_HELD, number, retries, max(max_bytes - taken, 1))
        rows += map(_held, held)
        if not held:
            made.passed_over_ms = before
    cursor.claimed(crowded=crowded)
    made.size = len(rows)
    return made


async def settle_claim(
    connection: asyncpg.Connection,
    clock: StoreClock,
    number: int,
    cursor: ReleaseCursor,
    made: Claim,
    *,
    released: Sequence[Due],
    held: Sequence[tuple[Due, Hold]],
) -> None:
    """Write what became of a claim of lane ``number``, in its open transaction: held rows, keys, counters last.

    The rows that waited are deleted already; those that were held before (``attempts`` is not 0) still stand in held.
    Raises the driver's errors.
    """
    tried_again = [due.id for due in released if due.attempts]
    if tried_again:
        await connection.execute("DELETE FROM held WHERE id = ANY($1)", tried_again)
    if held:
        await _hold(connection, number, held, clock.now_upper_ms())
    if keyed := [(due.parcel.key, due.id) for due in released if due.parcel.key is not None]:
        await keys.forget(connection, keyed)
    newly_held = sum(not due.attempts for due, _ in held)
    changed = [(kind, n) for kind, n in (("held", newly_held - len(tried_again)), ("released", len(released))) if n]
    if changed:
        kinds, numbers = zip(*changed, strict=True)
        await connection.execute(statements.COUNT, [number] * len(kinds), kinds, numbers)
    if held or cursor.retry_ms <= clock.now_upper_ms():
        await _find_next_retry(connection, number, cursor, made)


async def _hold(connection: asyncpg.Connection, lane: int, held: Sequence[tuple[Due, Hold]], now_ms: int) -> None:
    """Put claimed rows into held, or update them there, each with its next retry."""
    first, again = [], []
    for due, hold in held:
        retry_ms = hold.retry_ms(now_ms + pause_ms(due.attempts + 1, due.id))
        if due.attempts:
            again.append((due.id, *envelope.hold_row(hold), retry_ms))
        else:
            first.append((*envelope.row_again(due, lane), due.id, retry_ms, 1, *envelope.hold_row(hold), None))
    if first:
        await connection.copy_records_to_table("held", records=first, columns=envelope.HELD_COLUMNS)
    if again:
        await connection.execute(statements.HOLD_AGAIN, *map(list, zip(*again, strict=True)))


async def _find_next_retry(connection: asyncpg.Connection, number: int, cursor: ReleaseCursor, made: Claim) -> None:
    """Ask when a held row is retried next, as this claim leaves them."""
    soonest, cursor.retry_ms = cursor.retry_ms, NEVER_MS
    try:
        retry_ms = await connection.fetchval(statements.NEXT_RETRY, number)
    except BaseException:
        cursor.expect_retry(soonest)
        raise
    if retry_ms is None:
        return
    if retry_ms <= made.passed_over_ms:
        cursor.pass_over_retries()
    # The answer may be older than a row that was held and noted meanwhile.
    cursor.expect_retry(retry_ms)


def _held(record: asyncpg.Record) -> Due:
    hold = envelope.read_hold(record["kind"], record["reason"], record["may_be_delivered"], record["isolated"])
    return envelope.read(record, record["attempts"], hold, record["token"])


def _due_then_arrival(due: Due) -> tuple[int, int]:
    return due.due_ms, due.id
