"""A table of NServiceBus timeouts and its staging table, as statements for them. Pure. The statements use SQLAlchemy,
except two that it lacks: CREATE TABLE AS, and MySQL's DELETE with a join."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

from delayer.core.importing import Left
from delayer.imports.state_machine import ImportImpossible

MYSQL: Final = frozenset({"mysql", "mariadb"})
SUFFIX: Final = "_delayer_"
"""Separates the table's name from the run's token in the name of a staging table."""

SOON: Final = "due within a minute, or overdue: a timeout manager may have them in hand (--overdue-too takes them)"
NO_TIME: Final = "without a due time"

DuePlace = tuple[datetime, Any]
"""A row's due instant and id, which give its place in reading order."""


def staged_name(name: str, token: str) -> str:
    """Name the staging table of this table for the run with this token.

    >>> staged_name("Sales_TimeoutData", "5f0c9a7e41d2")
    'Sales_TimeoutData_delayer_5f0c9a7e41d2'
    """
    # PostgreSQL silently cuts names after 63 bytes. The index's name is 3 bytes longer.
    room = 60 - len(SUFFIX) - len(token)
    if len(name.encode()) > room:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name.encode()[: room - len(digest) - 1].decode('utf-8', 'ignore')}_{digest}"
    return f"{name}{SUFFIX}{token}"


def staged_token(name: str) -> str:
    """Extract the token from a staging table's name; "" for another table."""
    found = re.fullmatch(rf".+{SUFFIX}([0-9a-f]+)", name, re.DOTALL)
    return "" if found is None else found[1]


def staged_beside(name: str, names: Iterable[str]) -> list[str]:
    """List the staging tables of the table ``name``, of any run."""
    return [one for one in names if (token := staged_token(one)) and one == staged_name(name, token)]


class RowFilter(NamedTuple):
    """Chooses rows due later than ``after``, and at ``since`` or later."""

    after: datetime | None = None
    since: datetime | None = None


class TimeoutTable:
    """A timeout table and its staging table, as statement builders. ``endpoint``: choose only its timeouts."""

    def __init__(self, source: sa.Table, token: str, endpoint: str | None) -> None:
        """Raises ImportImpossible for a table without the columns of timeouts."""
        self.name = source.name
        self.source = source
        columns = (sa.Column(column.name, column.type) for column in source.c)
        self.staged = sa.Table(staged_name(source.name, token), sa.MetaData(), *columns, schema=source.schema)
        # NHibernate does not quote names, so PostgreSQL folds them to lower case.
        self._spelled = {column.name.lower(): column.name for column in source.c}
        needed = ["id", "destination", "state", "time", "headers", *([] if endpoint is None else ["endpoint"])]
        for name in needed:
            if name not in self._spelled:
                raise ImportImpossible(
                    f"table {self.name}: expected the columns of a timeout table, {name!r} is missing"
                )
        self._of_endpoint = [] if endpoint is None else [self.of(source, "endpoint") == endpoint]

    def of(self, table: sa.Table, name: str) -> sa.Column[Any]:
        return table.c[self._spelled[name]]

    def create(self, dialect: sa.Dialect) -> list[str]:
        """Create the empty staging table and its index in reading order. MySQL stores rows in the order of the primary
        key, so there the primary key has that order, and each page is read once."""
        prepare = dialect.identifier_preparer
        source, staged = prepare.format_table(self.source), prepare.format_table(self.staged)
        order = ", ".join(prepare.quote(self._spelled[name]) for name in ("time", "id"))
        if dialect.name in MYSQL:
            return [f"CREATE TABLE {staged} (PRIMARY KEY ({order})) AS SELECT * FROM {source} WHERE 1 = 0"]
        index = f"CREATE INDEX {prepare.quote(f'{self.staged.name}_ix')} ON {staged} ({order})"
        if dialect.name == "mssql":
            return [f"SELECT * INTO {staged} FROM {source} WHERE 1 = 0", index]
        return [f"CREATE TABLE {staged} AS SELECT * FROM {source} WHERE 1 = 0", index]

    def take(self, pick: RowFilter, limit: int | None) -> sa.Insert:
        """Copy and lock the chosen rows that are not locked. :meth:`forget` follows in this transaction."""
        rows = sa.select(*self.source.c).where(*self.meant(pick)).order_by(*self._order(self.source)).limit(limit)
        rows = rows.with_for_update(skip_locked=True).with_hint(
            self.source, "WITH (UPDLOCK, ROWLOCK, READPAST)", "mssql"
        )
        return sa.insert(self.staged).from_select([column.name for column in self.source.c], rows)

    def forget(self, dialect: sa.Dialect) -> str:
        """Delete the copied rows. Makes MySQL start with the staging table, because otherwise it reads the whole table
        and waits for every locked row."""
        prepare = dialect.identifier_preparer
        source, staged = prepare.format_table(self.source), prepare.format_table(self.staged)
        id_ = prepare.quote(self._spelled["id"])
        if dialect.name in MYSQL:
            return f"DELETE {source} FROM {staged} STRAIGHT_JOIN {source} ON {source}.{id_} = {staged}.{id_}"
        return f"DELETE FROM {source} WHERE {id_} IN (SELECT {id_} FROM {staged})"

    def give_back(self) -> sa.Insert:
        """Copy the staged rows back into their table."""
        return sa.insert(self.source).from_select([column.name for column in self.source.c], sa.select(*self.staged.c))

    def goals(self, table: sa.Table, *conditions: sa.ColumnElement[bool], limit: int | None = None) -> sa.Select[Any]:
        """Count rows by destination, with first and last due instants, of the ``limit`` soonest (None: all)."""
        rows = sa.select(self.of(table, "destination"), self.of(table, "time")).where(*conditions)
        if limit is not None:
            rows = rows.order_by(*self._order(table)).limit(limit)
        destination, due = rows.subquery().c
        return sa.select(destination, sa.func.count(), sa.func.min(due), sa.func.max(due)).group_by(destination)

    def dues(self, pick: RowFilter, limit: int) -> sa.Select[Any]:
        """Select the due instants of the ``limit`` soonest chosen rows."""
        due = self.of(self.source, "time")
        return sa.select(due).where(*self.meant(pick)).order_by(due).limit(limit)

    def reasons(self, pick: RowFilter) -> sa.Select[Any]:
        """Count rows by the reason why they stay; "" for chosen rows."""
        due = self.of(self.source, "time")
        reasons: list[tuple[sa.ColumnElement[bool], str]] = [(due.is_(None), NO_TIME)]
        if pick.since is not None:
            reasons.append((due < pick.since, Left.BEFORE_CUTOFF))
        if pick.after is not None:
            reasons.append((due <= pick.after, SOON))
        rows = sa.select(sa.case(*reasons, else_="").label("why")).where(*self._of_endpoint).subquery()
        return sa.select(rows.c.why, sa.func.count()).group_by(rows.c.why)

    def sizes(self, dialect: sa.Dialect, limit: int, after: DuePlace | None) -> sa.Select[Any]:
        """Select the due instants of the soonest staged rows after that place, and the bytes of body and headers."""
        length = sa.func.datalength if dialect.name == "mssql" else sa.func.octet_length
        state, headers = (sa.func.coalesce(length(self.of(self.staged, name)), 0) for name in ("state", "headers"))
        return self._soonest(sa.select(self.of(self.staged, "time"), state + headers), limit, after)

    def batch(self, limit: int, after: DuePlace | None = None) -> sa.Select[Any]:
        """Select the soonest staged rows after that place."""
        columns = [self.of(self.staged, name) for name in ("id", "destination", "state", "time", "headers")]
        return self._soonest(sa.select(*columns), limit, after)

    def _soonest(self, query: sa.Select[Any], limit: int, after: DuePlace | None) -> sa.Select[Any]:
        due, id_ = self._order(self.staged)
        query = query.order_by(due, id_).limit(limit)
        if after is None:
            return query
        since = self._instant(after)
        return query.where(due >= since, sa.or_(due > since, id_ > after[1]))

    def remove(self, upto: DuePlace, after: DuePlace | None = None) -> sa.Delete:
        """Delete the staged rows up to ``upto``. Rows up to ``after`` are already deleted; the condition keeps the
        database from reading dead index entries."""
        due, id_ = self._order(self.staged)
        until = self._instant(upto)
        query = sa.delete(self.staged).where(due <= until, sa.or_(due < until, id_ <= upto[1]))
        return query if after is None else query.where(due >= self._instant(after))

    def meant(self, pick: RowFilter) -> list[sa.ColumnElement[bool]]:
        due = self.of(self.source, "time")
        conditions = [due.is_not(None), *self._of_endpoint]
        if pick.after is not None:
            conditions.append(due > pick.after)
        if pick.since is not None:
            conditions.append(due >= pick.since)
        return conditions

    def _order(self, table: sa.Table) -> tuple[sa.Column[Any], sa.Column[Any]]:
        return self.of(table, "time"), self.of(table, "id")

    def _instant(self, place: DuePlace) -> sa.ColumnElement[Any]:
        """Convert an instant to the column's type. SQL Server's datetime counts in thirds of 10 ms, and its .003 is
        less than the true .00333 if the parameter is a datetime2."""
        return sa.cast(place[0], self.of(self.staged, "time").type)
