"""The statements of one claim, and what it took. The transaction that begins here is ended by lane.py."""

from __future__ import annotations

from dataclasses import dataclass, field

import asyncpg

from delayer.core.message import Due
from delayer.store import envelope, session, statements
from delayer.store.clock import StoreClock

LONGEST_SLEEP = 60.0
HORIZON_MS = 61_000  # what can be due before somebody sleeps for LONGEST_SLEEP and wakes


@dataclass(slots=True)
class Claim:
    """What an open release transaction took."""

    watermark_after: int = session.BEGINNING_MS
    full: bool = False
    rows: list[Due] = field(default_factory=list)
    passed_over_ms: int = session.BEGINNING_MS
    """Held rows whose retry was due by this instant were asked for, and not one was to be had: they are locked."""
    size: int = 0
    """Of ``rows`` as they were claimed; the caller may take the list apart."""


async def take(
    connection: asyncpg.Connection,
    clock: StoreClock,
    number: int,
    *,
    watermark: int,
    limit: int,
    max_bytes: int,
    with_held: bool,
) -> Claim:
    """Begin a transaction and take what is due in lane ``number``; held rows last, and a tenth of ``limit`` at most.

    Raises the driver's errors, and RuntimeError if a transaction is open already.
    """
    upper = clock.now_ms()
    before = clock.lower_ms()  # before the statements are sent, so not after the instants that they judge by
    retries = max(1, limit // 10) if with_held else 0
    if connection.is_in_transaction():
        raise RuntimeError(f"lane {number}: a transaction is open that no claim began")
    await connection.execute("BEGIN")
    records = await connection.fetch(
        statements.CLAIM, number, watermark, upper + HORIZON_MS, limit - retries, max_bytes
    )
    rows = sorted(map(envelope.read, records), key=_due_then_arrival)
    taken = sum(len(due.parcel.body) + len(due.parcel.properties) for due in rows)
    claim = Claim(watermark_after=before, full=len(rows) >= limit - retries or taken >= max_bytes, rows=rows)
    if claim.full:
        claim.watermark_after = rows[-1].due_ms if rows else watermark
    if retries and (taken < max_bytes or not rows):
        held = await connection.fetch(statements.CLAIM_HELD, number, retries, max(max_bytes - taken, 1))
        rows += [envelope.read(record, record["attempts"]) for record in held]
        if not held:
            claim.passed_over_ms = before
    claim.size = len(rows)
    return claim


def _due_then_arrival(due: Due) -> tuple[int, int]:
    return due.due_ms, due.id
