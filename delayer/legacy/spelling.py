"""Tables, names and functions as each database spells them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, column, func, literal_column, select, table
from sqlalchemy.sql.elements import quoted_name
from sqlalchemy.sql.selectable import TableClause

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
