"""The statements that move timeouts, as each database gets them. PostgreSQL and MariaDB run them for real elsewhere."""

from __future__ import annotations

import re
from datetime import datetime

import pytest
from sqlalchemy import DATETIME, Dialect
from sqlalchemy.dialects import mssql, mysql, postgresql

from delayer.imports.statements import Layout, Moving, Pick, Place, clock, is_staged, staged_beside, staged_name

COLUMNS = ("Id", "Destination", "SagaId", "State", "Time", "Headers", "PersistenceVersion")
NOON = datetime(2031, 1, 31, 12)  # noqa: DTZ001 - the columns have no zone
DIALECTS: dict[str, Dialect] = {"mssql": mssql.dialect(), "mysql": mysql.dialect(), "postgresql": postgresql.dialect()}


def said(statement: object, dialect: str) -> str:
    return " ".join(str(statement.compile(dialect=DIALECTS[dialect])).split())  # type: ignore[attr-defined]


def moving(schema: str | None = None) -> Moving:
    return Moving("Sales_TimeoutData", schema, COLUMNS, Layout())


def test_sql_server_takes_rows_with_their_locks_and_passes_locked_ones_over() -> None:
    assert said(moving("dbo").take(Pick(NOON), None), "mssql") == (
        "INSERT INTO [dbo].[Sales_TimeoutData_delayer] ([Id], [Destination], [SagaId], [State], [Time], [Headers], "
        "[PersistenceVersion]) SELECT [dbo].[Sales_TimeoutData].[Id], [dbo].[Sales_TimeoutData].[Destination], "
        "[dbo].[Sales_TimeoutData].[SagaId], [dbo].[Sales_TimeoutData].[State], [dbo].[Sales_TimeoutData].[Time], "
        "[dbo].[Sales_TimeoutData].[Headers], [dbo].[Sales_TimeoutData].[PersistenceVersion] "
        "FROM [dbo].[Sales_TimeoutData] WITH (UPDLOCK, ROWLOCK, READPAST) "
        "WHERE [dbo].[Sales_TimeoutData].[Time] IS NOT NULL AND [dbo].[Sales_TimeoutData].[Time] > :Time_1"
    )


def test_sql_server_limits_by_top() -> None:
    text = said(moving().take(Pick(), 10), "mssql")
    assert "SELECT TOP " in text
    assert text.endswith("ORDER BY [Sales_TimeoutData].[Time], [Sales_TimeoutData].[Id]")
    assert "SELECT TOP " in said(moving().beside.batch(10), "mssql")


def test_sql_server_makes_the_table_beside_it() -> None:
    assert said(moving("dbo").beside.create(), "mssql") == (
        "SELECT * INTO [dbo].[Sales_TimeoutData_delayer] FROM [dbo].[Sales_TimeoutData] WHERE 1 = 0"
    )
    assert said(moving("dbo").beside.index(), "mssql") == (
        "CREATE INDEX [Sales_TimeoutData_delayer_ix] ON [dbo].[Sales_TimeoutData_delayer] ([Time], [Id])"
    )
    assert said(moving("dbo").beside.drop(), "mssql") == "DROP TABLE [dbo].[Sales_TimeoutData_delayer]"


@pytest.mark.parametrize(
    ("dialect", "create"),
    [
        ("postgresql", 'CREATE TABLE "Sales_TimeoutData_delayer" (LIKE "Sales_TimeoutData")'),
        ("mysql", "CREATE TABLE `Sales_TimeoutData_delayer` LIKE `Sales_TimeoutData`"),
    ],
)
def test_the_others_lock_by_the_statement(dialect: str, create: str) -> None:
    assert said(moving().beside.create(), dialect) == create
    assert said(moving().take(Pick(), 5), dialect).endswith("FOR UPDATE SKIP LOCKED")
    assert "WITH (" not in said(moving().take(Pick(), None), dialect)


@pytest.mark.parametrize(("dialect", "length"), [("mssql", "datalength"), ("mysql", "octet_length")])
def test_what_the_next_rows_weigh(dialect: str, length: str) -> None:
    size = f"coalesce({length}(x.State), 0) + coalesce({length}(x.Headers), 0)"

    def bare(statement: object) -> str:
        return (
            said(statement, dialect).translate(str.maketrans("", "", '"`[]')).replace("Sales_TimeoutData_delayer", "x")
        )

    assert f"max({size})" in bare(moving().beside.largest(dialect))
    text = bare(moving().beside.sizes(dialect, 10, Place(NOON, "a")))
    assert f"{size} AS " in text
    assert "FROM x WHERE x.Time >= " in text
    assert "ORDER BY x.Time, x.Id" in text


def test_mysql_keeps_the_rows_in_the_order_of_the_batches() -> None:
    one = Moving("Sales`TimeoutData", "t", COLUMNS, Layout())
    assert said(one.beside.bare(["Index_SagaId", "Index_Time"]), "mysql") == (
        "ALTER TABLE `t`.`Sales``TimeoutData_delayer` DROP INDEX `Index_SagaId`, DROP INDEX `Index_Time`"
    )
    assert said(one.beside.cluster(), "mysql") == (
        "ALTER TABLE `t`.`Sales``TimeoutData_delayer` DROP PRIMARY KEY, ADD PRIMARY KEY (`Time`, `Id`)"
    )


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_batch_is_removed_by_the_place_of_its_last_row(dialect: str) -> None:
    bare = said(moving().beside.remove(Place(NOON, "x"), Place(NOON, "a")), dialect).translate(
        str.maketrans("", "", '"`[]')
    )
    table = "Sales_TimeoutData_delayer"
    assert bare.startswith(f"DELETE FROM {table} WHERE {table}.Time <= ")
    assert f"({table}.Time < " in bare
    assert f"OR {table}.Id <= " in bare
    assert f"AND {table}.Time >= " in bare


def test_sql_server_finds_the_place_of_a_row_again() -> None:
    """It compares a parameter, which is a datetime2, with a datetime by more digits than the datetime was read with."""
    place = Place(NOON, "x")
    for type_ in (mssql.DATETIME2(7), DATETIME()):
        one = Moving("Sales_TimeoutData", None, COLUMNS, Layout(), type_)
        for statement in (one.beside.batch(10, place), one.beside.remove(place, place)):
            text = said(statement, "mssql")
            bare = re.sub(r"CAST\(:\w+ AS (DATETIME2\(7\)|DATETIME)\)", "cast", text)
            assert bare.count("[Time] >= cast") == 1
            assert len(re.findall(r"\[Time\] (<|>|<=|>=) cast", bare)) == len(re.findall(r"\[Time\] [<>]", bare)) > 1


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        (
            "mysql",
            "DELETE t.Sales_TimeoutData FROM t.Sales_TimeoutData_delayer STRAIGHT_JOIN t.Sales_TimeoutData "
            "ON t.Sales_TimeoutData.Id = t.Sales_TimeoutData_delayer.Id",
        ),
        *(
            (
                name,
                "DELETE FROM t.Sales_TimeoutData WHERE t.Sales_TimeoutData.Id IN "
                "(SELECT t.Sales_TimeoutData_delayer.Id FROM t.Sales_TimeoutData_delayer)",
            )
            for name in ("postgresql", "mssql")
        ),
    ],
)
def test_what_was_copied_is_forgotten_and_comes_back(dialect: str, expected: str) -> None:
    bare = said(moving("t").forget(dialect), dialect).translate(str.maketrans("", "", '"`[]'))
    assert bare == expected
    back = said(moving().give_back(), dialect).translate(str.maketrans("", "", '"`[]'))
    assert back.startswith("INSERT INTO Sales_TimeoutData (Id, Destination, SagaId, State, Time, Headers, ")
    assert back.endswith("FROM Sales_TimeoutData_delayer")


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        ("mssql", "SELECT sysutcdatetime() AS"),
        ("mysql", "SELECT utc_timestamp(3) AS"),
        ("postgresql", "SELECT timezone('UTC', clock_timestamp()) AS"),
    ],
)
def test_whose_clock_it_goes_by(dialect: str, expected: str) -> None:
    assert said(clock(dialect), dialect).startswith(expected)
    text = said(moving("dbo").beside.spare(NOON), dialect).translate(str.maketrans("", "", '"`[]'))
    assert text.startswith("DELETE FROM dbo.Sales_TimeoutData_delayer WHERE dbo.Sales_TimeoutData_delayer.Time <= ")


def test_no_run_has_anothers_table() -> None:
    """Two that begin at the same moment, from two stores: whatever they say, they say it of tables of their own."""
    one, other = (
        Moving("Sales_TimeoutData", "dbo", COLUMNS, Layout(), token=token) for token in ("0123456789ab", "ba9876543210")
    )
    place = Place(NOON, "x")
    for of in (one, other):
        beside = of.beside
        token = beside.table.name.rpartition("_")[2]
        for dialect in DIALECTS:
            mysql_only = [beside.bare(["x"]), beside.cluster()] if dialect == "mysql" else []
            for statement in (
                beside.create(), beside.index(), of.take(Pick(), None), of.forget(dialect), beside.batch(1, place),
                beside.sizes(dialect, 1), beside.largest(dialect), beside.remove(place), beside.count(),
                of.give_back(), beside.empty(), beside.drop(), beside.goals(), beside.looks(), *mysql_only,
            ):  # fmt: skip
                text = said(statement, dialect)
                assert set(re.findall(r"_delayer\w*?_([0-9a-f]{12})", text)) == {token}, text
                assert "_delayer." not in text
    assert said(one.take(Pick(), None), "mssql").startswith(
        "INSERT INTO [dbo].[Sales_TimeoutData_delayer_0123456789ab] ("
    )


@pytest.mark.parametrize("name", ["Sales_TimeoutData", "x" * 63, "Übergrößenträger_" * 6 + "TimeoutData", "é" * 40])
@pytest.mark.parametrize("token", ["", "0123456789ab"])
def test_names_of_tables_beside_fit_and_are_found(name: str, token: str) -> None:
    staged = staged_name(name, token)
    assert is_staged(staged)
    assert len(f"{staged}_ix".encode()) <= 63
    assert staged_beside(name, ["Orders", staged, f"{name}x_delayer", name]) == [staged]
    assert staged_beside(f"{name}y", [staged]) == []
    assert not is_staged(name)


def test_long_names_with_the_same_beginning_have_tables_of_their_own() -> None:
    assert staged_name("x" * 60 + "a", "1") != staged_name("x" * 60 + "b", "1")
    assert staged_name("Sales_TimeoutData", "") == "Sales_TimeoutData_delayer", "as it was before there were tokens"


def test_an_endpoint_of_a_table_of_many() -> None:
    columns = ("id", "destination", "sagaid", "state", "endpoint", "time", "headers")
    layout = Layout(endpoint="Endpoint").of(columns)
    assert layout == Layout("id", "destination", "state", "time", "headers", "endpoint")
    text = said(Moving("timeoutentity", None, columns, layout).goals(Pick(endpoint="Sales")), "postgresql")
    assert 'WHERE "timeoutentity"."time" IS NOT NULL AND "timeoutentity"."endpoint" = %(endpoint_1)s' in text
    with pytest.raises(KeyError, match="state"):
        Layout().of([name for name in columns if name != "state"])
