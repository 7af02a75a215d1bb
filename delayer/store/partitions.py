"""Partitions by due day: made ahead of need, dropped when passed and empty. Days are UTC, numbered from 1970.

Nothing here may stop the traffic. DDL takes strong locks for a moment, so each step has a short lock timeout and is
left for the next time if it does not get them; rows whose day has no partition go to the default one, where claims find
them as well, only without the comfort of dropping a whole day.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable
from datetime import UTC, date, datetime, timedelta
from enum import Enum

import asyncpg
import structlog

from delayer.store import session
from delayer.store.errors import describe
from delayer.store.schema import CHURN_OPTIONS

log = structlog.get_logger()

DAY_MS = 86_400_000
DAYS_AHEAD = 7
FARTHEST_DAYS = 400
"""Days later than this wait in the default partition: every partition costs every session some memory."""
MOVED_AT_MOST = 10_000
"""Rows that making a partition may take over from the default one, under a lock that keeps the others out of it."""
TRY_AGAIN_SECONDS = 60.0
MADE_BY_A_PARK = 16
"""Partitions that one park makes before it goes on; messages of further days wait in the default one."""
PARK_SECONDS = 1.0
MAINTAIN_SECONDS = 10.0
"""After these no further partition is begun: the messages at hand, and the daemon's watchdog, are waiting for it."""

_PREFIX = "message_p"
_EPOCH = date(1970, 1, 1)
_KNOWN = (
    "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'message'::regclass"
)


def name_of(day: int) -> str:
    """The partition of a day: ``message_pYYYYMMDD``."""
    return f"{_PREFIX}{_EPOCH + timedelta(days=day):%Y%m%d}"


def day_of(name: str) -> int | None:
    """The day of a partition's name; None for the default one, and for what is not ours."""
    if not name.startswith(_PREFIX):
        return None
    try:
        found = datetime.strptime(name.removeprefix(_PREFIX), "%Y%m%d").replace(tzinfo=UTC).date()
    except ValueError:
        return None
    return (found - _EPOCH).days


def bounds_of(day: int) -> tuple[str, str]:
    """First instant of the day and of the next, as SQL literals' text."""
    first = _EPOCH + timedelta(days=day)
    return f"{first} 00:00:00+00", f"{first + timedelta(days=1)} 00:00:00+00"


async def existing(connection: asyncpg.Connection) -> set[int]:
    """The days that have a partition."""
    return {day for (name,) in await connection.fetch(_KNOWN) if (day := day_of(name)) is not None}


class Making(Enum):
    """What became of the attempt to make a partition."""

    DONE = "done"
    NOT_NOW = "not now"
    LOCKED = "locked"
    """Somebody holds a lock that every day's partition needs."""


async def make(connection: asyncpg.Connection, day: int, today: int) -> Making:
    """Make the partition of ``day`` if it is missing. Why it could not be made is logged.

    Raises the driver's errors if they end the connection.
    """
    try:
        async with session.transaction(connection):
            # Daemons that need the same day take turns, and nobody waits behind one that waits for its turn.
            await connection.execute("SET LOCAL lock_timeout = '1s'")
            await connection.execute("SELECT pg_advisory_xact_lock('message'::regclass::oid::int, 1)")
            if day in await existing(connection):
                return Making.DONE
            # From here on the traffic waits behind us while we wait for the releases that are under way.
            await connection.execute("SET LOCAL lock_timeout = '500ms'")
            await _attach(connection, day, today)
    except _NotNow as reason:
        log.warning("partition not made", partition=name_of(day), reason=str(reason))
        return Making.NOT_NOW
    except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        if connection.is_closed():
            raise
        log.warning("partition not made", partition=name_of(day), reason=describe(error))
        return Making.LOCKED if isinstance(error, asyncpg.LockNotAvailableError) else Making.NOT_NOW
    log.info("partition made", partition=name_of(day))
    return Making.DONE


async def make_ahead(connection: asyncpg.Connection, today: int) -> None:
    """Make the partitions of the coming days, as many as the locks and MAINTAIN_SECONDS allow."""
    end = time.monotonic() + MAINTAIN_SECONDS
    for day in range(today, today + DAYS_AHEAD + 1):
        if time.monotonic() > end or await make(connection, day, today) is Making.LOCKED:
            return


class _NotNow(Exception):
    """The partition cannot be made at present."""


async def _attach(connection: asyncpg.Connection, day: int, today: int) -> None:
    name, (first, end) = name_of(day), bounds_of(day)
    await connection.execute(f"CREATE TABLE {name} (LIKE message INCLUDING ALL) WITH ({CHURN_OPTIONS})")
    # Attaching wants the default partition for itself, and all of its rows of that day to be gone.
    await connection.execute("LOCK TABLE ONLY message IN SHARE UPDATE EXCLUSIVE MODE")
    await connection.execute("LOCK TABLE message_default IN ACCESS EXCLUSIVE MODE")
    range_ = f"due_at >= '{first}' AND due_at < '{end}'"
    waiting = await connection.fetchval(
        f"SELECT count(*) FROM (SELECT FROM message_default WHERE {range_} LIMIT {MOVED_AT_MOST + 1}) AS counted"
    )
    if waiting > MOVED_AT_MOST:
        raise _NotNow(f"the default partition has more than {MOVED_AT_MOST} rows of that day")
    if waiting and day <= today:
        # A release may be reading them now, and would not look for them again where they are moved to.
        raise _NotNow("the default partition has rows of that day, and the day has begun")
    if waiting:
        await connection.execute(
            f"WITH moved AS (DELETE FROM message_default WHERE {range_} RETURNING *)"
            f" INSERT INTO {name} SELECT * FROM moved"
        )
    await connection.execute(f"ALTER TABLE message ATTACH PARTITION {name} FOR VALUES FROM ('{first}') TO ('{end}')")


async def drop_passed(connection: asyncpg.Connection, today: int) -> list[str]:
    """Drop the empty partitions of days before yesterday, but not locked ones. Returns their names."""
    dropped = []
    for day in sorted(await existing(connection)):
        if day < today - 1 and await _drop(connection, name_of(day)):
            dropped.append(name_of(day))
    return dropped


async def _drop(connection: asyncpg.Connection, name: str) -> bool:
    if await connection.fetchval(f"SELECT EXISTS (SELECT FROM {name})"):
        return False
    try:
        async with session.transaction(connection):
            # The traffic waits behind us while we wait for it, so not for long; and in its own order of locking.
            await connection.execute("SET LOCAL lock_timeout = '200ms'")
            await connection.execute("LOCK TABLE ONLY message IN ACCESS EXCLUSIVE MODE")
            await connection.execute(f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE")
            if await connection.fetchval(f"SELECT EXISTS (SELECT FROM {name})"):
                return False
            await connection.execute(f"DROP TABLE {name}")
    except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError, asyncpg.UndefinedTableError) as error:
        log.info("partition not dropped", partition=name, reason=describe(error))
        return False
    log.info("partition dropped", partition=name)
    return True


class Days:
    """Which days have a partition, as far as this process knows, so that a park need not ask."""

    def __init__(self, known: Iterable[int]) -> None:
        self._known = set(known)
        self._not_before: dict[int, float] = {}  # a day that could not be made, and when to try again
        self._locked_until = -math.inf

    def missing(self, days: Collection[int], today: int, at: float) -> list[int]:
        """The days to make a partition for: not known, not passed, not too far, and not just tried in vain."""
        if at < self._locked_until:
            return []
        return [
            day
            for day in sorted(set(days) - self._known)
            if today - 1 <= day <= today + FARTHEST_DAYS and self._not_before.get(day, at) <= at
        ]

    def learn(self, days: Iterable[int]) -> None:
        """What the catalog says is there."""
        self._known = set(days)

    async def ensure(self, pool: asyncpg.Pool, days: Collection[int], today: int, at: float) -> None:
        """Make what is missing, in about PARK_SECONDS. Never fails for a partition that cannot be made.

        Raises the driver's errors.
        """
        missing = self.missing(days, today, at)[:MADE_BY_A_PARK]
        if not missing:
            return
        end = time.monotonic() + PARK_SECONDS
        async with session.borrowed(pool) as connection:
            for day in missing:
                if time.monotonic() > end:
                    return
                made = await make(connection, day, today)
                if made is Making.DONE:
                    self._known.add(day)
                    self._not_before.pop(day, None)
                elif made is Making.LOCKED:
                    # The same lock stands in every day's way, and a lock_timeout for each would stop the parking.
                    self._locked_until = at + TRY_AGAIN_SECONDS
                    return
                else:
                    self._not_before[day] = at + TRY_AGAIN_SECONDS
