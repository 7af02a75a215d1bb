"""An executor's connection to the store: on the snapshot, streaming Arrow batches, its errors translated.

It uses the driver below its dbapi. The dbapi imports pandas, which takes most of a second in every Python process that
Spark starts, and Spark starts several for each table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode

import adbc_driver_manager as adbc
import adbc_driver_postgresql
import pyarrow as pa

from delayer.core import errors
from delayer.core.errors import StoreLost
from delayer.core.secret import SecretUrl, mask

# Parameters of both drivers. asyncpg sets unknown ones in the session, and so does libpq by "options".
_SHARED: Final = (
    "host port user password passfile dbname service servicefile connect_timeout client_encoding options"
    " application_name fallback_application_name keepalives keepalives_idle keepalives_interval keepalives_count"
    " tcp_user_timeout sslmode sslcert sslkey sslpassword sslrootcert sslcrl sslcrldir sslsni requirepeer"
    " ssl_min_protocol_version ssl_max_protocol_version gssencmode krbsrvname gsslib target_session_attrs"
    " channel_binding"
)
_KNOWN: Final = frozenset(_SHARED.split())
_OTHERWISE: Final = {"database": "dbname"}


def libpq_url(store_url: str, application: str) -> str:
    """``store_url`` for libpq, with our name and deadlines where it has none of its own. Holds the password."""
    base, _, query = store_url.partition("?")  # Parsing and joining a URL without a host would lose a slash.
    ours = {
        "application_name": application,
        "connect_timeout": str(10),
        "keepalives_idle": "5",
        "keepalives_interval": "2",
        "keepalives_count": "3",
    }
    settings = []
    for given, value in parse_qsl(query, keep_blank_values=True):
        key = _OTHERWISE.get(given, given)
        if key in _KNOWN:
            ours[key] = value
        else:
            settings.append(f"-c {key}={_escaped(value)}")
    if settings:
        ours["options"] = " ".join([*([ours["options"]] if "options" in ours else []), *settings])
    return f"{base}?{urlencode(ours, quote_via=quote)}"


def _escaped(value: str) -> str:
    """One word for the server's parser of options."""
    return value.replace("\\", "\\\\").replace(" ", "\\ ")


_BATCH_HINT: Final = "adbc.postgresql.batch_size_hint_bytes"
_COPY: Final = "adbc.postgresql.use_copy"
# Each task's transaction keeps the snapshot, so the limits of other sessions must not end it.
_SESSION: Final = (
    "SET LOCAL statement_timeout = 0",
    "SET LOCAL idle_in_transaction_session_timeout = 0",
    "SET LOCAL jit = off",
    "SET LOCAL timezone = 'UTC'",
    "SET LOCAL max_parallel_workers_per_gather = 0",
    "SELECT set_config(name, '0', true) FROM pg_settings WHERE name = 'transaction_timeout'",  # Since Postgres 17.
)
_DAMAGED: Final = ("XX", "58030", "58P01")
"""SQLSTATEs, or their beginnings: internal errors (corrupted data and indexes among them), and files that are missing
or that the disk does not give."""


_SEE: Final = 'see "Damage" in docs/backlog.md'


class Unreadable(Exception):
    """Postgres cannot read a page or a value of its own; ``reason`` is its text."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Reading:
    """A connection whose transaction reads one snapshot, and reads it again after an error. Made by :func:`reading`."""

    def __init__(self, connection: adbc.AdbcConnection, on: str, batch_bytes: int) -> None:
        self._connection = connection
        self._on = on
        self._batch_bytes = batch_bytes

    def begin(self) -> None:
        """Begin the transaction on the snapshot. Raises StoreLost."""
        with translated("take the snapshot"):
            self._execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            if self._on:
                self._execute(f"SET TRANSACTION SNAPSHOT '{_quoted(self._on)}'")
            for statement in _SESSION:
                self._execute(statement)

    def _execute(self, sql: str, **options: str) -> None:
        """Run a statement and ignore its rows. Raises the driver's errors."""
        with closing(adbc.AdbcStatement(self._connection)) as statement:
            statement.set_options(**options)
            statement.set_sql_query(sql)
            handle, _ = statement.execute_query()
            handle.release()

    @contextmanager
    def _stream(self, sql: str) -> Iterator[pa.RecordBatchReader]:
        """Stream the rows of a statement. Raises the driver's errors, and Arrow's in the middle of the rows."""
        with closing(adbc.AdbcStatement(self._connection)) as statement:
            statement.set_options(**{_BATCH_HINT: str(self._batch_bytes)})
            statement.set_sql_query(sql)
            handle, _ = statement.execute_query()
            with pa.RecordBatchReader.from_stream(handle) as reader:
                yield reader

    def batches(self, sql: str) -> Iterator[pa.RecordBatch]:
        """The rows of a statement. Raises Unreadable, after which the connection still works; StoreLost, and the
        driver's errors."""
        try:
            with self._stream(sql) as reader:
                for batch in reader:
                    if batch.num_rows:
                        yield batch
        except (adbc.Error, pa.ArrowException, OSError) as error:  # The last two occur in the middle of a stream.
            text, state = first_line(error), getattr(error, "sqlstate", None)
        else:
            return
        try:
            self._again()
            state = state or self._state(sql)
        except adbc.Error:  # The connection is gone, as the first error said.
            state = ""
        if state.startswith(_DAMAGED):
            raise Unreadable(text)
        raise StoreLost(text, advice_for(text))

    def _again(self) -> None:
        """Begin the transaction again after an error. Raises the driver's errors, StoreLost."""
        self._connection.rollback()
        self.begin()

    def _state(self, sql: str) -> str:
        """The SQLSTATE that a statement fails with; empty if it succeeds this time. An error in the middle of a stream
        has no SQLSTATE, so the statement runs again without a stream. Raises as :meth:`_again` does."""
        try:
            self._execute(sql, **{_COPY: "false"})
        except (adbc.Error, pa.ArrowException, OSError) as error:
            state = getattr(error, "sqlstate", None) or ""
        else:
            state = ""
        self._again()
        return state

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of a statement that gives few. Raises as :meth:`batches` does."""
        found: list[tuple[Any, ...]] = []
        for batch in self.batches(sql):
            found += zip(*(column.to_pylist() for column in batch.columns), strict=True)
        return found


@contextmanager
def reading(url: SecretUrl, on: str, batch_bytes: int) -> Iterator[Reading]:
    """A connection that reads the snapshot ``on``, or its own if ``on`` is empty. Raises StoreLost."""
    with _connected(url) as connection:
        made = Reading(connection, on, batch_bytes)
        made.begin()
        yield made


@contextmanager
def _connected(url: SecretUrl) -> Iterator[adbc.AdbcConnection]:
    """Raises StoreLost."""
    with translated("connect"):
        database = adbc_driver_postgresql.connect(libpq_url(url.reveal(), "delayer audit"))
    with closing(database):
        with translated("connect"):
            connection = adbc.AdbcConnection(database)
        with closing(connection):
            with translated("connect"):
                connection.set_autocommit(False)
            yield connection


def _quoted(text: str) -> str:
    return text.replace("'", "''")


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raise the driver's errors as StoreLost, without their cause: Spark prints causes, and a driver may quote the
    URL."""
    try:
        yield
    except adbc.Error as error:
        first = first_line(error)
        raise StoreLost(f"{doing}: {first}", advice_for(first)) from None
    except Unreadable as error:
        raise StoreLost(f"{doing}: {error.reason}", _SEE) from None


def first_line(error: Exception) -> str:
    """The first line of a driver's error, without passwords."""
    first, *_ = str(error).strip().splitlines() or [""]
    return mask(first)


def advice_for(text: str) -> str:
    """The next step after a driver's error; empty if there is none."""
    if "conflict with recovery" in text:
        return (
            "the replica gave up our snapshot to catch up with its primary: set hot_standby_feedback = on there, or "
            "raise max_standby_streaming_delay"
        )
    if "invalid snapshot identifier" in text:
        return "the connection that held the snapshot is gone: run the job again"
    return errors.certificate_advice(text, *errors.OF_STORE)
