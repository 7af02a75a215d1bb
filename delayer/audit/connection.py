"""An executor's connection to the store: on the snapshot, streaming Arrow batches, with translated errors.

It uses the driver below its dbapi, because the dbapi imports pandas. That takes most of a second in every Python
process that Spark starts, and Spark starts several per table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode

import adbc_driver_manager as adbc
import adbc_driver_postgresql
import pyarrow as pa

from delayer.core import errors
from delayer.core.errors import StoreLost
from delayer.core.readable import mask
from delayer.core.secret import SecretUrl
from delayer.store.errors import DAMAGE_ADVICE

# Parameters of both drivers. asyncpg sets unknown parameters in the session, as libpq does by "options".
_SHARED: Final = (
    "host port user password passfile dbname service servicefile connect_timeout client_encoding options"
    " application_name fallback_application_name keepalives keepalives_idle keepalives_interval keepalives_count"
    " tcp_user_timeout sslmode sslcert sslkey sslpassword sslrootcert sslcrl sslcrldir sslsni requirepeer"
    " ssl_min_protocol_version ssl_max_protocol_version gssencmode krbsrvname gsslib target_session_attrs"
    " channel_binding"
)
_KNOWN: Final = frozenset(_SHARED.split())


def libpq_url(store_url: str, application: str) -> str:
    """Convert ``store_url`` for libpq, adding our name and deadlines unless it sets its own. Includes the password."""
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
        key = "dbname" if given == "database" else given
        if key in _KNOWN:
            ours[key] = value
        else:  # As one word for the server's parser of options.
            settings.append(f"-c {key}=" + value.replace("\\", "\\\\").replace(" ", "\\ "))
    if settings:
        ours["options"] = " ".join([*([ours["options"]] if "options" in ours else []), *settings])
    return f"{base}?{urlencode(ours, quote_via=quote)}"


_BATCH_HINT: Final = "adbc.postgresql.batch_size_hint_bytes"
_BEGIN: Final = ("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY", "SET LOCAL lock_timeout = '30s'")
# Each task's transaction keeps the snapshot, so limits meant for other sessions must not end it.
_SESSION: Final = (
    "SET LOCAL statement_timeout = 0",
    "SET LOCAL idle_in_transaction_session_timeout = 0",
    "SET LOCAL jit = off",
    "SET LOCAL timezone = 'UTC'",
    "SET LOCAL max_parallel_workers_per_gather = 0",
    "SELECT set_config(name, '0', true) FROM pg_settings WHERE name = 'transaction_timeout'",  # Since Postgres 17.
)
_NO_SNAPSHOT: Final = re.compile("invalid snapshot identifier|snapshot .* does not exist")
"""Postgres's error text before version 16, and since."""
_DAMAGED: Final = re.compile("invalid page|missing chunk|could not (read|open)|is corrupt|unexpected (chunk|data|zero)")
"""Postgres's error text for a page or value that it cannot read."""


class Reading:
    """A connection whose transaction reads one snapshot. Created by :func:`reading`."""

    def __init__(self, connection: adbc.AdbcConnection, batch_bytes: int) -> None:
        self._connection = connection
        self._batch_bytes = batch_bytes

    def execute(self, sql: str) -> None:
        """Run a statement and ignore its rows. Raises the driver's errors."""
        with closing(adbc.AdbcStatement(self._connection)) as statement:
            statement.set_sql_query(sql)
            # A signal does not interrupt the driver while it waits for a lock, but it interrupts waiting for a thread.
            with ThreadPoolExecutor(1) as thread:
                try:
                    handle, _ = thread.submit(statement.execute_query).result()
                except KeyboardInterrupt:
                    ended = thread.submit(int)  # This thread's next work begins when the statement has ended.
                    while not wait([ended], 0.1).done:  # A cancel has no effect on a statement that is about to start.
                        statement.cancel()
                    raise
            handle.release()

    def batches(self, sql: str) -> Iterator[pa.RecordBatch]:
        """Stream the rows of a statement. Raises StoreLost."""
        with translated("read"), closing(adbc.AdbcStatement(self._connection)) as statement:
            statement.set_options(**{_BATCH_HINT: str(self._batch_bytes)})
            statement.set_sql_query(sql)
            handle, _ = statement.execute_query()
            with pa.RecordBatchReader.from_stream(handle) as reader:
                yield from (batch for batch in reader if batch.num_rows)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Fetch a statement's few rows. Raises StoreLost."""
        found: list[tuple[Any, ...]] = []
        for batch in self.batches(sql):
            found += zip(*(column.to_pylist() for column in batch.columns), strict=True)
        return found


@contextmanager
def reading(url: SecretUrl, first: str, batch_bytes: int) -> Iterator[Reading]:
    """Open a connection that reads one snapshot, taken after ``first`` (see :func:`on_snapshot`). Raises StoreLost."""
    with ExitStack() as stack:
        with translated("connect"):
            database = adbc_driver_postgresql.connect(libpq_url(url.reveal(), "delayer audit"))
            stack.enter_context(closing(database))
            connection = stack.enter_context(closing(adbc.AdbcConnection(database)))
            connection.set_autocommit(False)
        made = Reading(connection, batch_bytes)
        with translated("take the snapshot"):
            for statement in (*_BEGIN, *([first] if first else []), *_SESSION):
                made.execute(statement)
        yield made


def on_snapshot(exported: str) -> str:
    """Build the first statement of a transaction on an exported snapshot; "" means none."""
    return "SET TRANSACTION SNAPSHOT '{}'".format(exported.replace("'", "''")) if exported else ""


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raise the driver's errors as StoreLost, without a cause: Spark prints causes, and a driver may quote the URL."""
    try:
        yield
    except (adbc.Error, pa.ArrowException, OSError) as error:  # The last two occur mid-stream.
        first, *_ = str(error).strip().splitlines() or [""]
        raise StoreLost(f"{doing}: {mask(first)}", advice_for(first)) from None


def advice_for(text: str) -> str:
    """Return the next step after a driver's error; empty if there is none."""
    if "conflict with recovery" in text:
        return (
            "the replica gave up our snapshot to catch up with its primary: set hot_standby_feedback = on there, or "
            "raise max_standby_streaming_delay"
        )
    if _NO_SNAPSHOT.search(text):
        return "the connection that held the snapshot is gone: run the job again"
    if _DAMAGED.search(text):
        return DAMAGE_ADVICE
    return errors.certificate_advice(text, *errors.OF_STORE)
