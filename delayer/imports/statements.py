"""The SQL of tables of timeouts and of the tables beside them, in the dialects of four databases. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import (
    Column,
    ColumnElement,
    Delete,
    Executable,
    Index,
    Insert,
    Integer,
    MetaData,
    Select,
    Table,
    and_,
    case,
    cast,
    column,
    delete,
    func,
    insert,
    literal,
    literal_column,
    or_,
    select,
    table,
    text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateIndex, DropTable
from sqlalchemy.sql.ddl import ExecutableDDLElement
from sqlalchemy.sql.elements import quoted_name
from sqlalchemy.sql.selectable import TableClause
from sqlalchemy.types import TypeEngine

MYSQL: Final = frozenset({"mysql", "mariadb"})
"""Dialects of databases that keep the rows of a table in the order of its primary key."""


def clock(dialect: str) -> Select[Any]:
    """What time it is there: UTC, without a zone."""
    now: ColumnElement[Any]
    match dialect:
        case "postgresql":
            now = func.timezone(literal_column("'UTC'"), func.clock_timestamp())
        case "mssql":
            now = func.sysutcdatetime()
        case "mysql" | "mariadb":
            now = func.utc_timestamp(literal_column("3"))
        case _:
            now = func.current_timestamp()
    return select(now)


def counting(name: str, schema: str | None) -> Select[Any]:
    """How many rows a table has."""
    return select(func.count()).select_from(table_of(name, schema, ()))


def length_of(dialect: str) -> Callable[..., ColumnElement[Any]]:
    """The function that tells how many bytes a value has."""
    return func.datalength if dialect == "mssql" else func.octet_length


def place_of(of: TableClause) -> tuple[str, ...]:
    """The words of its name."""
    return (of.name,) if of.schema is None else (of.schema, of.name)


def backquoted(words: Sequence[str]) -> str:
    """A name for MySQL; a colon in it would be a parameter to SQLAlchemy."""
    return ".".join("`" + word.replace("`", "``").replace(":", "\\:") + "`" for word in words)


def table_of(name: str, schema: str | None, columns: Sequence[str]) -> TableClause:
    """A table of this name and these columns, as they are spelled."""
    return table(
        quoted_name(name, quote=True),
        *(column(quoted_name(one, quote=True)) for one in columns),
        schema=None if schema is None else quoted_name(schema, quote=True),
    )


class CreateLike(ExecutableDDLElement):
    """An empty table with the columns of another."""

    inherit_cache = False

    def __init__(self, new: Table, like: Table) -> None:
        self.new = new
        self.like = like


@compiles(CreateLike)
def _create_like(element: CreateLike, compiler: Any, **_: Any) -> str:
    format_table = compiler.preparer.format_table
    new, like = format_table(element.new), format_table(element.like)
    match compiler.dialect.name:
        case "mssql":
            return f"SELECT * INTO {new} FROM {like} WHERE 1 = 0"
        case "postgresql":
            return f"CREATE TABLE {new} (LIKE {like})"
        case "oracle":
            return f"CREATE TABLE {new} AS SELECT * FROM {like} WHERE 1 = 0"
        case _:
            return f"CREATE TABLE {new} LIKE {like}"


SUFFIX: Final = "_delayer"
"""Behind a table's name, with the run's token: where its timeouts wait to be imported."""
_STAGED: Final = re.compile(rf"(.+){SUFFIX}(?:_[0-9a-f]+)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Layout:
    """Which column is what. ``endpoint``: whose timeout it is, where one table has those of many."""

    id: str = "Id"
    destination: str = "Destination"
    state: str = "State"
    time: str = "Time"
    headers: str = "Headers"
    endpoint: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.id, self.destination, self.state, self.time, self.headers)

    def of(self, columns: Sequence[str]) -> Layout:
        """As a table spells them: NHibernate quotes no name, and PostgreSQL makes such names lower case. Raises
        KeyError for one that is missing."""
        spelled = {name.lower(): name for name in columns}
        id_, destination, state, time, headers = (spelled[name.lower()] for name in self.names)
        endpoint = None if self.endpoint is None else spelled[self.endpoint.lower()]
        return Layout(id_, destination, state, time, headers, endpoint)


@dataclass(frozen=True, slots=True)
class Pick:
    """Which rows are meant: due after ``after`` (and not in it), due from ``since`` on, of this endpoint."""

    after: datetime | None = None
    since: datetime | None = None
    endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A row's place in the order of due instants."""

    time: datetime
    id: Any


def staged_name(name: str, token: str) -> str:
    """Of the table beside the one of this name, for the run of this token; "": of a run that began before there were
    tokens.

    >>> staged_name("Sales_TimeoutData", "5f0c9a7e41d2")
    'Sales_TimeoutData_delayer_5f0c9a7e41d2'
    """
    suffix = f"{SUFFIX}_{token}" if token else SUFFIX
    # Bytes of such a name, so that its index's fits as well: PostgreSQL has room for 63, and cuts without a word.
    room = 60 - len(suffix)
    if len(name.encode()) > room:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name.encode()[: room - len(digest) - 1].decode('utf-8', 'ignore')}_{digest}"
    return name + suffix


def is_staged(name: str) -> bool:
    """Whether it is such a name."""
    return _STAGED.fullmatch(name) is not None


def staged_beside(name: str, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that may stand beside the table ``name``, whosever they are."""
    return [
        one
        for one in names
        if (found := _STAGED.fullmatch(one)) is not None
        and one == staged_name(name, one[len(found[1]) + len(SUFFIX) + 1 :])
    ]


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


class Moving:
    """The statements for one table; ``columns`` are all it has. ``time_type`` and ``token``: see Beside."""

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
        self.source = table_of(name, schema, columns)
        self.beside = Beside(name, schema, columns, layout, time_type, token=token)
        self._names = list(columns)

    def goals(self, pick: Pick) -> Select[Any]:
        """By destination: how many, and when the first and the last is due."""
        time, destination = self.source.c[self.layout.time], self.source.c[self.layout.destination]
        return (
            select(destination, func.count(), func.min(time), func.max(time))
            .where(self._meant(pick))
            .group_by(destination)
        )

    def looks(self, pick: Pick, limit: int | None) -> Select[Any]:
        """Of each row that is meant its destination, due instant and headers; of the soonest ``limit`` of them."""
        rows = looks_of(self.source, self.layout).where(self._meant(pick))
        if limit is None:
            return rows
        return rows.order_by(self.source.c[self.layout.time], self.source.c[self.layout.id]).limit(limit)

    def others(self, pick: Pick) -> Select[Any]:
        """Why rows are not meant: how many are without an instant, due sooner than ``since``, not due after ``after``.
        Each counts once, in this order."""
        time = self.source.c[self.layout.time]
        ours = self._of(self.source, pick)

        def count(condition: ColumnElement[bool] | None) -> ColumnElement[Any]:
            if condition is None:
                return func.sum(0)
            return func.sum(case((condition, 1), else_=0))

        sooner = None if pick.since is None else time < pick.since
        soon = None if pick.after is None else time <= pick.after
        if soon is not None and pick.since is not None:
            soon = and_(soon, time >= pick.since)
        query = select(count(time.is_(None)), count(sooner), count(soon)).select_from(self.source)
        return query if ours is None else query.where(ours)

    def soonest(self, pick: Pick, limit: int) -> Select[Any]:
        """The due instants of the first rows that are meant."""
        time = self.source.c[self.layout.time]
        return select(time).where(self._meant(pick)).order_by(time).limit(limit)

    def take(self, pick: Pick, limit: int | None) -> Insert:
        """Copy what is meant, the rows locked; :meth:`forget` follows in the same transaction."""
        time, id_ = self.source.c[self.layout.time], self.source.c[self.layout.id]
        rows = select(*(self.source.c[name] for name in self._names)).where(self._meant(pick))
        if limit is not None:
            rows = rows.order_by(time, id_).limit(limit)
        rows = rows.with_for_update(skip_locked=True).with_hint(
            self.source, "WITH (UPDLOCK, ROWLOCK, READPAST)", "mssql"
        )
        return insert(self.beside.table).from_select(self._names, rows)

    def forget(self, dialect: str) -> Executable:
        """Delete what was copied. MySQL would look through the whole table for that, and wait for every row in it that
        somebody has locked, unless it is told to begin with what was copied."""
        id_ = self.layout.id
        if dialect in MYSQL:
            names = (place_of(self.source), place_of(self.beside.table), (id_,))
            source, staged, key = (backquoted(name) for name in names)
            return text(f"DELETE {source} FROM {staged} STRAIGHT_JOIN {source} ON {source}.{key} = {staged}.{key}")
        return delete(self.source).where(self.source.c[id_].in_(select(self.beside.table.c[id_])))

    def give_back(self) -> Insert:
        """What is left there goes where it was; Beside.empty follows in the same transaction."""
        rows = select(*(self.beside.table.c[name] for name in self._names))
        return insert(self.source).from_select(self._names, rows)

    def _meant(self, pick: Pick) -> ColumnElement[bool]:
        time = self.source.c[self.layout.time]
        conditions: list[ColumnElement[bool]] = [time.is_not(None)]
        if pick.after is not None:
            conditions.append(time > pick.after)
        if pick.since is not None:
            conditions.append(time >= pick.since)
        ours = self._of(self.source, pick)
        if ours is not None:
            conditions.append(ours)
        return and_(*conditions)

    def _of(self, rows: TableClause, pick: Pick) -> ColumnElement[bool] | None:
        if pick.endpoint is None or self.layout.endpoint is None:
            return None
        return rows.c[self.layout.endpoint] == pick.endpoint
