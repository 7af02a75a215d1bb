"""Timeouts in SQL: the statements for SQL Server that move them. tests/integration/test_import_sql.py has the other
databases."""

from __future__ import annotations

import re
from datetime import datetime

import pytest
from sqlalchemy import DATETIME, Column, DateTime, Dialect, LargeBinary, MetaData, String, Table
from sqlalchemy.dialects import mssql, mysql, postgresql
from sqlalchemy.types import TypeEngine

from delayer.imports.state_machine import ImportImpossible
from delayer.imports.timeout_table import RowFilter, TimeoutTable, staged_beside, staged_name, staged_token

COLUMNS = ("Id", "Destination", "SagaId", "State", "Time", "Headers", "PersistenceVersion")
NOON = datetime(2031, 1, 31, 12)  # noqa: DTZ001 - the columns have no zone
DIALECTS: dict[str, Dialect] = {"mssql": mssql.dialect(), "mysql": mysql.dialect(), "postgresql": postgresql.dialect()}
TOKEN = "0123456789ab"
STAGED = f"Sales_TimeoutData_delayer_{TOKEN}"


def said(statement: object, dialect: str) -> str:
    return " ".join(str(statement.compile(dialect=DIALECTS[dialect])).split())  # type: ignore[attr-defined]


def bare(text: str) -> str:
    return text.translate(str.maketrans("", "", '"`[]')).replace(STAGED, "staged").replace("Sales_TimeoutData", "sales")


def table(
    schema: str | None = None,
    *,
    columns: tuple[str, ...] = COLUMNS,
    time: TypeEngine[datetime] | None = None,
    token: str = TOKEN,
    endpoint: str | None = None,
) -> TimeoutTable:
    types: dict[str, TypeEngine[object]] = {"state": LargeBinary(), "time": time or DateTime()}
    made = (Column(name, types.get(name.lower(), String(40))) for name in columns)
    return TimeoutTable(Table("Sales_TimeoutData", MetaData(), *made, schema=schema), token, endpoint)


def test_sql_server_takes_rows_with_their_locks_and_passes_locked_ones_over() -> None:
    text = said(table("dbo").take(RowFilter(NOON), None), "mssql")
    assert text.startswith(
        f"INSERT INTO dbo.[{STAGED}] ([Id], [Destination], [SagaId], [State], [Time], [Headers], [PersistenceVersion]) "
        "SELECT dbo.[Sales_TimeoutData].[Id], "
    )
    assert "FROM dbo.[Sales_TimeoutData] WITH (UPDLOCK, ROWLOCK, READPAST) WHERE " in text
    assert bare(text).endswith("WHERE dbo.sales.Time IS NOT NULL AND dbo.sales.Time > :Time_1")


def test_sql_server_limits_by_top() -> None:
    text = said(table().take(RowFilter(), 10), "mssql")
    assert "SELECT TOP " in text
    assert bare(text).endswith("ORDER BY sales.Time, sales.Id")
    assert "SELECT TOP " in said(table().batch(10), "mssql")


def test_the_staging_table_of_sql_server_has_the_order_of_reading() -> None:
    assert [bare(one) for one in table("dbo").create(DIALECTS["mssql"])] == [
        "SELECT * INTO dbo.staged FROM dbo.sales WHERE 1 = 0",
        "CREATE INDEX staged_ix ON dbo.staged (Time, Id)",
    ]


def test_sql_server_knows_the_sizes_of_the_soonest_rows() -> None:
    text = bare(said(table().sizes(DIALECTS["mssql"], 10, None), "mssql"))
    assert "SELECT TOP " in text
    assert " staged.Time, coalesce(datalength(staged.State), " in text
    assert " + coalesce(datalength(staged.Headers), " in text
    assert text.endswith("ORDER BY staged.Time, staged.Id")


def test_sql_server_counts_the_soonest_rows_by_destination() -> None:
    one = table()
    text = bare(said(one.goals(one.source, *one.meant(RowFilter()), limit=3), "mssql"))
    assert "SELECT TOP " in text
    assert "ORDER BY sales.Time, sales.Id) AS anon_1 GROUP BY anon_1.Destination" in text


@pytest.mark.parametrize("type_", [mssql.DATETIME2(7), DATETIME()])
def test_sql_server_resumes_at_the_exact_row(type_: TypeEngine[datetime]) -> None:
    """SQL Server compares a datetime2 parameter by more digits than the datetime column gave."""
    one, place = table(time=type_), (NOON, "x")
    for statement in (one.batch(10, place), one.remove(place, place)):
        text = re.sub(r"CAST\(:\w+ AS (DATETIME2\(7\)|DATETIME)\)", "cast", said(statement, "mssql"))
        assert text.count("[Time] >= cast") == 1
        assert len(re.findall(r"\[Time\] (<|>|<=|>=) cast", text)) == len(re.findall(r"\[Time\] [<>]", text)) > 1


def test_staged_rows_of_sql_server_are_deleted_and_put_back() -> None:
    forget = bare(table("t").forget(DIALECTS["mssql"]))
    assert forget == "DELETE FROM t.sales WHERE Id IN (SELECT Id FROM t.staged)"
    back = bare(said(table().give_back(), "mssql"))
    assert back.startswith("INSERT INTO sales (Id, Destination, SagaId, State, Time, Headers, ")
    assert back.endswith("FROM staged")


def test_each_run_has_a_table_of_its_own() -> None:
    """Two runs of two stores may begin at the same moment: every statement names only the run's own table."""
    for token in ("0123456789ab", "ba9876543210"):
        one, place = table("dbo", token=token), (NOON, "x")
        for name, dialect in DIALECTS.items():
            statements = (
                one.take(RowFilter(), None), one.batch(1, place), one.remove(place), one.give_back(),
                one.goals(one.staged), one.sizes(dialect, 1, place),
            )  # fmt: skip
            for text in (
                *one.create(dialect),
                one.forget(dialect),
                *(said(statement, name) for statement in statements),
            ):
                assert set(re.findall(r"_delayer_([0-9a-f]*)", text)) == {token}, text


@pytest.mark.parametrize("name", ["Sales_TimeoutData", "x" * 63, "Übergrößenträger_" * 6 + "TimeoutData", "é" * 40])
def test_names_of_staging_tables_fit_and_are_found(name: str) -> None:
    staged = staged_name(name, TOKEN)
    assert (staged_token(staged), staged_token(name)) == (TOKEN, "")
    assert len(f"{staged}_ix".encode()) <= 63
    assert staged_beside(name, ["Orders", staged, f"{name}x_delayer_{TOKEN}", name]) == [staged]
    assert staged_beside(f"{name}y", [staged]) == []


def test_long_names_with_the_same_beginning_have_tables_of_their_own() -> None:
    assert staged_name("x" * 60 + "a", "1") != staged_name("x" * 60 + "b", "1")


def test_an_endpoint_of_a_table_of_many() -> None:
    columns = ("id", "destination", "sagaid", "state", "endpoint", "time", "headers")
    text = said(table(columns=columns, endpoint="Sales").dues(RowFilter(), 1), "postgresql")
    assert 'WHERE "Sales_TimeoutData".time IS NOT NULL AND "Sales_TimeoutData".endpoint = %(endpoint_1)s' in text
    with pytest.raises(ImportImpossible, match="expected the columns of a timeout table, 'state' is missing"):
        table(columns=tuple(name for name in columns if name != "state"))
