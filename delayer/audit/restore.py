"""`delayer restore`: turn segments back into rows, in bulk, without waiting for the daemons to do it. A few sessions
restore segments into the lanes they came from, and notify the lanes' owners."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from asyncpg import Connection

from delayer.audit.tasks import SESSION, turn
from delayer.core.readable import Say
from delayer.core.segment import Broken, Restored
from delayer.core.units import DAY_MS
from delayer.store import pool
from delayer.store.admin.traffic import Traffic
from delayer.store.errors import DAMAGED, DRIVER_ERRORS, check_arrow, describe
from delayer.store.rows.partitions import make_missing
from delayer.store.segments import catalog
from delayer.store.segments.catalog import SegmentEntry
from delayer.store.session import read_connection

SESSIONS: Final = 4
"""Concurrent sessions. Each has one segment in memory, about 30 MB."""


class RestorePlan(NamedTuple):
    """The segments to restore, soonest first. ``now_ms``: the store's clock, epoch milliseconds."""

    now_ms: int
    segments: Sequence[SegmentEntry]

    @property
    def messages(self) -> int:
        return sum(one.messages for one in self.segments)


@dataclass(slots=True)
class RestoreResult:
    """``gone``: segments that others restored or emptied first. ``lost``, ``broken``: a reason for each segment."""

    messages: int = 0
    segments: int = 0
    gone: int = 0
    seconds: float = 0.0
    lost: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


async def plan(url: str, within_ms: int | None) -> RestorePlan:
    """Plan to restore segments due within ``within_ms`` (None: all). Raises StoreLost, BadStoreUrl, SchemaOutdated."""
    async with read_connection(url, "plan", "delayer restore plan") as connection:
        now_ms = await connection.fetchval("SELECT statement_timestamp()")
        before_ms = catalog.FOREVER_MS if within_ms is None else now_ms + within_ms
        return RestorePlan(now_ms, await catalog.list_segments(connection, before_ms))


async def run(url: str, planned: RestorePlan, say: Say) -> RestoreResult:
    """Restore the ``planned`` segments, one per transaction, until done or the store is lost. ``say`` gets the progress
    in segments. Raises StoreLost, even without pyarrow."""
    if planned.segments:
        check_arrow()
    began, done, waiting = time.monotonic(), RestoreResult(), iter(planned.segments)
    asyncio.get_running_loop().set_exception_handler(_hear)

    async def work() -> None:
        async with read_connection(url, "restore", "delayer restore", SESSION) as connection:
            traffic = Traffic()
            for entry in waiting:
                await restore_segment(connection, traffic, entry, done)
                if done.lost:  # The other segments stay, and the report counts them.
                    done.lost += [done.lost[0] for _ in waiting]
                say("restoring", done.segments + done.gone + len(done.broken), len(planned.segments))

    await asyncio.gather(*(work() for _ in range(min(SESSIONS, len(planned.segments)))))
    done.seconds = time.monotonic() - began
    return done


def _hear(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Drop the errors of futures that the driver abandons when a stop cuts its sessions."""
    if not isinstance(context.get("exception"), DRIVER_ERRORS):
        loop.default_exception_handler(context)


async def restore_segment(connection: Connection, traffic: Traffic, entry: SegmentEntry, done: RestoreResult) -> None:
    """Restore a segment, and add the result to ``done``. Retries a transaction that lost a conflict."""
    try:
        found = await pool.retry_conflicts(partial(_restored, connection, traffic, entry))
    except DAMAGED as error:  # A damaged segment does not stop the rest.
        done.broken.append(f"segment {entry.id}: the store cannot read it, or write its rows: {describe(error)}")
    except DRIVER_ERRORS as error:
        done.lost.append(describe(error))
    else:
        match found:
            case None:
                done.gone += 1
            case Broken():
                done.broken.append(f"segment {entry.id}: {found.reason}")
            case Restored():
                done.segments += 1
                done.messages += found.messages


async def _restored(connection: Connection, traffic: Traffic, entry: SegmentEntry) -> Restored | Broken | None:
    """Restore a segment. Under load, work in small portions with pauses, unless the segment is due soon."""
    from delayer.store.segments import restore  # noqa: PLC0415 - pyarrow

    # This machine's clock is exact enough here.
    soon = entry.first_due_ms < time.time() * 1000 + 600_000
    async with turn(connection, traffic, hurried=soon) as beside_traffic:
        days = range(entry.first_due_ms // DAY_MS, entry.last_due_ms // DAY_MS + 1)
        # Pause, because each new partition stops traffic for as long as a release takes.
        await make_missing(connection, days, 20.0, pause=0.1)
        if not beside_traffic:
            return await restore.restore(connection, entry.id)
        return await restore.restore(connection, entry.id, portion_bytes=restore.SMALL_PORTION_BYTES, pause=0.005)
