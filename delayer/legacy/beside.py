"""The SQL of the table beside a table of timeouts, where what is moved waits to be imported. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import (
    Column,
    ColumnElement,
    Delete,
    Executable,
    Index,
    Integer,
    MetaData,
    Select,
    Table,
    cast,
    delete,
    func,
    literal,
    literal_column,
    or_,
    select,
    text,
)
from sqlalchemy.schema import CreateIndex, DropTable
from sqlalchemy.sql.selectable import TableClause
from sqlalchemy.types import TypeEngine

from delayer.legacy.create_like import CreateLike
from delayer.legacy.layout import Layout, Place, staged_name
from delayer.legacy.spelling import backquoted, length_of, place_of, table_of

_ZERO: Final[ColumnElement[Any]] = literal_column("0")


class Beside:
    """``name``: of the table that it stands beside, with the same ``columns``.

    ``time_type``: the type of its due instants, where the database does not find an instant again that it gave. SQL
    Server is told instants as datetime2, and its datetime has thirds of a hundredth of a second: the .003 that it gives
    is less than the .00333 that it then compares with. As datetime the two are equal again.
    """

    def __init__(
        self,
        name: str,
        schema: str | None,
        columns: Sequence[str],
        layout: Layout,
        time_type: TypeEngine[Any] | None = None,
        *,
        token: str = "",
    ) -> None:
        self.name = name
        self.layout = layout
        self._time_type = time_type
        self.table = table_of(staged_name(name, token), schema, columns)

    def create(self) -> CreateLike:
        metadata = MetaData()
        return CreateLike(
            Table(self.table.name, metadata, schema=self.table.schema, quote=True),
            Table(self.name, metadata, schema=self.table.schema, quote=True),
        )

    def index(self) -> CreateIndex:
        """What the batches are read by."""
        names = (self.layout.time, self.layout.id)
        made = Table(
            self.table.name, MetaData(), *(Column(name, Integer, quote=True) for name in names),
            schema=self.table.schema, quote=True,
        )  # fmt: skip
        return CreateIndex(Index(self.index_name, *(made.c[name] for name in names)))

    def cluster(self) -> Executable:
        """The same for MySQL: the rows in the order that they are read and removed in. An index would lead from each to
        another page, and where there are more pages than it keeps in memory it would read, and write, one for each."""
        names = ", ".join(backquoted((name,)) for name in (self.layout.time, self.layout.id))
        return text(f"ALTER TABLE {backquoted(place_of(self.table))} DROP PRIMARY KEY, ADD PRIMARY KEY ({names})")

    def bare(self, indexes: Sequence[str]) -> Executable:
        """For MySQL, whose table is made with all indexes of the other: without these."""
        dropped = ", ".join(f"DROP INDEX {backquoted((name,))}" for name in indexes)
        return text(f"ALTER TABLE {backquoted(place_of(self.table))} {dropped}")

    @property
    def index_name(self) -> str:
        return f"{self.table.name}_ix"

    def drop(self) -> DropTable:
        return DropTable(Table(self.table.name, MetaData(), schema=self.table.schema, quote=True))

    def goals(self) -> Select[Any]:
        """By destination: how many, and when the first and the last is due."""
        time, destination = self.table.c[self.layout.time], self.table.c[self.layout.destination]
        return select(destination, func.count(), func.min(time), func.max(time)).group_by(destination)

    def looks(self) -> Select[Any]:
        """Of each row its destination, due instant and headers."""
        return looks_of(self.table, self.layout)

    def spare(self, after: datetime) -> Delete:
        """What was copied, but would be due too soon by now, is not meant."""
        return delete(self.table).where(self.table.c[self.layout.time] <= after)

    def empty(self) -> Delete:
        return delete(self.table)

    def batch(self, limit: int, after: Place | None = None) -> Select[Any]:
        """The soonest of what was moved, behind that place."""
        return self._soonest([self.table.c[name] for name in self.layout.names], limit, after)

    def sizes(self, dialect: str, limit: int, after: Place | None = None) -> Select[Any]:
        """How many bytes the same rows have."""
        return self._soonest([self._size(dialect)], limit, after)

    def largest(self, dialect: str) -> Select[Any]:
        """How many bytes the largest of all has."""
        return select(func.max(self._size(dialect)))

    def _soonest(self, columns: Sequence[ColumnElement[Any]], limit: int, after: Place | None) -> Select[Any]:
        time, id_ = self.table.c[self.layout.time], self.table.c[self.layout.id]
        query = select(*columns).select_from(self.table).order_by(time, id_).limit(limit)
        if after is None:
            return query
        since = self._instant(after.time)
        return query.where(time >= since, or_(time > since, id_ > after.id))

    def _size(self, dialect: str) -> ColumnElement[Any]:
        length = length_of(dialect)
        state, headers = (self.table.c[name] for name in (self.layout.state, self.layout.headers))
        return func.coalesce(length(state), _ZERO) + func.coalesce(length(headers), _ZERO)

    def remove(self, upto: Place, after: Place | None = None) -> Delete:
        """What stands up to there is committed, and what stands up to ``after`` is gone: an index is read over its
        deleted entries as well, unless it is told where to begin."""
        time, id_ = self.table.c[self.layout.time], self.table.c[self.layout.id]
        until = self._instant(upto.time)
        query = delete(self.table).where(time <= until, or_(time < until, id_ <= upto.id))
        return query if after is None else query.where(time >= self._instant(after.time))

    def count(self) -> Select[Any]:
        return select(func.count()).select_from(self.table)

    def _instant(self, time: datetime) -> ColumnElement[Any]:
        """An instant that was read from the table, to compare with what stands there."""
        return literal(time) if self._time_type is None else cast(time, self._time_type)


def looks_of(of: TableClause, layout: Layout) -> Select[Any]:
    """Of each row its destination, due instant and headers."""
    return select(*(of.c[name] for name in (layout.destination, layout.time, layout.headers)))


def longest_headers(dialect: str, of: TableClause, layout: Layout) -> Select[Any]:
    """How many bytes the longest headers have, of the table itself or of the one beside it."""
    return select(func.max(length_of(dialect)(of.c[layout.headers])))
