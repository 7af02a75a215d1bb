"""Restores a segment: its messages become rows again, in one transaction. Import it only once there is a segment,
because of pyarrow (codec.py). A process that changes a segment locks its row (FOR UPDATE). So a cancel by key is exact:
it removes the message from the segment first, or waits for the restore and finds a row."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, Final

import asyncpg
from asyncpg import Connection

from delayer.core.faultpoint import reach
from delayer.core.segment import Broken, Restored, SegmentBroken
from delayer.format.rows import reason_text
from delayer.store import pool
from delayer.store.errors import DAMAGED, REJECTED, WORTH_REPEATING, describe
from delayer.store.lanes.notify import notify
from delayer.store.rows import keys
from delayer.store.rows.counters import add_counts
from delayer.store.segments import codec

PORTION_BYTES: Final = 1 << 20
SMALL_PORTION_BYTES: Final = 256 << 10
"""Bytes that an event loop, or the server, handles at a time during releases."""
PAUSE: Final = 0.002
"""Seconds between portions during releases."""
# Read without the bytes, so that a damaged page under them does not hide which segment it belongs to.
_LOCK: Final = (
    "SELECT id, lane, first_due, messages, format, digest, gone FROM segment"
    " WHERE {} ORDER BY first_due, id LIMIT 1 FOR UPDATE"
)
_LOCK_SOONEST: Final = _LOCK.format("broken_at IS NULL AND first_due <= $1") + " SKIP LOCKED"
_LOCK_ONE: Final = _LOCK.format("id = $1")


async def restore_one(
    connection: Connection, horizon_ms: int, *, portion_bytes: int = PORTION_BYTES, pause: float = 0.0
) -> Restored | Broken | None:
    """Restore the soonest segment that is due by ``horizon_ms`` and not locked, in one transaction; None if none is.

    The rows return to their lane, whose owner is notified, in portions of about ``portion_bytes``, pausing ``pause``
    seconds after each. A thread decodes and encodes. An unreadable segment is marked Broken, and then skipped until an
    operator runs :func:`restore`. Raises the driver's errors; then nothing is committed.
    """
    return await _restore(connection, (_LOCK_SOONEST, horizon_ms), portion_bytes, pause)


async def restore(
    connection: Connection, segment: int, *, portion_bytes: int = PORTION_BYTES, pause: float = 0.0
) -> Restored | Broken | None:
    """Restore the segment of this id, broken or not. It waits for the segment's lock, unlike :func:`restore_one`.
    Returns None if the segment is gone."""
    return await _restore(connection, (_LOCK_ONE, segment), portion_bytes, pause)


async def _restore(
    connection: Connection, which: tuple[str, int], portion_bytes: int, pause: float
) -> Restored | Broken | None:
    async with pool.transaction(connection):
        await connection.execute("SET LOCAL enable_seqscan = off")  # Else few segments would be scanned sequentially.
        segment = await connection.fetchrow(*which)
        if segment is None:
            return None
        reach("restore.locked")
        lane, count, first_ms, broken = segment["lane"], segment["messages"], segment["first_due"], ""
        try:
            table = await live(connection, segment)
            records = _records(table, lane, portion_bytes, pause)
            async with pool.transaction(connection):  # A savepoint, so that the mark stays.
                status = await connection.copy_records_to_table("message", records=records, columns=codec.COPIED)
        except SegmentBroken as error:
            broken = str(error)
        except (*REJECTED, *DAMAGED) as error:
            if isinstance(error, WORTH_REPEATING):
                raise
            broken = f"its messages cannot be written: {describe(error)}"
        if broken:
            await connection.execute(
                "UPDATE segment SET broken_at = statement_timestamp(), broken = $2 WHERE id = $1 AND broken_at IS NULL",
                segment["id"],
                reason_text(broken),
            )
            return Broken(segment["id"], count, first_ms, broken)
        if status != f"COPY {count}":
            raise RuntimeError(f"segment {segment['id']}: expected {count} messages, but {status}")
        reach("restore.copied")
        await connection.execute("DELETE FROM segment WHERE id = $1", segment["id"])
        await keys.leave_segment(connection, segment["id"], table["key"].drop_null().to_pylist())
        await notify(connection, {lane: first_ms}, {})
        await add_counts(connection, Counter({(lane, "restored"): count}))
        reach("restore.deleted")
    reach("restore.committed")
    return Restored(segment["id"], count, first_ms)


async def _records(table: Any, lane: int, portion_bytes: int, pause: float) -> AsyncIterator[tuple[Any, ...]]:
    """Yield rows, in portions encoded by a thread on demand. All at once took as much memory as everything else."""
    portions = codec.records(table, lane, portion_bytes)
    while (portion := await asyncio.to_thread(next, portions, None)) is not None:
        for record in portion:
            yield record
        await asyncio.sleep(pause)


async def live(connection: Connection, segment: asyncpg.Record) -> Any:
    """Decode a row of ``segment`` to a table of codec.SCHEMA sorted by (due_at, id), in a thread, so that a daemon's
    page does not block its releases. Raises SegmentBroken, even if the store cannot read the bytes, and the driver's
    errors."""
    try:
        async with pool.transaction(connection):  # A savepoint confines the damage to the statements inside.
            packed = await connection.fetchval("SELECT packed FROM segment WHERE id = $1", segment["id"])
    except DAMAGED as error:
        raise SegmentBroken(f"the store cannot read its bytes: {describe(error)}") from error
    about = (segment[name] for name in ("format", "messages", "digest", "gone"))
    return await asyncio.to_thread(codec.unpack, packed, *about)
