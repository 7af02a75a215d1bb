"""Connections to Postgres: opening them, their settings, and the codec of instants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from decimal import Decimal
from typing import Any, Final, TypeVar

import asyncpg
from asyncpg import Connection

from delayer.core.errors import Rejected, StoreLost
from delayer.store import hosts
from delayer.store.clock import StoreClock
from delayer.store.errors import (
    DRIVER_ERRORS,
    REJECTED,
    WORTH_REPEATING,
    BadStoreUrl,
    NotificationsFull,
    describe,
    to_store_lost,
)

T = TypeVar("T")
NOTIFYING = "PreCommit_Notify"
"""The function of Postgres that fails a commit because the queue of notifications is full."""
CONNECT_SECONDS = 10.0
STATEMENT_SECONDS = 30.0
# The server times out first, with a reason. Our timeout only catches a server that does not answer at all.
COMMAND_SECONDS = STATEMENT_SECONDS + 5.0
ATTEMPTS: Final = 3
"""Maximum number of attempts of a write that loses against another transaction."""
TURN_SECONDS: Final = 0.01

INDEX_ONLY: Final = dict.fromkeys(("enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "enable_mergejoin"), "off")
"""Settings that make every plan a range of an index, even with wrong statistics of a partition that was just filled."""

GIVEN_UP = (asyncio.CancelledError, TimeoutError)
"""The caller no longer waits for the server's answer, to the statement or to its cancellation."""

POSTGRES_EPOCH_US = 946_684_800_000_000  # 2000-01-01, where Postgres's instants start, in microseconds after 1970.
_FOREVER_US = (1 << 63) - 1
BEGINNING_MS = -(1 << 62)
"""Before every instant: ``-infinity`` in Postgres."""


def _to_wire(due_ms: int | Decimal) -> tuple[int]:
    if due_ms == BEGINNING_MS:
        return (-_FOREVER_US - 1,)
    return (int(due_ms * 1000) - POSTGRES_EPOCH_US,)


def _from_wire(wire: tuple[int]) -> int:
    if wire[0] == -_FOREVER_US - 1:
        return BEGINNING_MS
    return (wire[0] + POSTGRES_EPOCH_US) // 1000


def _settings(more: Mapping[str, str] | None) -> str:
    """The statements that set a session's settings, overriding those of server, database and role. They run after the
    connection is open, because PgBouncer rejects connections that open with unknown settings."""
    settings = {
        "timezone": "UTC",
        "jit": "off",  # Compilation costs more than any of our statements.
        "statement_timeout": f"{STATEMENT_SECONDS:.0f}s",
        "synchronous_commit": "on",  # Promise G1 needs it.
        # The fences and the cancels read rows that were just committed.
        "default_transaction_isolation": "read committed",
        "default_transaction_read_only": "off",
        "plan_cache_mode": "force_custom_plan",  # A generic plan does not prune partitions.
        # If a cable is cut, the server ends the session, and with it the locks.
        "tcp_keepalives_idle": "5",
        "tcp_keepalives_interval": "2",
        "tcp_keepalives_count": "3",
        # Likewise if the server sends to a client that no longer reads, frozen or gone. Neither keepalives nor any of
        # the server's timeouts apply then: a lane was kept for a quarter of an hour.
        "tcp_user_timeout": "10s",
        **(more or {}),
    }
    return "; ".join(f"SET {name} = '{value}'" for name, value in settings.items())


async def connect(
    url: str, application: str, more: Mapping[str, str] | None = None, *, plain: bool = False
) -> Connection:
    """Open one connection whose instants are epoch milliseconds. ``plain``: with asyncpg's own types instead, and for
    statements that may take long. Raises StoreLost, BadStoreUrl."""
    limit, more = (None, {"statement_timeout": "0", **(more or {})}) if plain else (COMMAND_SECONDS, more)
    with translate_connect_errors():
        connection = await hosts.connect(
            url, timeout=CONNECT_SECONDS, command_timeout=limit, server_settings={"application_name": application}
        )
        try:
            await connection.execute(_settings(more))
            if not plain:
                await prepare(connection)
        except BaseException:
            connection.terminate()
            raise
        return connection


@contextmanager
def translate_connect_errors() -> Iterator[None]:
    """Turn the errors of opening a connection into StoreLost, BadStoreUrl."""
    unread = "store.url cannot be read: expected postgresql://user@host:port/database"
    try:
        yield
    except asyncpg.ClientConfigurationError:
        raise BadStoreUrl(unread) from None
    except DRIVER_ERRORS as error:
        raise to_store_lost("connect", error) from error
    except ValueError:
        # The parser's message quotes what it could not read, perhaps a piece of the password.
        raise BadStoreUrl(unread) from None


FILES: Final = "see that the files are there that store.url names (sslrootcert, sslcert, sslkey), or correct it"


@contextmanager
def translate_reconnect_errors() -> Iterator[None]:
    """Turn these errors into StoreLost. The configuration's check has read the URL, so a file that it names is missing
    at this moment, or half written."""
    try:
        with translate_connect_errors():
            yield
    except BadStoreUrl as bad:
        raise StoreLost(str(bad), FILES) from bad


RESTART: Final = "restart the daemon if its store has moved there; otherwise correct the file in store.url_file"


class SameServer:
    """Checks that all connections of a process reach one server, because ``store.url_file`` may change. Otherwise
    messages would enter one store while lanes release from another."""

    def __init__(self) -> None:
        self._identifier: int | None = None

    async def check(self, connection: Connection) -> None:
        """Close a connection to another server than the first connection's. Raises StoreLost, and the driver's
        errors."""
        found = None
        try:
            found = await connection.fetchval("SELECT system_identifier FROM pg_control_system()")
        finally:
            self._identifier = self._identifier or found
            if found is None or found != self._identifier:
                end(connection)
        if found != self._identifier:
            raise StoreLost("store.url points to another server than at the start", RESTART)


async def open_pool(
    url: Callable[[], str], application: str, size: int, more: Mapping[str, str], server: SameServer
) -> asyncpg.Pool:
    """A pool of up to ``size`` connections, each to the ``url`` of its time. Raises StoreLost."""

    async def connect(*_: object, **how: Any) -> Connection:
        with translate_reconnect_errors():
            return await hosts.connect(url(), **how)

    async def prepared(connection: Connection) -> None:
        await server.check(connection)
        await connection.execute(_settings(more))
        await prepare(connection)

    with translate_connect_errors():
        return await asyncpg.create_pool(
            connect=connect,
            min_size=1,
            max_size=size,
            timeout=CONNECT_SECONDS,
            command_timeout=COMMAND_SECONDS,
            init=prepared,
            reset=_nothing,  # Our transactions leave nothing behind, and the default costs a round trip per park.
            server_settings={"application_name": application},
        )


@asynccontextmanager
async def borrow(pool: asyncpg.Pool) -> AsyncIterator[Connection]:
    """A connection of the pool, cut if the caller is cancelled or a statement times out. Else the pool would wait for
    the server to confirm the cancellation, which let a hanging server block a daemon's stop. It is also cut if its
    transaction is still open. Raises the driver's errors."""
    async with pool.acquire() as connection:
        try:
            yield connection
        except BaseException as error:
            with suppress(asyncpg.InterfaceError):  # It has already left the pool.
                if isinstance(error, GIVEN_UP) or connection.is_in_transaction():  # Its rollback failed, too.
                    connection.terminate()
            raise


@asynccontextmanager
async def transaction(connection: Connection) -> AsyncIterator[None]:
    """A transaction, or in an open one a savepoint. It waits for no rollback after a cancellation: see :func:`borrow`.
    Raises like :func:`commit`."""
    is_inner = connection.is_in_transaction()
    try:
        await connection.execute("SAVEPOINT inner_one" if is_inner else "BEGIN")
    except GIVEN_UP:
        end(connection)
        raise
    try:
        yield
    except GIVEN_UP:
        end(connection)
        raise
    except BaseException:
        if not connection.is_closed():  # Otherwise this error would hide the one that closed it.
            await connection.execute("ROLLBACK TO inner_one; RELEASE inner_one" if is_inner else "ROLLBACK")
        raise
    if is_inner:
        await connection.execute("RELEASE inner_one")
    else:
        await commit(connection)


async def commit(connection: Connection) -> None:
    """Commit the open transaction. Raises StoreLost if the server rolls it back instead, because one of its statements
    failed; NotificationsFull, and the driver's errors."""
    try:
        status = await connection.execute("COMMIT")
    except asyncpg.ProgramLimitExceededError as error:
        if error.server_source_function != NOTIFYING:
            raise  # A deferred trigger wrote data over a limit.
        # Even when the session that held up the queue has ended, Postgres frees it only if its usage is queried.
        await connection.execute("SELECT pg_notification_queue_usage()")
        raise NotificationsFull(str(error)) from error
    if status != "COMMIT":
        raise StoreLost(f"the store answered COMMIT with {status}")


async def retry_conflicts(work: Callable[[], Awaitable[T]], attempts: int = 20) -> T:
    """Repeat ``work``, which is one transaction, if it loses against another: a release, or a park that replaces
    several keys. Raises what ``work`` raises."""
    for _ in range(attempts - 1):
        with suppress(*WORTH_REPEATING):
            return await work()
    return await work()


async def in_savepoint(connection: Connection, write: Callable[[], Awaitable[T]]) -> T:
    """Run ``write`` in the open transaction. If the database rejects its data, undo it. Repeat it if a partition was
    attached at the same time. Raises Rejected, and the driver's other errors; after these the transaction
    cannot continue."""
    attempt = 0
    while True:
        attempt += 1
        await connection.execute("SAVEPOINT write")
        try:
            result = await write()
        except (Rejected, *REJECTED) as error:
            await connection.execute("ROLLBACK TO write; RELEASE write")
            if isinstance(error, Rejected):
                raise
            if attempt == ATTEMPTS or not isinstance(error, WORTH_REPEATING):
                raise Rejected(describe(error)) from error
        else:
            await connection.execute("RELEASE write")
            return result


async def in_turns(connection: Connection, values: Iterable[T]) -> AsyncIterator[T]:
    """Yield ``values``, whose use computes for long. Query the server now and then, so that it does not end the open
    transaction as idle, and other tasks take turns. Raises the driver's errors."""
    began = time.monotonic()
    for value in values:
        if time.monotonic() - began > TURN_SECONDS:
            await connection.fetchval("SELECT 1")
            began = time.monotonic()
        yield value


def end(connection: Connection) -> None:
    """Cut the connection, unless it has already left its pool."""
    with suppress(asyncpg.InterfaceError):
        connection.terminate()


async def prepare(connection: Connection) -> None:
    """Convert ``timestamptz`` to epoch milliseconds, the unit used everywhere here. Reading rounds down, so a row to
    which SQL gave microseconds is never behind a watermark taken from it."""
    await connection.set_type_codec(
        "timestamptz", schema="pg_catalog", encoder=_to_wire, decoder=_from_wire, format="tuple"
    )


async def sample(connection: Connection, clock: StoreClock, timeout: float | None = None) -> None:
    """Query the server's time. Raises the driver's errors."""
    before = clock.monotonic()
    server_ms = await connection.fetchval(
        "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::float8", timeout=timeout
    )
    clock.observe(before, server_ms, clock.monotonic())


async def close(connection: Connection) -> None:
    """Close gracefully, so that the locks are released on return; abort if that fails. Never raises."""
    try:
        await connection.close(timeout=2.0)
    except DRIVER_ERRORS:
        connection.terminate()
    except asyncio.CancelledError:
        connection.terminate()
        raise


async def _nothing(connection: Connection) -> None:
    """Reset nothing."""
