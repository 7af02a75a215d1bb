"""Partitions by due day, created ahead of need and dropped once past and empty. One daemon at a time does the upkeep.

DDL takes strong locks for a moment, but must not stop the traffic. So each step has a short lock timeout, and is left
for next time if it fails. Rows of a day without a partition go to the default one. Claims find them there, but the day
cannot be dropped at once.

Attaching reads the whole default partition under a lock: 0.35 s with 2 M rows. An index on due_at does not help. A
CHECK excluding the day would (2 ms), but until then it would refuse that day's messages. So the default partition is
first read without the lock, to see whether it is small enough, and then under it with a time limit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable
from datetime import date, timedelta
from enum import Enum
from typing import Final

import asyncpg
from asyncpg import Connection

from delayer.core.units import DAY_MS
from delayer.store import pool
from delayer.store.clock import StoreClock
from delayer.store.errors import describe
from delayer.store.schema import CHURN_OPTIONS

log = logging.getLogger(__name__)  # Not structlog, which loads slowly: commands that list load this module.


_PREFIX = "message_p"
_EPOCH = date(1970, 1, 1)
_KNOWN = (
    "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'message'::regclass"
)

DAYS_AHEAD = 7
FARTHEST_DAYS = 400
"""Later days wait in the default partition, because every partition costs every session some memory."""
MOVED_AT_MOST = 30_000
"""Rows that a new partition may take over from the default one, under its lock: 70 k/s of 0.5 KB, 10 k/s of 4 KB."""
READ_SECONDS = 1.0
"""Limit for reading the default partition without the lock: 4 M small rows. If it takes longer, no partition is
created, because attaching reads all rows locked. Messages are parked and released all the same, but VACUUM removes
their rows."""
HELD_SECONDS = 2.0
"""Maximum time to hold the lock, for reading the default partition twice and moving rows out of it."""
MADE_AT_ONCE = 16
"""Maximum number of partitions created by one park. Messages of further days wait in the default partition."""
AGAIN_SECONDS = 900.0
"""Seconds before retrying a partition that cannot be created."""
LOCKED_SECONDS = 60.0
"""Seconds before retrying while another session holds a lock that every day's partition needs."""
PARK_SECONDS = 1.0
MAINTAIN_SECONDS = 10.0
"""Start no further partition after this time, because messages and the daemon's watchdog are waiting."""

_TODAY = "SELECT floor(extract(epoch FROM clock_timestamp() + interval '10 seconds') / 86400)::int"
"""The day of the store's clock when the partition will be created."""
_OWNER = """
SELECT quote_ident(pg_get_userbyid(relowner)) FROM pg_class
WHERE oid = to_regclass($1) AND relowner <> current_user::regrole
"""
_OWNED = "ALTER TABLE {} OWNER TO the role that owns the table message"
LONGEST_LOCK_SECONDS = 0.2
"""Maximum time to lock everything while a partition is rechecked for rows and dropped."""
IDLE: Final = "15s"

_LOCK: Final = "('message'::regclass::oid::int, 2)"
_STAY = "nothing: its messages are released from message_default, and vacuumed away instead of dropped with the day"
_SLOW = "the default partition takes too long to read"
_SHRINK = "if message_default is large for its rows, VACUUM FULL it in a quiet hour; it is released from all the same"


def name_of(day: int, table: str = "message") -> str:
    """The partition of a day: ``message_pYYYYMMDD``."""
    return f"{table}_p{_EPOCH + timedelta(days=day):%Y%m%d}"


def day_of(name: str) -> int | None:
    """The day of a partition's name; None for the default partition and other names."""
    digits = name.removeprefix(_PREFIX)
    if digits == name or len(digits) != len("YYYYMMDD") or not (digits.isascii() and digits.isdigit()):
        return None
    try:
        found = date.fromisoformat(digits)
    except ValueError:
        return None
    return (found - _EPOCH).days


def bounds_of(day: int) -> tuple[str, str]:
    """The first instants of the day and of the next, as the text of SQL literals."""
    first = _EPOCH + timedelta(days=day)
    return f"{first} 00:00:00+00", f"{first + timedelta(days=1)} 00:00:00+00"


async def read_days(connection: Connection) -> set[int]:
    """The days with a partition."""
    return {day for (name,) in await connection.fetch(_KNOWN) if (day := day_of(name)) is not None}


class PartitionResult(Enum):
    DONE = "done"
    NOT_NOW = "not now"
    LOCKED = "locked"
    """Another session holds a lock that every day's partition needs."""
    SLOW = "slow"
    """Reading the default partition takes too long for any day."""


async def make(connection: Connection, day: int, today: int, read_seconds: float = READ_SECONDS) -> PartitionResult:
    """Create the partition of ``day`` if it is missing, or log why not. ``read_seconds``: limit for reading the default
    partition. Raises the driver's errors if they end the connection."""
    try:
        async with pool.transaction(connection):
            # Daemons that need the same day take turns. Waiting here delays no other work.
            await connection.execute("SET LOCAL lock_timeout = '1s'")
            await connection.execute("SELECT pg_advisory_xact_lock('message'::regclass::oid::int, 1)")
            if day in await read_days(connection):
                return PartitionResult.DONE
            # The day may have begun while the caller made several partitions.
            await _attach(connection, day, max(today, await connection.fetchval(_TODAY)), read_seconds)
    except _NotNow as error:
        log.warning("partition not made", extra={"partition": name_of(day), "reason": str(error), "next_step": _STAY})
        return PartitionResult.NOT_NOW
    except asyncpg.QueryCanceledError:
        log.warning("partition not made", extra={"partition": name_of(day), "reason": _SLOW, "next_step": _SHRINK})
        return PartitionResult.SLOW
    except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        if connection.is_closed():
            raise
        log.warning("partition not made", extra={"partition": name_of(day), "reason": describe(error)})
        return PartitionResult.LOCKED if isinstance(error, asyncpg.LockNotAvailableError) else PartitionResult.NOT_NOW
    log.info("partition made", extra={"partition": name_of(day)})
    return PartitionResult.DONE


async def make_ahead(connection: Connection, today: int, days: Days, at: float) -> None:
    """Create the partitions of the coming days and of the days wanted, as many as the locks and MAINTAIN_SECONDS allow.
    Adds the existing partitions to ``days``, and the failures ``at`` (monotonic seconds)."""
    days.learn(await read_days(connection))
    await days.ensure(connection, {*range(today, today + DAYS_AHEAD + 1), *days.wanted}, today, at, MAINTAIN_SECONDS)
    days.wanted.clear()


class _NotNow(Exception):
    """This day's partition cannot be created now."""


async def _attach(connection: Connection, day: int, today: int, read_seconds: float) -> None:
    name, (low, high) = name_of(day), bounds_of(day)
    range_ = f"due_at >= '{low}' AND due_at < '{high}'"
    await connection.execute("SET LOCAL lock_timeout = '500ms'")
    await limit_statements(connection, read_seconds)
    waiting = await _read(connection, range_)
    _check_rows(waiting, day, today)
    # From here on the traffic waits behind us while we wait for the releases in flight.
    await connection.execute(f"CREATE TABLE {name} (LIKE message INCLUDING ALL) WITH ({CHURN_OPTIONS})")
    await hand_over(connection, name, "message")
    # Attaching needs the default partition exclusively, and without any rows of that day.
    await connection.execute("LOCK TABLE ONLY message IN SHARE UPDATE EXCLUSIVE MODE")
    await connection.execute("LOCK TABLE message_default IN ACCESS EXCLUSIVE MODE")
    until = time.monotonic() + HELD_SECONDS
    try:
        await limit_statements(connection, HELD_SECONDS)
        _check_rows(await _move(connection, name, range_), day, today)
        await limit_statements(connection, until - time.monotonic())
        await connection.execute(f"ALTER TABLE message ATTACH PARTITION {name} FOR VALUES FROM ('{low}') TO ('{high}')")
    except asyncpg.QueryCanceledError as error:
        if not waiting:
            raise
        raise _NotNow(f"moving that day's {waiting} rows takes longer than {HELD_SECONDS:g} s") from error


async def hand_over(connection: Connection, name: str, table: str) -> None:
    """Give the new partition ``name`` to the owner of ``table``, the daemons' role, which reads and drops it. An import
    or a bulk restore may run as another role, the owner of the schema."""
    if owner := await connection.fetchval(_OWNER, table):
        await connection.execute(f"ALTER TABLE {name} OWNER TO {owner}")


async def limit_statements(connection: Connection, seconds: float) -> None:
    """Limit each further statement of the transaction to ``seconds``; at least 1 ms, because 0 means forever."""
    await connection.execute(f"SET LOCAL statement_timeout = {max(1, round(seconds * 1000))}")


async def _read(connection: Connection, range_: str) -> int:
    """Count a day's rows in the default partition without a lock, but row by row and serially, like attaching."""
    await connection.execute("SET LOCAL enable_indexonlyscan = off; SET LOCAL max_parallel_workers_per_gather = 0")
    return int(await connection.fetchval(f"SELECT count(*) FILTER (WHERE {range_}) FROM message_default"))


async def _move(connection: Connection, name: str, range_: str) -> int:
    """Move a day's rows out of the default partition. Returns their number."""
    moved = f"WITH moved AS (DELETE FROM message_default WHERE {range_} RETURNING *)"
    status = await connection.execute(f"{moved} INSERT INTO {name} SELECT * FROM moved")
    return int(status.rpartition(" ")[2])


def _check_rows(waiting: int, day: int, today: int) -> None:
    """Raise _NotNow if the default partition's rows of ``day`` cannot be moved."""
    if waiting > MOVED_AT_MOST:
        raise _NotNow(f"the default partition has {waiting} rows of that day, and {MOVED_AT_MOST} can be moved")
    if waiting and day <= today:
        # A release may be reading them now, and would not look for them again in the new partition.
        raise _NotNow("the default partition has rows of that day, and the day has begun")


class Days:
    """The days known to have a partition, so that a park need not query them."""

    def __init__(self, known: Iterable[int]) -> None:
        self.known = set(known)
        """Days since 1970-01-01 that have a partition."""
        self.wanted: set[int] = set()
        """Days of rows that went to the default partition, because their transaction could not wait."""
        self._not_before: dict[int | None, float] = {}  # The next attempt for a day; the key None is for any day.
        self._said = False

    def missing(self, days: Collection[int], today: int, at: float) -> list[int]:
        """The days to create a partition for: unknown, not past, not too far ahead, not just tried in vain. ``at``:
        monotonic seconds, as everywhere here."""
        if at < self._not_before.get(None, at):
            return []
        near = range(today - 1, today + FARTHEST_DAYS + 1)
        return [day for day in sorted(set(days) - self.known) if day in near and at >= self._not_before.get(day, at)]

    def want(self, days: Iterable[int]) -> None:
        """Let the next upkeep create the partitions of these days."""
        self.wanted.update(day for day in days if day not in self.known)

    def learn(self, days: Iterable[int]) -> None:
        """Replace the known days by those of the catalog."""
        self.known = set(days)

    async def ensure(
        self,
        connection: Connection,
        days: Collection[int],
        today: int,
        at: float,
        seconds: float,
        *,
        most: int = MADE_AT_ONCE,
        pause: float = 0.0,
    ) -> None:
        """Create up to ``most`` missing partitions of these days, pausing ``pause`` seconds after each. Stop after
        ``seconds``, or after an obstacle to all days; rows then wait in the default partition. Raises the driver's
        errors."""
        end, missing = time.monotonic() + seconds, self.missing(days, today, at)
        for position, day in enumerate(missing):
            if position == most or time.monotonic() > end:
                if not self._said:  # Once per process.
                    self._said = True
                    left = {"days": len(missing) - position, "reason": "no time for more; the next parks go on"}
                    log.warning("partition not made", extra=left)
                return
            made = await make(connection, day, today)
            if made is PartitionResult.DONE:
                self.known.add(day)
            elif made is PartitionResult.NOT_NOW:
                self._not_before[day] = at + AGAIN_SECONDS
            else:  # A lock_timeout per day would stop parking.
                self._not_before[None] = at + (LOCKED_SECONDS if made is PartitionResult.LOCKED else AGAIN_SECONDS)
                return
            await asyncio.sleep(pause)


async def drop_passed(connection: Connection, today: int) -> list[str]:
    """Drop empty partitions of days before yesterday, up to the first that is locked. Returns their names."""
    passed = [name_of(day) for day in sorted(await read_days(connection)) if day < today - 1]
    dropped = []
    for position, name in enumerate(passed, 1):
        try:
            if await drop_empty(connection, name):
                log.info("partition dropped", extra={"partition": name})
                dropped.append(name)
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError) as error:
            # A dump locks all of them, and each try holds up the traffic for 200 ms.
            log.info(
                "partition not dropped",
                extra={"partition": name, "reason": describe(error), "skipped": len(passed) - position},
            )
            break
        # Created by hand under another role. The rest are ours.
        except asyncpg.InsufficientPrivilegeError as error:
            log.warning(
                "partition not dropped",
                extra={"partition": name, "reason": describe(error), "next_step": _OWNED.format(name)},
            )
    return dropped


async def drop_empty(
    connection: Connection, name: str, lock_ms: int = 200, longest_lock: float = LONGEST_LOCK_SECONDS
) -> bool:
    """Drop the partition ``name`` if it is empty. False if it is not, is gone, or takes longer than ``longest_lock``
    seconds to check. ``lock_ms``: timeout of each lock. Raises LockNotAvailableError and others."""
    try:
        if await connection.fetchval(f"SELECT EXISTS (SELECT FROM {name})"):
            return False
        async with pool.transaction(connection):
            # The traffic waits behind us here, so keep it short, and lock in the traffic's order.
            await connection.execute(f"SET LOCAL lock_timeout = '{lock_ms}ms'")
            await connection.execute("LOCK TABLE ONLY message IN ACCESS EXCLUSIVE MODE")
            await connection.execute(f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE")
            await limit_statements(connection, longest_lock)  # VACUUM may have left many empty pages to check.
            if await connection.fetchval(f"SELECT EXISTS (SELECT FROM {name})"):
                return False
            await connection.execute(f"DROP TABLE {name}")
    except (asyncpg.UndefinedTableError, asyncpg.QueryCanceledError) as error:
        log.info("partition not dropped", extra={"partition": name, "reason": describe(error)})
        return False
    return True


async def run_upkeep(connection: Connection, clock: StoreClock, days: Days) -> None:
    """Run one round, unless another daemon is. Raises the driver's errors."""
    await pool.sample(connection, clock)
    try:
        # The session owns the lock. A process that froze with it would stop everybody's upkeep.
        await connection.execute(f"SET idle_session_timeout = '{IDLE}'")
        if await connection.fetchval(f"SELECT pg_try_advisory_lock{_LOCK}"):
            today = clock.now_upper_ms() // DAY_MS
            await make_ahead(connection, today, days, clock.monotonic())
            await drop_passed(connection, today)
            days.learn(await read_days(connection))
            await connection.execute(f"SELECT pg_advisory_unlock{_LOCK}")
        await connection.execute("RESET idle_session_timeout")
    except BaseException:
        pool.end(connection)  # This drops the lock and the settings as well.
        raise


async def make_missing(
    connection: Connection, wanted: Collection[int], seconds: float, days: Days | None = None, pause: float = 0.0
) -> None:
    """Call :meth:`Days.ensure` for a process that has not parked before. Raises the driver's errors."""
    today = await connection.fetchval("SELECT statement_timestamp()") // DAY_MS
    days = days or Days(await read_days(connection))
    await days.ensure(connection, wanted, today, time.monotonic(), seconds, most=len(wanted), pause=pause)
