"""What one claim of a lane asks for, by what is foreseen of its rows, and what it says of those that are held."""

from __future__ import annotations

import asyncpg

from delayer.core.pace import Scope
from delayer.store import claiming, statements
from delayer.store.claiming import Claim
from delayer.store.clock import StoreClock
from delayer.store.foresight import Foresight
from delayer.store.retries import NEVER_MS, Turn


async def take(
    connection: asyncpg.Connection,
    clock: StoreClock,
    number: int,
    known: Foresight,
    *,
    limit: int,
    max_bytes: int,
    scope: Scope | None,
) -> Claim:
    """See ports.Lane. Raises the driver's errors."""
    turn = known.retries.turn(scope, limit, clock.now_ms())
    if turn is Turn.SHARE:
        limit = known.retries.limit(scope, limit)
    if scope is not None:
        claim = await claiming.take_scoped(
            connection,
            clock,
            number,
            scope=scope,
            place=known.marks.claims(scope),
            held_place=known.held.claims(scope),
            limit=limit,
            max_bytes=max_bytes,
            turn=turn,
        )
    else:
        claim = await claiming.take(
            connection,
            clock,
            number,
            watermark=known.watermark,
            limit=limit,
            max_bytes=max_bytes,
            turn=turn,
        )
    known.retries.crowded(scope, claim.crowded)
    return claim


async def look_at_retries(
    connection: asyncpg.Connection, clock: StoreClock, number: int, known: Foresight, claim: Claim
) -> None:
    """When a held row is tried again next, as ``claim`` leaves them. Raises the driver's errors."""
    soonest, known.retries.soonest_ms = known.retries.soonest_ms, NEVER_MS
    try:
        retry_ms = await connection.fetchval(statements.NEXT_RETRY, number)
    except BaseException:
        known.expect_retry(soonest)
        raise
    if retry_ms is None:
        return
    if retry_ms <= claim.passed_over_ms:
        known.retries.in_vain(claim.scope, clock.now_ms())
    # Not just the answer: it may be older than what was held, and noted, while we asked.
    known.expect_retry(retry_ms)
