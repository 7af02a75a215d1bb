"""The SQL of moving timeouts out of their table, for every dialect that SQLAlchemy knows. Pure.

What is meant of a table is moved, in one transaction, into a table of the same columns beside it, which only we know:
from then on no timeout manager sees it. What a timeout manager has locked at that moment is passed over and stays.

The table beside it has the run's token in its name. So imports of several stores that begin at the same moment take
what each of them gets, into a table of its own, and none takes another's for what it staged itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Executable, Insert, Select, and_, case, delete, func, insert, select, text
from sqlalchemy.sql.selectable import TableClause
from sqlalchemy.types import TypeEngine

from delayer.legacy.beside import Beside, looks_of
from delayer.legacy.layout import Layout, Pick
from delayer.legacy.spelling import MYSQL, backquoted, place_of, table_of


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
