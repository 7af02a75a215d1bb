"""Partitions by due day: made ahead of need, and dropped when passed and empty. One daemon at a time does the upkeep.

No step may stop the traffic. DDL takes strong locks for a moment. So each step has a short lock timeout, and is left
for the next time if it does not get its locks. Rows of a day without a partition go to the default one. Claims find
them there as well, but the whole day cannot be dropped at once.

Attaching reads the whole default partition under a lock: 0.35 s with 2 M rows. An index on due_at does not help. A
CHECK that excludes the day would (2 ms), but it would refuse that day's messages until the attaching. So the reading is
tried without the lock first, and is bounded under it.
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

log = logging.getLogger(__name__)  # Not structlog: commands that list load this module, and structlog takes time.


_PREFIX = "message_p"
_EPOCH = date(1970, 1, 1)
_KNOWN = (
    "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'message'::regclass"
)

DAYS_AHEAD = 7
FARTHEST_DAYS = 400
"""Days later than this wait in the default partition: every partition costs every session some memory."""
MOVED_AT_MOST = 30_000
"""Rows that making a partition may take over from the default one, under its lock: 70 k/s of 0.5 KB, 10 k/s of 4 KB."""
READ_SECONDS = 1.0
"""Seconds for reading the default partition without the lock: 4 M small rows. If it takes longer, no partition is made,
because attaching one reads all rows under the lock. Messages are parked and released all the same, and their rows are
vacuumed away instead of dropped."""
HELD_SECONDS = 2.0
"""How long the lock is held at most, for reading the default partition twice and moving rows out of it."""
MADE_AT_ONCE = 16
"""Partitions that one park makes before it goes on; messages of further days wait in the default one."""
AGAIN_SECONDS = 900.0
"""Seconds before a partition that cannot be made is tried again."""
LOCKED_SECONDS = 60.0
"""The same while another session holds a lock that every day's partition needs."""
PARK_SECONDS = 1.0
MAINTAIN_SECONDS = 10.0
"""After these no further partition is begun: the messages at hand, and the daemon's watchdog, are waiting for it."""

_TODAY = "SELECT floor(extract(epoch FROM clock_timestamp() + interval '10 seconds') / 86400)::int"
"""The day of the store's clock when the partition will be made."""
_OWNER = """
SELECT quote_ident(pg_get_userbyid(relowner)) FROM pg_class
WHERE oid = to_regclass($1) AND relowner <> current_user::regrole
"""
_OWNED = "ALTER TABLE {} OWNER TO the role that owns the table message"
LONGEST_LOCK_SECONDS = 0.2
"""How long everything is locked while a partition is looked through once more, whether it is empty, and dropped."""
IDLE: Final = "15s"

_LOCK: Final = "('message'::regclass::oid::int, 2)"
_STAY = "nothing: its messages are released from message_default, and vacuumed away instead of dropped with the day"
_SLOW = "the default partition takes too long to read"
_SHRINK = "if message_default is large for its rows, VACUUM FULL it in a quiet hour; it is released from all the same"


def name_of(day: int, table: str = "message") -> str:
    """The partition of a day: ``message_pYYYYMMDD``."""
    return f"{table}_p{_EPOCH + timedelta(days=day):%Y%m%d}"


def day_of(name: str) -> int | None:
    """The day of a partition's name; None for the default one, and for other names."""
    digits = name.removeprefix(_PREFIX)
    if digits == name or len(digits) != len("YYYYMMDD") or not (digits.isascii() and digits.isdigit()):
        return None
    try:
        found = date.fromisoformat(digits)
    except ValueError:
        return None
    return (found - _EPOCH).days


def bounds_of(day: int) -> tuple[str, str]:
    """First instant of the day and of the next, as SQL literals' text."""
    first = _EPOCH + timedelta(days=day)
    return f"{first} 00:00:00+00", f"{first + timedelta(days=1)} 00:00:00+00"


async def existing(connection: Connection) -> set[int]:
    """The days that have a partition."""
    return {day for (name,) in await connection.fetch(_KNOWN) if (day := day_of(name)) is not None}


class PartitionResult(Enum):
    """The result of an attempt to make a partition."""

    DONE = "done"
    NOT_NOW = "not now"
    LOCKED = "locked"
    """Another session holds a lock that every day's partition needs."""
    SLOW = "slow"
    """The default partition takes too long to read for any day."""


async def make(connection: Connection, day: int, today: int, read_seconds: float = READ_SECONDS) -> PartitionResult:
    """Make the partition of ``day`` if it is missing. Why it could not be made is logged. ``read_seconds``: the most
    for reading the default partition. Raises the driver's errors if they end the connection."""
    try:
        async with pool.transaction(connection):
            # Daemons that need the same day take turns. None waits behind another that waits for its turn.
            await connection.execute("SET LOCAL lock_timeout = '1s'")
            await connection.execute("SELECT pg_advisory_xact_lock('message'::regclass::oid::int, 1)")
            if day in await existing(connection):
                return PartitionResult.DONE
            # A caller that made several may have begun the day before.
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
    """Make the partitions of the coming days, as many as the locks and MAINTAIN_SECONDS allow.

    ``days`` learns the existing ones, and remembers failures ``at`` (monotonic seconds).
    """
    days.learn(await existing(connection))
    await days.ensure(connection, range(today, today + DAYS_AHEAD + 1), today, at, MAINTAIN_SECONDS)


class _NotNow(Exception):
    """This day's partition cannot be made at present."""


async def _attach(connection: Connection, day: int, today: int, read_seconds: float) -> None:
    name, (low, high) = name_of(day), bounds_of(day)
    range_ = f"due_at >= '{low}' AND due_at < '{high}'"
    await connection.execute("SET LOCAL lock_timeout = '500ms'")
    await bound(connection, read_seconds)
    waiting = await _read(connection, range_)
    _check_rows(waiting, day, today)
    # From here on the traffic waits behind us while we wait for the releases that are under way.
    await connection.execute(f"CREATE TABLE {name} (LIKE message INCLUDING ALL) WITH ({CHURN_OPTIONS})")
    await hand_over(connection, name, "message")
    # Attaching wants the default partition for itself, and all of its rows of that day to be gone.
    await connection.execute("LOCK TABLE ONLY message IN SHARE UPDATE EXCLUSIVE MODE")
    await connection.execute("LOCK TABLE message_default IN ACCESS EXCLUSIVE MODE")
    until = time.monotonic() + HELD_SECONDS
    try:
        await bound(connection, HELD_SECONDS)
        _check_rows(await _move(connection, name, range_), day, today)
        await bound(connection, until - time.monotonic())
        await connection.execute(f"ALTER TABLE message ATTACH PARTITION {name} FOR VALUES FROM ('{low}') TO ('{high}')")
    except asyncpg.QueryCanceledError as error:
        if not waiting:
            raise
        raise _NotNow(f"moving that day's {waiting} rows takes longer than {HELD_SECONDS:g} s") from error


async def hand_over(connection: Connection, name: str, table: str) -> None:
    """Give the new partition ``name`` to the owner of ``table``: the role of the daemons, which read and drop it. An
    import or a bulk restore may run under another role, the one that owns the schema."""
    if owner := await connection.fetchval(_OWNER, table):
        await connection.execute(f"ALTER TABLE {name} OWNER TO {owner}")


async def bound(connection: Connection, seconds: float) -> None:
    """Let the server cancel each of the transaction's further statements after ``seconds``. 0 would mean never."""
    await connection.execute(f"SET LOCAL statement_timeout = {max(1, round(seconds * 1000))}")


async def _read(connection: Connection, range_: str) -> int:
    """Count the default partition's rows of a day: without a lock, but row by row and alone, as attaching reads it."""
    await connection.execute("SET LOCAL enable_indexonlyscan = off; SET LOCAL max_parallel_workers_per_gather = 0")
    return int(await connection.fetchval(f"SELECT count(*) FILTER (WHERE {range_}) FROM message_default"))


async def _move(connection: Connection, name: str, range_: str) -> int:
    """Move a day's rows out of the default partition. Returns how many."""
    moved = f"WITH moved AS (DELETE FROM message_default WHERE {range_} RETURNING *)"
    status = await connection.execute(f"{moved} INSERT INTO {name} SELECT * FROM moved")
    return int(status.rpartition(" ")[2])


def _check_rows(waiting: int, day: int, today: int) -> None:
    """Raise _NotNow if the default partition's rows of ``day`` cannot be moved."""
    if waiting > MOVED_AT_MOST:
        raise _NotNow(f"the default partition has {waiting} rows of that day, and {MOVED_AT_MOST} can be moved")
    if waiting and day <= today:
        # A release may be reading them now, and would not look for them again where they are moved to.
        raise _NotNow("the default partition has rows of that day, and the day has begun")


class Days:
    """The days that have a partition, as far as this process knows, so that a park need not ask."""

    def __init__(self, known: Iterable[int]) -> None:
        self.known = set(known)
        """Days since 1970-01-01 that have a partition."""
        self._not_before: dict[int | None, float] = {}  # The next attempt for a day; None: for any day.
        self._said = False

    def missing(self, days: Collection[int], today: int, at: float) -> list[int]:
        """The days to make a partition for: not known, not passed, not too far, and not just tried in vain. ``at``:
        monotonic seconds, as everywhere here."""
        if at < self._not_before.get(None, at):
            return []
        near = range(today - 1, today + FARTHEST_DAYS + 1)
        return [day for day in sorted(set(days) - self.known) if day in near and at >= self._not_before.get(day, at)]

    def learn(self, days: Iterable[int]) -> None:
        """Learn the days of the catalog."""
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
        """Make ``most`` missing partitions of these days, with ``pause`` seconds after each. Begin none after
        ``seconds``, nor behind what stands in every day's way. A row of a day without a partition waits in the default
        one. Raises the driver's errors."""
        end, missing = time.monotonic() + seconds, self.missing(days, today, at)
        for position, day in enumerate(missing):
            if position == most or time.monotonic() > end:
                if not self._said:  # Once for each process.
                    self._said = True
                    left = {"days": len(missing) - position, "reason": "no time for more; the next parks go on"}
                    log.warning("partition not made", extra=left)
                return
            made = await make(connection, day, today)
            if made is PartitionResult.DONE:
                self.known.add(day)
            elif made is PartitionResult.NOT_NOW:
                self._not_before[day] = at + AGAIN_SECONDS
            else:  # A lock_timeout for each day would stop the parking.
                self._not_before[None] = at + (LOCKED_SECONDS if made is PartitionResult.LOCKED else AGAIN_SECONDS)
                return
            await asyncio.sleep(pause)


async def drop_passed(connection: Connection, today: int) -> list[str]:
    """Drop the empty partitions of days before yesterday, up to the first locked one. Returns their names."""
    passed = [name_of(day) for day in sorted(await existing(connection)) if day < today - 1]
    dropped = []
    for position, name in enumerate(passed, 1):
        try:
            if await drop_empty(connection, name):
                log.info("partition dropped", extra={"partition": name})
                dropped.append(name)
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError) as error:
            # A dump locks all of them, and each try keeps the traffic waiting for 200 ms.
            log.info(
                "partition not dropped",
                extra={"partition": name, "reason": describe(error), "skipped": len(passed) - position},
            )
            break
        # It was made by hand under another role; the others are ours.
        except asyncpg.InsufficientPrivilegeError as error:
            log.warning(
                "partition not dropped",
                extra={"partition": name, "reason": describe(error), "next_step": _OWNED.format(name)},
            )
    return dropped


async def drop_empty(
    connection: Connection, name: str, lock_ms: int = 200, longest_lock: float = LONGEST_LOCK_SECONDS
) -> bool:
    """Drop the partition ``name`` if it is empty; False if it is not, or is gone, or if it takes longer than
    ``longest_lock`` seconds to see. ``lock_ms``: the wait for each lock. Raises LockNotAvailableError, and others."""
    try:
        if await connection.fetchval(f"SELECT EXISTS (SELECT FROM {name})"):
            return False
        async with pool.transaction(connection):
            # The traffic waits behind us while we wait for it, so not for long; and in its own order of locking.
            await connection.execute(f"SET LOCAL lock_timeout = '{lock_ms}ms'")
            await connection.execute("LOCK TABLE ONLY message IN ACCESS EXCLUSIVE MODE")
            await connection.execute(f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE")
            await bound(connection, longest_lock)  # It has many empty pages, which VACUUM did not cut off.
            if await connection.fetchval(f"SELECT EXISTS (SELECT FROM {name})"):
                return False
            await connection.execute(f"DROP TABLE {name}")
    except (asyncpg.UndefinedTableError, asyncpg.QueryCanceledError) as error:
        log.info("partition not dropped", extra={"partition": name, "reason": describe(error)})
        return False
    return True


async def keep_up(connection: Connection, clock: StoreClock, days: Days) -> None:
    """One round, unless another daemon is at it. Raises the driver's errors."""
    await pool.sample(connection, clock)
    try:
        # The lock belongs to the session. A process that froze with it would stop the upkeep of all others.
        await connection.execute(f"SET idle_session_timeout = '{IDLE}'")
        if await connection.fetchval(f"SELECT pg_try_advisory_lock{_LOCK}"):
            today = clock.now_upper_ms() // DAY_MS
            await make_ahead(connection, today, days, clock.monotonic())
            await drop_passed(connection, today)
            days.learn(await existing(connection))
            await connection.execute(f"SELECT pg_advisory_unlock{_LOCK}")
        await connection.execute("RESET idle_session_timeout")
    except BaseException:
        pool.end(connection)  # This ends the lock and the settings, too.
        raise
