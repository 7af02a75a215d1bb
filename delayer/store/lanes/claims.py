"""The statements of a release: claim what is due, and settle the claim. lane.py opens and ends the transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import asyncpg

from delayer.core.backoff import pause_ms
from delayer.core.hold import Hold
from delayer.core.message import Due
from delayer.store import statements
from delayer.store.clock import StoreClock
from delayer.store.lanes.cursor import NEVER_MS, ReleaseCursor, Turn
from delayer.store.rows import envelope, keys

LONGEST_SLEEP: Final = 60.0
HORIZON_MS: Final = 61_000
"""What can be due before an owner wakes that sleeps for LONGEST_SLEEP."""


@dataclass(slots=True)
class Claim:
    """The rows that an open release transaction took."""

    watermark: int
    """Where the next claim begins."""
    rows: list[Due] = field(default_factory=list)
    size: int = 0
    """Of ``rows`` as they were claimed; the caller may take the list apart."""
    full: bool = False
    next_ms: int | None = None
    """When the next waiting row is due, if no waiting row was taken; NEVER_MS if none is by the horizon."""
    passed_over_ms: int = -NEVER_MS
    """Held rows whose retry was due by this instant were asked for, and all of them were locked."""


async def claim(
    connection: asyncpg.Connection,
    clock: StoreClock,
    number: int,
    cursor: ReleaseCursor,
    *,
    limit: int,
    max_bytes: int,
) -> Claim:
    """Begin a transaction and take what is due in lane ``number``. Held rows come last, and are a tenth of ``limit`` at
    most. A tenth of ``max_bytes`` is left for them, unless a single row is larger.

    Raises the driver's errors, and RuntimeError if a transaction is open already.
    """
    limit, turn = cursor.turn(limit)
    retries = max(1, limit // 10) if turn is Turn.SHARE else 0
    upper = clock.now_ms()
    before = clock.lower_ms()  # before the statements are sent, so not after the instants that they judge by
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
        # Also where there are fewer than could be: a row that was cancelled while the claim waited for it is missing,
        # and there may be more behind it.
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


async def settle(
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
        await _hold(connection, number, held, clock.now_ms())
    if keyed := [(due.parcel.key, due.id) for due in released if due.parcel.key is not None]:
        await keys.forget(connection, keyed)
    newly_held = sum(not due.attempts for due, _ in held)
    changed = [(kind, n) for kind, n in (("held", newly_held - len(tried_again)), ("released", len(released))) if n]
    if changed:
        kinds, numbers = zip(*changed, strict=True)
        await connection.execute(statements.COUNT, [number] * len(kinds), kinds, numbers)
    if held or cursor.retry_ms <= clock.now_ms():
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
    # Not just the answer: it may be older than what was held, and noted, meanwhile.
    cursor.expect_retry(retry_ms)


def _held(record: asyncpg.Record) -> Due:
    hold = envelope.read_hold(record["kind"], record["reason"], record["may_be_delivered"], record["isolated"])
    return envelope.read(record, record["attempts"], hold, record["token"])


def _due_then_arrival(due: Due) -> tuple[int, int]:
    return due.due_ms, due.id
