"""Sources `nservicebus-sql` (SQL Persistence: a table for each endpoint) and `nservicebus-nhibernate` (one for all)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from delayer.core.importing import Meant, Rewrite
from delayer.legacy.databases import database_url
from delayer.legacy.layout import Layout
from delayer.legacy.sql import Tables

SQL: Final = "nservicebus-sql"
NHIBERNATE: Final = "nservicebus-nhibernate"
SQL_TABLES: Final = ("*TimeoutData",)
NHIBERNATE_TABLES: Final = ("TimeoutEntity", "timeoutentity")
"""PostgreSQL folds names that are not quoted, and NHibernate quotes none."""
_SQL: Final = Layout()
_NHIBERNATE: Final = Layout(endpoint="Endpoint")


def sql_persistence(
    url: str,
    patterns: Sequence[str],
    meant: Meant,
    *,
    schema: str | None = None,
    rewrites: Sequence[Rewrite] = (),
    replies: Sequence[Rewrite] = (),
    overdue_too: bool = False,
) -> Tables:
    """Every table that matches a pattern. Raises ImportImpossible."""
    return Tables(
        SQL,
        database_url(url),
        patterns or SQL_TABLES,
        _SQL,
        meant,
        schema=schema,
        rewrites=rewrites,
        replies=replies,
        overdue_too=overdue_too,
    )


def nhibernate(
    url: str,
    patterns: Sequence[str],
    meant: Meant,
    *,
    schema: str | None = None,
    endpoint: str | None = None,
    rewrites: Sequence[Rewrite] = (),
    replies: Sequence[Rewrite] = (),
    overdue_too: bool = False,
) -> Tables:
    """The timeouts of one endpoint, or of all. Raises ImportImpossible."""
    return Tables(
        NHIBERNATE,
        database_url(url),
        patterns or NHIBERNATE_TABLES,
        _NHIBERNATE,
        meant,
        schema=schema,
        endpoint=endpoint,
        rewrites=rewrites,
        replies=replies,
        overdue_too=overdue_too,
    )
