"""Keeps the waiting occurrences of schedules in step with the host's zone data.

The store remembers the oldest version of the data by which one of them may have been computed. A daemon or a command
whose host has older data lowers it to its own, and an import to "". A daemon whose host has newer data computes all
waiting occurrences twice: at once, and again after the last daemon with older data has left. In between it does
nothing, because the two hosts would keep overwriting each other's results. The older version stays in the store until
the work is done and these daemons have left, so another daemon does it if this one dies. A schedule that failed for
lack of its zone continues once the data have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import asyncpg
import structlog
from asyncpg import Connection

from delayer.core.errors import StoreLost
from delayer.schedule.record import revise
from delayer.schedule.wall import forget_zones
from delayer.schedule.zone_data import UNKNOWN, zone_data, zone_directories
from delayer.store import pool
from delayer.store.schedules import changes, reading, table
from delayer.store.schedules.occurrences import NEXT_STEP

log = structlog.get_logger(__name__)

# The version is marked while a daemon works. Its last statement finds the mark only if nobody has lowered the version.
_RENEWING: Final = (
    "UPDATE store SET zone_version = split_part(zone_version, $1, 1) || $1 || $2::text RETURNING zone_version"
)
_RENEWED: Final = "UPDATE store SET zone_version = $1 WHERE zone_version = $2"
PAGE: Final = 64
"""How many schedules are read at once, and renewed in one transaction."""
_LOCK: Final = "SELECT pg_try_advisory_lock('schedule'::regclass::oid::int, 1)"
_IN_ZONES: Final = f"""
SELECT {table.COLUMNS}, statement_timestamp() AS now FROM schedule
WHERE name > $1 AND zone <> 'UTC' AND state IN ('active', 'failed') ORDER BY name LIMIT {PAGE}
"""


class ZoneWatch:
    """The zone data of this process. ``directories``: where Python looks for zones."""

    def __init__(self, directories: Callable[[], Iterable[Path]] = zone_directories) -> None:
        self.loaded = ""
        """The version by which this process computes times now; "" before the first round."""
        self._directories = directories
        self._renewed = ""

    async def run_upkeep(self, connections: asyncpg.Pool, owner: str) -> None:
        """Compute the next occurrences again if this host's zone data are newer than those by which they may have been
        computed, unless another daemon does. ``owner``: the name of this daemon's presence. Raises StoreLost, the
        driver's errors."""
        data = zone_data(self._directories())
        version = UNKNOWN if data is None else data.version
        async with pool.borrow(connections) as connection:
            oldest = min(version, self.loaded or version)  # This process used the data of before until now.
            await changes.lower_zone_version(connection, oldest)
            if version != self.loaded:
                forget_zones()
                self.loaded = version
            before = await reading.zone_version(connection)
            if version == UNKNOWN or version <= before:
                return
            if version == self._renewed and await _oldest_alive(connection, version, owner) < version:
                return  # The daemon with older data would lower the version again.
            await connection.execute("SET idle_session_timeout = '10s'")  # A daemon that hangs loses the lock.
            try:
                if not await connection.fetchval(_LOCK) or version <= await reading.zone_version(connection):
                    return
                mark = await connection.fetchval(_RENEWING, reading.RENEWING, version)
                renewed = await _renew(connection)
                # A live daemon with older data may write more by these, and die before it lowers the version.
                await connection.execute(_RENEWED, await _oldest_alive(connection, version, owner), mark)
            finally:
                pool.end(connection)  # This frees the lock, and ends the setting.
        self._renewed = version
        if renewed:
            log.info("zone data changed", version=version, before=before, schedules=renewed)


async def _oldest_alive(connection: Connection, version: str, owner: str) -> str:
    """The oldest zone data by which a live daemon computes times: ``version`` is that of ``owner``, whose presence may
    still have the one before."""
    others = await reading.zone_versions(connection)
    return min([version, *(one for one, names in others.items() if {*names} - {owner})])


async def _renew(connection: Connection) -> int:
    """Compute all schedules in zones, and write those whose next occurrence differs by the zone data of now. Returns
    their number. Raises StoreLost at the end if one could not be computed, so that the next upkeep tries again."""
    renewed, after, failed = 0, "", 0
    while rows := await connection.fetch(_IN_ZONES, after):
        names = []
        async for row in pool.in_turns(connection, rows):
            record = table.record_of(row)
            try:
                now = revise(record, record.schedule, row["now"]).record
            except Exception:
                log.exception("schedule not computed", schedule=record.name, next_step=NEXT_STEP)
                failed += 1
                continue
            if (now.waiting_ms, now.state) != (record.waiting_ms, record.state):
                names.append(record.name)
        if names:
            await changes.renew(connection, names)
        renewed, after = renewed + len(names), rows[-1]["name"]
    if failed:
        raise StoreLost(f"renew schedules: {failed} could not be computed", NEXT_STEP)
    return renewed
