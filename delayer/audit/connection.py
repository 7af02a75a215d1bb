"""An executor's connection to the store: on the snapshot, streaming Arrow batches, its errors translated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from delayer.audit import libpq, snapshot
from delayer.core.errors import StoreLost
from delayer.settings.secret import SecretUrl, mask
from delayer.store import damaged
from delayer.store.damaged import Named

if TYPE_CHECKING:
    from adbc_driver_postgresql import dbapi

_BATCH_HINT: Final = "adbc.postgresql.batch_size_hint_bytes"
_COPY: Final = "adbc.postgresql.use_copy"
# Each task's transaction: of the snapshot, and not to be ended by a limit that was made for others.
_SESSION: Final = (
    "SET LOCAL statement_timeout = 0",
    "SET LOCAL idle_in_transaction_session_timeout = 0",
    "SET LOCAL jit = off",
    "SET LOCAL timezone = 'UTC'",
    "SET LOCAL max_parallel_workers_per_gather = 0",
    snapshot.NO_TIMEOUT.format("true"),
)
_DAMAGED: Final = ("XX", "58030", "58P01")
"""SQLSTATEs, or their beginnings: internal errors (those of corrupted data and indexes are among them), and files that
the disk does not give or that are not there."""


class Unreadable(Exception):
    """Postgres has a page, or a value, that it cannot read itself; ``reason`` is its own. ``index``: it is one of an
    index, which every statement on its table meets, whatever rows that is about."""

    def __init__(self, reason: str, index: Named | None = None) -> None:
        self.reason = reason
        self.index = index
        super().__init__(reason)


class Reading:
    """A connection whose transaction reads one snapshot, and reads it again after an error. Made by :func:`reading`."""

    def __init__(self, connection: dbapi.Connection, on: str, batch_bytes: int) -> None:
        self._connection = connection
        self._on = on
        self._batch_bytes = batch_bytes

    def begin(self) -> None:
        """Raises StoreLost."""
        with translated("take the snapshot"), self._connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            if self._on:
                cursor.execute(f"SET TRANSACTION SNAPSHOT '{_quoted(self._on)}'")
            for statement in _SESSION:
                cursor.execute(statement)

    def batches(self, sql: str) -> Iterator[pa.RecordBatch]:
        """What the statement gives. Raises Unreadable, after which this can be read from as before; StoreLost, and the
        driver's errors."""
        from adbc_driver_postgresql import dbapi  # noqa: PLC0415 - a driver's process need not load it to plan

        try:
            with self._connection.cursor() as cursor:
                cursor.adbc_statement.set_options(**{_BATCH_HINT: str(self._batch_bytes)})
                cursor.execute(sql)
                with cursor.fetch_record_batch() as reader:
                    for batch in reader:
                        if batch.num_rows:
                            yield batch
        except (dbapi.Error, pa.ArrowException, OSError) as error:  # the last two in the middle of a stream
            text, state = first_line(error), getattr(error, "sqlstate", None)
        else:
            return
        try:
            self._again()
            state = state or self._state(sql)
        except dbapi.Error:  # the connection is gone, which is what the first error was about
            state = ""
        if state.startswith(_DAMAGED):
            raise Unreadable(text, self._index(text))
        raise StoreLost(text, advice_for(text))

    def _index(self, text: str) -> Named | None:
        """The index that an error is about, if it is about one."""
        from adbc_driver_postgresql import dbapi  # noqa: PLC0415

        asked = damaged.question(text)
        if asked is None:
            return None
        try:
            with self._connection.cursor() as cursor:
                cursor.execute(asked)
                row = cursor.fetchone()
        except (dbapi.Error, pa.ArrowException, OSError):  # the catalogs are damaged as well
            self._again()
            return None
        found = None if row is None else Named(*row)
        return found if found is not None and found.table is not None else None

    def _again(self) -> None:
        """Begin anew, after an error. Raises the driver's errors, StoreLost."""
        self._connection.rollback()
        self.begin()

    def _state(self, sql: str) -> str:
        """The SQLSTATE that a statement fails with; empty where it does not, this time. What fails in the middle of a
        stream has none, so it is run once more without one. Raises as :meth:`_again` does."""
        from adbc_driver_postgresql import dbapi  # noqa: PLC0415

        try:
            with self._connection.cursor() as cursor:
                cursor.adbc_statement.set_options(**{_COPY: "false"})
                cursor.execute(sql)
        except (dbapi.Error, pa.ArrowException, OSError) as error:
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
    """Connect; on that snapshot, if there is one. Raises StoreLost."""
    from adbc_driver_postgresql import dbapi  # noqa: PLC0415

    with translated("connect"):
        connection = dbapi.connect(libpq.url(url.reveal(), "delayer audit"), autocommit=False)
    with closing(connection):
        made = Reading(connection, on, batch_bytes)
        made.begin()
        yield made


def _quoted(text: str) -> str:
    return text.replace("'", "''")


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """The driver's errors as StoreLost. Without their cause: Spark prints causes, and a driver may quote the URL."""
    from adbc_driver_postgresql import dbapi  # noqa: PLC0415

    try:
        yield
    except dbapi.Error as error:
        first = first_line(error)
        raise StoreLost(f"{doing}: {first}", advice_for(first)) from None
    except Unreadable as error:
        if error.index is not None:
            raise StoreLost(f"{doing}: {error.index}: {error.reason}", error.index.advice) from None
        raise StoreLost(f"{doing}: {error.reason}", damaged.SEE) from None


def first_line(error: Exception) -> str:
    """What a driver says, without passwords."""
    first, *_ = str(error).strip().splitlines() or [""]
    return mask(first)


def advice_for(text: str) -> str:
    """What a person can do about a driver's error, or nothing."""
    if "conflict with recovery" in text:
        return (
            "the replica gave up our snapshot to catch up with its primary: set hot_standby_feedback = on there, or "
            "raise max_standby_streaming_delay"
        )
    if index := re.search(r"\bindex (\S+) of table (\S+):", text):
        return Named(index[1], index[2]).advice
    if "invalid snapshot identifier" in text:
        return "the connection that held the snapshot is gone: run the job again"
    return ""
