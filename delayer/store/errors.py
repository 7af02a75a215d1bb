"""Errors of a store, in addition to the losses that every layer knows, and their translation from the driver's errors.

core.StoreLost        unreachable, or it refused the transaction: try again later
├─ core.LaneLost      the lane has another owner
└─ core.Rejected      the database rejects the data of a write
StoreUnfit            the server or the database cannot hold a store: an operator must act
└─ SchemaUnusable     the schema that store.url leads to is missing, or has objects of these names
SchemaOutdated        the store lacks a schema upgrade, or has an unknown one: an operator must act
BadStoreUrl           the URL cannot be read: an operator must act
ScheduleRefused       an operator's change of schedules cannot be made; nothing is changed
└─ ScheduleUnknown    there is no schedule of this name
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Final

import asyncpg

from delayer.core import errors
from delayer.core.errors import StoreLost

STORE_RUNS = "check store.url, and that Postgres runs"
"""Advice about an unreachable store."""


class NotificationsFull(Exception):
    """A commit failed because the server's queue of notifications is full. pool.py raises it in place of the driver's
    error."""


# Everything that asyncpg raises when server, network or transaction fail. TimeoutError is an OSError.
DRIVER_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, NotificationsFull)

# A well-formed transaction lost against another, and may succeed if repeated. Postgres reports a check violation if a
# day's partition was attached after a row of that day was routed to the default partition.
WORTH_REPEATING = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError, asyncpg.CheckViolationError)

# The database rejects a statement's data by their values, a constraint, a trigger or a limit, and would reject them
# again.
REJECTED = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.TriggeredDataChangeViolationError,
    asyncpg.WithCheckOptionViolationError,
    asyncpg.ProgramLimitExceededError,
    # Any exception of a trigger: P0001 is a plain RAISE EXCEPTION, and 38000 that of PL/Python and PL/Perl.
    asyncpg.PLPGSQLError,
    asyncpg.ExternalRoutineError,
)

# The data in one place are unreadable: a damaged page (XX000 and its kinds), a disk error, a missing file.
DAMAGED = (asyncpg.InternalServerError, asyncpg.PostgresIOError, asyncpg.UndefinedFileError)
DAMAGE_ADVICE = 'see "Damage" in docs/backlog.md: REINDEX makes an index anew, a table comes from a backup'


class StoreUnfit(Exception):
    """The server answers, but it or its database cannot hold a store (servers.py). ``advice``: the next step."""

    def __init__(self, text: str, advice: str) -> None:
        super().__init__(text)
        self.advice = advice


class SchemaUnusable(StoreUnfit):
    """The schema that store.url leads to is missing, or has objects of the same names that are not delayer's."""


class BadStoreUrl(ValueError):
    """The store's URL is invalid. Never contains the URL, which may include a password."""


class ScheduleRefused(Exception):
    """A change that cannot be made. ``problems``: each says what was expected, what was found, and the next step."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class ScheduleUnknown(ScheduleRefused):
    def __init__(self, name: str) -> None:
        self.reason = f"name: expected a schedule of this store, found {name!r}"
        super().__init__([f"{self.reason}; see `delayer schedule list`"])


class SchemaOutdated(Exception):
    """The store's schema is not the one this program works with."""

    def __init__(self, found: str | None, expected: str, *, newer: bool = False) -> None:
        self.found = found
        self.expected = expected
        self.newer = newer
        self.advice = "use that version of delayer, or a newer one" if newer else "run `delayer db upgrade`"
        why = "it was upgraded by a newer delayer: " if newer else ""
        super().__init__(f"the store's schema is {found or 'missing'}, expected {expected}: {why}{self.advice}")


_ADVICE: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str], ...] = (
    (DAMAGED, DAMAGE_ADVICE),
    # The first class includes wrong passwords, missing roles, and hosts that pg_hba.conf does not list.
    (
        asyncpg.InvalidAuthorizationSpecificationError,
        "check user and password in store.url; over its socket, Debian's Postgres lets in the role that is named like "
        "the operating system's user",
    ),
    (
        asyncpg.InsufficientPrivilegeError,
        "if the daemon has its own role (docs/security.md), run this as the owner of the store (delayer_owner "
        "there), or grant the role what that page lists for it; if one role does everything, make it the owner of "
        "the database, as Postgres's superuser: ALTER DATABASE … OWNER TO …",
    ),
    (
        asyncpg.TooManyConnectionsError,
        "Postgres has no connection left: stop other clients, or raise max_connections, or the CONNECTION LIMIT "
        "of the database or role, if the reason names that. The daemons need 2 for each "
        "ordinary lane, and each daemon 4 more, and 3 if a route has max_rate: one daemon with 4 lanes needs 15",
    ),
    (
        (asyncpg.QueryCanceledError, asyncpg.LockNotAvailableError),
        "another session may hold a lock: SELECT pid, pg_blocking_pids(pid), query FROM pg_stat_activity WHERE "
        "cardinality(pg_blocking_pids(pid)) > 0 names it; end it by pg_terminate_backend(pid)",
    ),
    (
        asyncpg.OutOfMemoryError,
        "if it says out of shared memory, the lock table is full: ALTER SYSTEM SET max_locks_per_transaction = 256, or "
        "more for many lanes (docs/operations.md), and restart Postgres",
    ),
    (
        NotificationsFull,
        "the server's queue of notifications is full (SELECT pg_notification_queue_usage()), because a session that "
        "listens does not end its transaction: SELECT pid, datname, usename, xact_start FROM pg_stat_activity WHERE "
        "xact_start IS NOT NULL ORDER BY xact_start names the oldest first, of all databases; end it by "
        "pg_terminate_backend(pid)",
    ),
    (
        asyncpg.InvalidCatalogNameError,
        "create it, as Postgres's superuser: createdb -O ROLE DATABASE; or name another one in store.url",
    ),
)


def driver_error(error: BaseException) -> BaseException | None:
    """The driver's error that SQLAlchemy wrapped in ``error``; None without one."""
    driver: BaseException | None = error
    while driver is not None and not isinstance(driver, DRIVER_ERRORS):
        driver = driver.__cause__
    return driver


def to_store_lost(doing: str, error: BaseException) -> StoreLost:
    """Translate a driver's error, with advice for its cause. Raise the result from ``error``."""
    driver = driver_error(error)
    told = describe(driver or error)
    advice = next((text for kind, text in _ADVICE if isinstance(driver, kind)), "")
    advice = advice or errors.certificate_advice(told, *errors.OF_STORE)
    return StoreLost(f"{doing}: {told}", advice, conflict=isinstance(driver, WORTH_REPEATING))


def plain_reason(error: object) -> str:
    """A hold reason that every database can store, instead of the reason that the database rejected."""
    return f"the database rejected the data of this hold (SQLSTATE {getattr(error, 'sqlstate', 'unknown')})"


_ENDED: Final = "another operation (2) is in progress"
"""What the driver says if it has read the server's last words, and nothing was asked: its state 2 ends a session."""


def describe(error: BaseException) -> str:
    """The first line of a driver's error, without details that may quote data. Other errors are preceded by their
    class."""
    text = errors.ERRNO.sub("", str(error).strip().split("\n", 1)[0])
    if isinstance(error, asyncpg.InternalClientError) and _ENDED in text:
        return "the server has ended this session: it was silent for too long, or an operator ended it"
    if text and isinstance(error, DRIVER_ERRORS):
        return text
    name = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
    return f"{name}: {text}" if text else name


@contextmanager
def translate_errors(doing: str) -> Iterator[None]:
    """Turn a driver's error into StoreLost, with the cause chained. ``doing`` names the operation."""
    try:
        yield
    except DRIVER_ERRORS as error:
        raise to_store_lost(doing, error) from error


def check_arrow() -> None:
    """Raise StoreLost unless pyarrow, which unpacks segments, is installed."""
    if find_spec("pyarrow") is None:
        advice = "install delayer[segments] in this environment (docs/install.md), and restart the daemon"
        raise StoreLost("its segments need the Python package pyarrow, which is not installed here", advice)
