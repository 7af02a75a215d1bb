"""What a release writes before it commits: held rows, keys, and the counters last."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from delayer.core.hold import Hold
from delayer.core.message import Due
from delayer.store import envelope, statements
from delayer.store.keys import forget_released
from delayer.store.retry import pause_ms


async def write(
    connection: asyncpg.Connection,
    lane: int,
    released: Sequence[Due],
    held: Sequence[tuple[Due, Hold]],
    now_ms: int,
) -> None:
    """Settle a claim of ``lane`` in its open transaction. The rows that waited are deleted already; those that were
    held before (``attempts`` is not 0) still stand in held. Raises the driver's errors."""
    tried_again = [due.id for due in released if due.attempts]
    if tried_again:
        await connection.execute("DELETE FROM held WHERE id = ANY($1)", tried_again)
    if held:
        await _hold(connection, lane, held, now_ms)
    await forget_released(connection, released)
    newly_held = sum(not due.attempts for due, _ in held)
    changed = [(kind, n) for kind, n in (("held", newly_held - len(tried_again)), ("released", len(released))) if n]
    if changed:
        kinds, numbers = zip(*changed, strict=True)
        await connection.execute(statements.COUNT, [lane] * len(kinds), kinds, numbers)


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
