"""Finding the tables of timeouts in a database, by SQLAlchemy's inspector. Each function is for run_sync."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final

from sqlalchemy import Connection, Executable, inspect

from delayer.legacy.beside import Beside
from delayer.legacy.layout import Layout, is_staged
from delayer.legacy.ports import ImportImpossible
from delayer.legacy.spelling import MYSQL
from delayer.legacy.statements import Moving

TOLD: Final = 20
"""Names of other tables that are told where none matches."""


def found(
    connection: Connection, patterns: Sequence[str], schema: str | None, layout: Layout, token: str
) -> list[Moving]:
    """Those that match, in the order of their names, for the run of this token. Raises ImportImpossible where none
    does, or one is no table of timeouts."""
    inspector = inspect(connection)
    names = sorted(inspector.get_table_names(schema=schema))
    meant = [name for name in names if not is_staged(name) and any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not meant:
        raise ImportImpossible(
            f"no table matches {', '.join(patterns)}: found {', '.join(names[:TOLD]) or 'no table at all'}"
        )
    return [_moving(connection, name, schema, layout, token) for name in meant]


def _moving(connection: Connection, name: str, schema: str | None, layout: Layout, token: str) -> Moving:
    types = {str(one["name"]): one["type"] for one in inspect(connection).get_columns(name, schema=schema)}
    try:
        layout = layout.of([*types])
    except KeyError as missing:
        raise ImportImpossible(f"table {name}: expected the columns of a timeout table, {missing} is missing") from None
    exact = types[layout.time] if connection.dialect.name == "mssql" else None
    return Moving(name, schema, [*types], layout, exact, token=token)


def staged(connection: Connection, schema: str | None) -> set[str]:
    """Those beside them that exist, of every run."""
    return {name for name in inspect(connection).get_table_names(schema=schema) if is_staged(name)}


def spare_indexes(connection: Connection, one: Beside, schema: str | None) -> list[str]:
    """Indexes of the new one beside it that nobody needs there."""
    if connection.dialect.name not in MYSQL:
        return []
    return sorted(str(index["name"]) for index in inspect(connection).get_indexes(one.table.name, schema=schema))


def ordering(connection: Connection, one: Beside, schema: str | None) -> Executable | None:
    """What gives the one beside it the order that its batches are read in; None where it has it."""
    inspector = inspect(connection)
    if one.index_name in {index["name"] for index in inspector.get_indexes(one.table.name, schema=schema)}:
        return None
    if connection.dialect.name in MYSQL:
        key = inspector.get_pk_constraint(one.table.name, schema=schema)["constrained_columns"]
        if key == [one.layout.time, one.layout.id]:
            return None
        if key == [one.layout.id]:
            return one.cluster()
    return one.index()
