"""The segments of a store: their list, and their restore. segments/codec.py packs and unpacks them, and
admin/actions.py cancels their messages.

A process that changes a segment locks its row (FOR UPDATE). So a cancel is exact against a restore.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import import_module
from typing import Any, Final, NamedTuple

import asyncpg

from delayer.core.faultpoint import reach
from delayer.core.segment import Broken, Locked, Restoration, Restored
from delayer.store import pool, statements
from delayer.store import pool as session
from delayer.store.errors import DAMAGED, describe
from delayer.store.lanes.notify import notify
from delayer.store.rows.days import DAY_MS
from delayer.store.rows.envelope import reason_text

FOREVER_MS = 1 << 50
"""Behind every due instant, as a bound: the year 37,648."""
PORTION_BYTES = 1 << 20
SMALL_PORTION_BYTES = 256 << 10
"""Bytes that an event loop, or the server, handles at once beside releases."""
# Without its bytes: a damaged page under them must not hide whose they are.
_LOCK = (
    "SELECT id, lane, first_due, messages, format, digest FROM segment"
    " WHERE {} ORDER BY first_due, id LIMIT 1 FOR UPDATE"
)
# Few segments would be read from the first to the last.
_BY_INDEX = "SET LOCAL enable_seqscan = off"
_LOCK_SOONEST = _LOCK.format("broken_at IS NULL AND first_due <= $1") + " SKIP LOCKED"
_LOCK_ONE = _LOCK.format("id = $1")


class Listed(NamedTuple):
    """A segment as it stands. Instants are epoch milliseconds, rounded down."""

    id: int
    lane: int
    first_due_ms: int
    last_due_ms: int
    messages: int
    raw_bytes: int
    packed_bytes: int
    made_ms: int
    broken: str | None


class Counted(NamedTuple):
    """All segments together. ``next_due_ms`` is the first due instant of those that are not broken."""

    segments: int
    messages: int
    """In broken segments too."""
    broken: int
    broken_messages: int
    next_due_ms: int | None


async def count(connection: asyncpg.Connection) -> Counted:
    """Count them: cheap, no segment is read. Raises the driver's errors."""
    return Counted(*await connection.fetchrow(statements.COUNT_SEGMENTS))


async def listed(
    connection: asyncpg.Connection, before_ms: int | None = None, limit: int | None = None
) -> list[Listed]:
    """The segments whose first message is due before ``before_ms``, the soonest first. Raises the driver's errors."""
    before_ms = FOREVER_MS if before_ms is None else before_ms
    return [Listed(*row) for row in await connection.fetch(statements.LIST_SEGMENTS, before_ms, limit)]


async def restore_one(
    connection: asyncpg.Connection,
    horizon_ms: int,
    *,
    portion_bytes: int = PORTION_BYTES,
    pause: float = 0.0,
) -> Restored | Broken | None:
    """Restore the soonest segment that is due by ``horizon_ms`` and not locked, in one transaction.

    The rows go back into their lane, in portions of about ``portion_bytes`` with ``pause`` seconds after each. A thread
    decodes and encodes. The owner of the lane is notified.

    None: there is no such segment. Broken: it did not read back, and was marked. Then others come first, until an
    operator runs :func:`restore`. Raises the driver's errors; then nothing is committed.
    """
    return await _restore(connection, (_LOCK_SOONEST, horizon_ms), portion_bytes, pause)


async def restore(
    connection: asyncpg.Connection,
    segment: int,
    *,
    portion_bytes: int = PORTION_BYTES,
    pause: float = 0.0,
) -> Restored | Broken | None:
    """Restore the segment of this id, as :func:`restore_one` does; a broken one is tried again, and
    loses its mark with that. Another session that has it locked is waited for. None: it is gone."""
    return await _restore(connection, (_LOCK_ONE, segment), portion_bytes, pause)


async def _restore(
    connection: asyncpg.Connection, which: tuple[str, int], portion_bytes: int, pause: float
) -> Restored | Broken | None:
    from delayer.store.segments.codec import SegmentBroken  # noqa: PLC0415 - pyarrow, without segments a daemon never loads it

    async with pool.transaction(connection):
        await connection.execute(_BY_INDEX)
        segment = await connection.fetchrow(*which)
        if segment is None:
            return None
        reach("restore.locked")
        count, broken = segment["messages"], ""
        try:
            table = await live(connection, segment)
            async with pool.transaction(connection):  # A savepoint: without the mark it would be tried for ever.
                status = await write_rows(connection, table, segment["lane"], portion_bytes, pause)
        except SegmentBroken as error:
            broken = error.reason
        except (asyncpg.UniqueViolationError, *DAMAGED) as error:
            broken = f"its messages cannot be written: {describe(error)}"
        if broken:
            await mark_broken(connection, segment["id"], broken)
            return Broken(segment["id"], count, segment["first_due"], broken)
        if status != f"COPY {count}":
            raise RuntimeError(f"segment {segment['id']}: expected {count} messages, but {status}")
        reach("restore.copied")
        await connection.execute("DELETE FROM segment WHERE id = $1", segment["id"])
        await notify(connection, {segment["lane"]: segment["first_due"]}, {})
        await connection.execute(statements.COUNT, [segment["lane"]], ["restored"], [count])
        reach("restore.deleted")
    reach("restore.committed")
    return Restored(segment["id"], count, segment["first_due"])


async def write_rows(
    connection: asyncpg.Connection, table: Any, lane: int, portion_bytes: int = PORTION_BYTES, pause: float = 0.0
) -> str:
    """Rows of ``message`` from a table of codec.SCHEMA, in the open transaction. The server's answer. Raises the
    driver's errors."""
    from delayer.store.segments.codec import COPIED  # noqa: PLC0415 - pyarrow

    records = _records(table, lane, portion_bytes, pause)
    status: str = await connection.copy_records_to_table("message", records=records, columns=COPIED)
    return status


async def _records(table: Any, lane: int, portion_bytes: int, pause: float) -> AsyncIterator[tuple[Any, ...]]:
    """A thread makes a portion of rows when it is wanted: all of them at once took as much memory as everything
    else."""
    from delayer.store.segments import codec  # noqa: PLC0415 - pyarrow

    portions = codec.records(table, lane, portion_bytes)
    while (portion := await asyncio.to_thread(next, portions, None)) is not None:
        for record in portion:
            yield record
        await asyncio.sleep(pause)


async def mark_broken(connection: asyncpg.Connection, segment: int, reason: str) -> None:
    """Write down that a segment did not read back, unless that is known. Raises the driver's errors."""
    await connection.execute(
        "UPDATE segment SET broken_at = statement_timestamp(), broken = $2 WHERE id = $1 AND broken_at IS NULL",
        segment,
        reason_text(reason),
    )


_READ = "SELECT id, messages, format, digest FROM segment WHERE id = $1"


async def read(connection: asyncpg.Connection, segment: int) -> Any | None:
    """The messages of a segment (see :func:`live`), for lists; None if it is gone. Raises SegmentBroken, and the
    driver's errors."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        row = await connection.fetchrow(_READ, segment)
        return None if row is None else await live(connection, row)


async def live(connection: asyncpg.Connection, segment: asyncpg.Record) -> Any:
    """The messages of a row of ``segment``, as a table of codec.SCHEMA sorted by (due_at, id). A thread decodes them,
    because the daemon of the page releases messages meanwhile.

    Raises SegmentBroken, also if the store itself cannot read the bytes, and the driver's errors.
    """
    from delayer.store.segments import codec  # noqa: PLC0415 - pyarrow

    try:
        async with pool.transaction(connection):  # A savepoint: the damage ends only the statements inside.
            packed = await connection.fetchval("SELECT packed FROM segment WHERE id = $1", segment["id"])
    except DAMAGED as error:
        raise codec.SegmentBroken(f"the store cannot read its bytes: {describe(error)}") from error
    return await asyncio.to_thread(codec.unpack, packed, segment["format"], segment["messages"], segment["digest"])


PAUSE: Final = 0.002
"""Seconds between two portions."""


EnsureDays = Callable[[set[int]], Awaitable[None]]


async def restore_soonest(pool: asyncpg.Pool, horizon_ms: int, ensure_days: EnsureDays) -> Restoration:
    """Restore the soonest segment, if it begins by ``horizon_ms``, with partitions for its days.

    Raises the driver's errors, and what ``ensure_days`` raises.
    """
    async with session.borrowed(pool) as connection:
        soonest = await connection.fetchrow(statements.NEXT_SEGMENT, horizon_ms)
    if soonest is None:
        return None
    # If another process restores this one, the call restores the next: then rows may go to the default partition.
    first_ms, last_ms = soonest
    # The first time it takes half a second, and would be the event loop's.
    await asyncio.to_thread(import_module, "delayer.store.segments.codec")
    # Days that are passed, or too far, have none in any case.
    await ensure_days(set(range(first_ms // DAY_MS, last_ms // DAY_MS + 1)))
    async with session.borrowed(pool) as connection:
        restored = await restore_one(connection, horizon_ms, portion_bytes=SMALL_PORTION_BYTES, pause=PAUSE)
    return restored or Locked(first_ms)
