"""An empty table with the columns of another, as each database makes one."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Table
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.ddl import ExecutableDDLElement


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
