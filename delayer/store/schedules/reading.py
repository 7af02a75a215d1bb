"""Schedules as commands and the page show them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final, NamedTuple

from asyncpg import Connection

from delayer.schedule.record import ScheduleRecord
from delayer.schedule.schedule import ScheduleState
from delayer.store import statements
from delayer.store.schedules import table

_PAGE: Final = f"SELECT {table.COLUMNS} FROM schedule WHERE name > $1 ORDER BY name LIMIT $2"
_PAGE_IN_STATE: Final = f"SELECT {table.COLUMNS} FROM schedule WHERE name > $1 AND state = $3 ORDER BY name LIMIT $2"
_COUNTS: Final = (
    "SELECT state, count(*), sum(made)::bigint, sum(missed)::bigint, max(late_ms) FROM schedule GROUP BY state"
)
# The name of a presence ends with version and owner (locks.py); the server cuts a long one.
RENEWING: Final = "~"
"""Separates two versions while a daemon computes all next occurrences again: the previous one and the daemon's. If the
daemon dies, the previous version remains. A process with older data than the daemon removes this mark, and the daemon
then notices that it has not finished."""
_ZONE_VERSIONS: Final = f"""
SELECT split_part(application_name, ' ', 3), array_agg(split_part(application_name, ' ', 4) ORDER BY application_name)
FROM ({statements.DAEMONS}) AS a
WHERE application_name LIKE 'delayer presence _%'
GROUP BY 1 ORDER BY 1
"""


class SchedulePage(NamedTuple):
    """Schedules in the order of their names. ``after``: the name after which the next page begins; None at the end."""

    schedules: Sequence[ScheduleRecord]
    after: str | None


async def find(connection: Connection, limit: int, after: str = "", state: ScheduleState | None = None) -> SchedulePage:
    """The next ``limit`` schedules, of this state if one is given. Raises the driver's errors."""
    if state is None:
        rows = await connection.fetch(_PAGE, after, limit + 1)
    else:
        rows = await connection.fetch(_PAGE_IN_STATE, after, limit + 1, state)
    found = [table.record_of(row) for row in rows[:limit]]
    return SchedulePage(found, found[-1].name if len(rows) > limit else None)


async def pages(connection: Connection) -> AsyncIterator[Sequence[ScheduleRecord]]:
    """All schedules, page by page. Raises the driver's errors."""
    after: str | None = ""
    while after is not None:
        page = await find(connection, 500, after)
        yield page.schedules
        after = page.after


async def get(connection: Connection, name: str) -> ScheduleRecord | None:
    """The schedule of this name. Raises the driver's errors."""
    return (await table.read(connection, [name])).get(name)


class ScheduleCounts(NamedTuple):
    """The counts of schedules by state, and of occurrences sent and missed; and the maximum lateness of their last
    occurrences, None if none was sent."""

    states: Mapping[ScheduleState, int]
    made: int
    missed: int
    late_ms: int | None


async def count(connection: Connection) -> ScheduleCounts:
    """Count the schedules. Reads all of them. Raises the driver's errors."""
    rows = await connection.fetch(_COUNTS)
    states = dict.fromkeys(ScheduleState, 0) | {ScheduleState(state): number for state, number, *_ in rows}
    late = max((row["max"] for row in rows if row["max"] is not None), default=None)
    return ScheduleCounts(states, sum(row[2] for row in rows), sum(row[3] for row in rows), late)


async def zone_versions(connection: Connection) -> Mapping[str, Sequence[str]]:
    """The live daemons by the version of their zone data, each by its owner's name (PostgresStore.connect). Raises the
    driver's errors."""
    rows = await connection.fetch(_ZONE_VERSIONS)
    return dict(rows)


async def zone_version(connection: Connection) -> str:
    """The oldest version of the zone data by which a waiting occurrence may have been computed. "": none was yet, or
    it may be any, because an import brought one. Raises the driver's errors."""
    found: str = await connection.fetchval("SELECT split_part(zone_version, $1, 1) FROM store", RENEWING)
    return found
