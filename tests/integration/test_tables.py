"""docs/tables.md is what the commands write: names, types and nulls of every column, and its examples."""

from __future__ import annotations

import csv
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from delayer.audit.delta import PARTITIONED_BY
from tests.integration.test_backlog_export import Run, delayer, fill
from tests.support.rows import everything, put
from tests.support.store import sql
from tests.support.tables import BACKLOG, LEFT, RESULTS, Column, contract, run_examples

__all__ = ["delayer"]
pytestmark = pytest.mark.deadline(180)
TYPES = {
    pa.string(): "string", pa.int64(): "bigint", pa.bool_(): "boolean", pa.float64(): "double", pa.date32(): "date",
    pa.binary(): "binary", pa.timestamp("us", "UTC"): "timestamp",
}  # fmt: skip
DAYS = ds.partitioning(PARTITIONED_BY, flavor="hive")


def columns(table: pa.Table) -> list[tuple[str, str]]:
    return [(field.name, TYPES[field.type]) for field in table.schema]


def documented(title: str) -> list[tuple[str, str]]:
    return [(name, kind) for name, kind, _ in contract(title)]


def unexpected_nulls(table: pa.Table, columns: list[Column]) -> list[str]:
    return [one.name for one in columns if not one.nullable and table[one.name].null_count]


async def broken(admin: Any, there: dict[int, Any]) -> None:
    """A message without anything that may be missing, and one whose properties cannot be decoded."""
    plain, odd = list(there.values())[:2]
    await put(admin, [
        plain._replace(id=900_001, route=b"", exchange=b"", key=None, body=b"", properties=b"\x00\x00"),
        odd._replace(id=900_002, key=None, properties=b"\xff"),
    ])  # fmt: skip


async def test_the_backlog_is_as_documented(
    database: str, delayer: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    where, table, bodies = tmp_path / "backlog", tmp_path / "delta", tmp_path / "bodies"
    async with sql(database) as admin:
        await broken(admin, await fill(admin))
        there = await everything(admin)
    delayer("backlog", "export", str(where))
    delayer("backlog", "export", str(bodies), "--bodies")
    delayer("backlog", "export", str(table), "--format", "delta", "--bodies")
    assert all(field.nullable for field in ds.dataset(bodies).schema), "OPTIONAL"
    for found in (
        ds.dataset(where, partitioning=DAYS).to_table(),
        ds.dataset(bodies, partitioning=DAYS).to_table(),
        DeltaTable(table).to_pyarrow_table(),
    ):
        has_body = "body" in found.schema.names
        assert columns(found) == [one for one in documented(BACKLOG) if has_body or one[0] != "body"]
        assert found.num_rows == len(there)
        expected = [one for one in contract(BACKLOG) if has_body or one.name != "body"]
        assert unexpected_nulls(found, expected) == []
        unused = {one.name for one in expected if one.nullable and not found[one.name].null_count}
        assert unused == set(), "columns that are never null are promised as such"
    delayer("cancel", "--all", "--yes")
    delayer("backlog", "export", str(table), "--format", "delta", "--bodies")
    with (table / "_left.csv").open(newline="") as file:
        header, *gone = csv.reader(file)
    assert [(name, kind, False) for name, kind in zip(header, ("bigint", "timestamp", "string"), strict=True)] == [
        tuple(one) for one in contract(LEFT)
    ]
    assert {int(id_) for id_, _, _ in gone} == set(there)
    assert all(datetime.fromisoformat(due_at).tzinfo for _, due_at, _ in gone)

    paths = {"/srv/backlog-delta": table, "/srv/backlog": where}
    capfd.readouterr()
    assert run_examples(BACKLOG, "duckdb", paths) == 1
    assert "orders.eu" in capfd.readouterr().out
    assert run_examples(BACKLOG, "table.version", paths) == 1
    assert capfd.readouterr().out == "0 messages in version 1\n"


async def test_the_results_of_audits_are_as_documented(
    database: str, delayer: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "audits"
    async with sql(database) as admin:
        await fill(admin, 500)
        await admin.execute("DELETE FROM message WHERE id = (SELECT min(id) FROM message)")
    delayer("audit", "--no-broker", "--results", str(where), expect=1)
    delayer("audit", "--no-broker", "--results", str(where), expect=1)
    found = ds.dataset(where).to_table()
    assert columns(found) == documented(RESULTS)
    assert [field.nullable for field in found.schema] == [one.nullable for one in contract(RESULTS)]
    assert len(set(found["run"].to_pylist())) == 2
    assert [(row["severity"], row["count"]) for row in found.to_pylist() if row["rule"] == "conservation"] == [
        ("violation", 2)
    ] * 2, "in the findings of its lane and of all lanes"
    assert run_examples(RESULTS, "duckdb", {"/srv/audits": where}) == 1
    told = capfd.readouterr().out
    assert "conservation" in told
    assert "violation" in told
    (where / "notes.txt").write_text("mine")
    refused = delayer("audit", "--no-broker", "--results", str(where), expect=2)
    assert "--results" in refused.stderr
    assert "found notes.txt" in refused.stderr
    assert refused.stdout == "", "before the audit"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from delayer.cli import options
    from delayer.cli.main import cli

    monkeypatch.setattr(options, "find_spec", lambda _name: None)
    arguments = ["--store-url", "postgresql://nowhere/d", "audit", "--no-broker", "--results", str(tmp_path)]
    result = CliRunner().invoke(cli, arguments, prog_name="delayer")
    assert (result.exit_code, "install delayer[segments]" in result.output) == (3, True), result.output
