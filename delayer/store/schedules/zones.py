"""Keeps the waiting occurrences of schedules in step with the host's zone data.

The store remembers the newest version of the data by which they were computed. A daemon whose host has a newer one
computes them again; one with older data leaves them, so that two hosts with different data do not undo each other's
work for ever. A schedule that failed for lack of its zone goes on once the data have it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import asyncpg
import structlog
from asyncpg import Connection

from delayer.schedule.record import revise
from delayer.schedule.wall import forget_zones
from delayer.schedule.zone_data import UNKNOWN, zone_data, zone_directories
from delayer.store import pool
from delayer.store.schedules import changes, reading, table
from delayer.store.schedules.occurrences import AT_ONCE

log = structlog.get_logger(__name__)

PAGE: Final = 512
_LOCK: Final = "('schedule'::regclass::oid::int, 1)"
_IN_ZONES: Final = f"""
SELECT {table.COLUMNS}, statement_timestamp() AS now FROM schedule
WHERE name > $1 AND zone <> 'UTC' AND state IN ('active', 'failed') ORDER BY name LIMIT {PAGE}
"""


class ZoneWatch:
    """The zone data of this process. ``directories``: where Python looks for zones."""

    def __init__(self, directories: Callable[[], Iterable[Path]] = zone_directories) -> None:
        self._directories = directories
        self._loaded = ""

    async def run_upkeep(self, connections: asyncpg.Pool) -> str:
        """Compute the next occurrences again if this host's zone data are newer than the store's, or have caught up,
        unless another daemon does. Returns the version of this host. Raises StoreLost, the driver's errors."""
        data = zone_data(self._directories())
        version, before = UNKNOWN if data is None else data.version, self._loaded
        if version != before:
            forget_zones()
            self._loaded = version
        if version == UNKNOWN:
            return version
        async with pool.borrow(connections) as connection:
            known = await reading.zone_version(connection)
            caught_up = version == known and before not in ("", version)  # It has computed some by older data since.
            if (version <= known and not caught_up) or not await connection.fetchval(
                f"SELECT pg_try_advisory_lock{_LOCK}"
            ):
                return version
            try:
                renewed = await _renew(connection)
                await connection.execute("UPDATE store SET zone_version = $1", version)
                await connection.execute(f"SELECT pg_advisory_unlock{_LOCK}")
            except BaseException:
                pool.end(connection)  # This frees the lock as well.
                raise
        if renewed:
            log.info("zone data changed", version=version, before=known, schedules=renewed)
        return version


async def _renew(connection: Connection) -> int:
    """Renew the schedules whose next occurrence is another by the zone data now. Returns their number."""
    renewed, after = 0, ""
    while rows := await connection.fetch(_IN_ZONES, after):
        names = []
        for number, row in enumerate(rows):
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
            record = table.record_of(row)
            now = revise(record, record.schedule, row["now"]).record
            if (now.waiting_ms, now.schedule.state) != (record.waiting_ms, record.schedule.state):
                names.append(record.name)
        if names:
            await changes.renew(connection, names)
        renewed, after = renewed + len(names), rows[-1]["name"]
    return renewed
