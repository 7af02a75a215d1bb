"""The parking of what a legacy import brings, with the import's progress, in one transaction a batch.

The rows go into lanes of daemons that are running, told as anything is told that others put there (telling.py): what is
due soon is released on time while the import still runs. Without a daemon they wait in a lane without an owner.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final

import asyncpg

from delayer.core.errors import StoreLost
from delayer.core.importing import Batch, Run
from delayer.store import parking, session, telling
from delayer.store.errors import translated
from delayer.store.partitions import DAY_MS, Days
from delayer.store.segments import Fence

PARTITION_SECONDS: Final = 5.0
"""How long one batch may take to make partitions; what has none then waits in the default one."""
_LANES: Final = """
SELECT l.number, l.epoch, EXISTS (
    SELECT FROM pg_locks AS k
    WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 2
      AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND k.classid = 'lane'::regclass AND k.objid = l.number::int::oid
) AS owned
FROM lane AS l ORDER BY owned DESC, l.number
"""
_NEW_LANE: Final = "INSERT INTO lane (number, epoch, owner) VALUES (1, 0, 'delayer import') ON CONFLICT DO NOTHING"
_COMMIT: Final = (
    "UPDATE import_run SET parked = parked + $2, held = held + $3, progress = $4"
    " WHERE id = $1 AND phase = 'running' AND progress IS NOT DISTINCT FROM $5 RETURNING parked, held"
)


class ImportParking:
    """By the connection of the import. ``days``: the partitions that there are."""

    def __init__(self, connection: asyncpg.Connection, days: Days) -> None:
        self._connection = connection
        self._days = days
        self._turn = 0

    async def transact(self, run: Run, batch: Batch, published: int) -> tuple[int, int]:
        """One transaction. How many were parked and held by now. Raises LaneLost, StoreLost, the driver's errors."""
        parcels = [item.parcel for item in batch.items if not item.problem]
        held = [(item.parcel, item.problem) for item in batch.items if item.problem]
        fence = await self._lane()
        async with session.transaction(self._connection):
            now_ms = await self._connection.fetchval("SELECT statement_timestamp()")
            # Before the counting, which takes a share of the lane's row: others wait for both in this order.
            soonest = min((parcel.due_ms for parcel in parcels), default=0)
            await telling.tell(
                self._connection,
                {fence.number: soonest} if parcels else {},
                {fence.number: max(now_ms, min(parcel.due_ms for parcel, _ in held))} if held else {},
            )
            row = await self._connection.fetchrow(
                _COMMIT, run.id, len(parcels) + published, len(held), batch.progress, run.progress
            )
            if row is None:
                raise StoreLost(f"import {run.id}: somebody else went on with it")
            if any(parcel.key is not None for parcel in parcels):
                await parking.park_keyed(self._connection, fence, parcels, [])
            elif parcels:
                await parking.park_plain(self._connection, fence, parcels)
            if held:
                await parking.hold_new(self._connection, fence, held, now_ms)
        return row["parked"], row["held"]

    async def _lane(self) -> Fence:
        """The next of the lanes that have an owner; else the first one; else a new one."""
        rows = await self._connection.fetch(_LANES)
        if not rows:
            await self._connection.execute(_NEW_LANE)
            rows = await self._connection.fetch(_LANES)
        owned = [row for row in rows if row["owned"]] or rows[:1]
        self._turn += 1
        chosen = owned[self._turn % len(owned)]
        return Fence(chosen["number"], chosen["epoch"])

    async def make_days(self, wanted: Collection[int]) -> None:
        """Partitions for these days, as far as there is time. Raises StoreLost."""
        with translated("make partitions"):
            now_ms = await self._connection.fetchval("SELECT clock_timestamp()")
            until = time.monotonic() + PARTITION_SECONDS
            today = now_ms // DAY_MS
            while (at := time.monotonic()) < until and (missing := self._days.missing(wanted, today, at)):
                await self._days.make(self._connection, missing, today, at, until - at)
