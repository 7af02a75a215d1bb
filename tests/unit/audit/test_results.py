"""`delayer audit --results`: what is appended, what is refused, and what a killed audit leaves."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from delayer import __version__
from delayer.audit import results
from delayer.audit.dataset import DatasetNotWritten, Unfit
from delayer.core.secret import SecretUrl
from tests.unit.audit import audit_reports
from tests.unit.audit.audit_reports import NOW_MS, RULES

STORE = SecretUrl("postgresql://me:hunter2@db:5432/delayer?sslmode=require")
KILLED = """
import os, signal, sys
from pathlib import Path
from delayer.audit import results
from tests.unit.audit.test_results import STORE, audit_reports

Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
results.append(Path(sys.argv[1]), audit_reports.full(), STORE)
"""


def append(where: Path, quick: bool = False) -> None:
    results.check(where)
    results.append(where, replace(audit_reports.full(), quick=quick), STORE)


def test_each_run_appends_a_row_for_each_rule(tmp_path: Path) -> None:
    where = tmp_path / "audits"
    append(where)
    append(where, quick=True)
    [deep, quick] = sorted(
        (pq.read_table(file).to_pylist() for file in where.iterdir()), key=lambda it: not it[0]["deep"]
    )
    assert [row["rule"] for row in deep] == [row["rule"] for row in quick] == list(RULES)
    report = audit_reports.full()
    for row in deep:
        found = [one for one in report.findings if one.rule == row["rule"]]
        worst = next((name for name in ("violation", "warning") if any(one.severity == name for one in found)), None)
        assert (row["severity"] == worst) or row["rule"] == "overdue", "which has warnings that are not listed"
        assert row["time"].timestamp() * 1000 == NOW_MS
        assert (row["store"], row["version"], row["seconds"]) == ("db:5432/delayer", __version__, 41.7)
    [repeats] = [row for row in deep if row["rule"] == "repeats"]
    assert repeats["skipped"] == "a sample was read, and this rule needs the whole store"
    totals = report.totals
    assert deep[0]["rows_read"] - quick[0]["rows_read"] == totals.packed
    assert quick[0]["rows_read"] == totals.waiting + totals.held
    assert len({row["run"] for row in (*deep, *quick)}) == 2


def test_other_columns_are_refused_and_both_sides_named(tmp_path: Path) -> None:
    append(tmp_path)
    other = pa.schema(
        [
            field.with_type(pa.string()) if field.name == "count" else field.with_nullable(True)
            for field in results.COLUMNS.append(pa.field("owner", pa.string()))
            if field.name != "deep"
        ]
    )
    pq.write_table(other.empty_table(), tmp_path / "0.parquet")
    with pytest.raises(Unfit) as raised:
        results.check(tmp_path)
    expected, _, found = str(raised.value).partition("found: ")
    assert "0.parquet: expected the columns of delayer" in expected
    for text in ("deep bool not null", "count int64 not null"):
        assert text in expected
    for text in ("owner string", "count string", "Next: name a new directory"):
        assert text in found
    assert "severity" not in str(raised.value), "which is the same"


def test_columns_in_another_order_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.schema(list(results.COLUMNS)[::-1]).empty_table(), tmp_path / "0.parquet")
    with pytest.raises(Unfit, match="the same in another order"):
        results.check(tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("notes.txt", "found notes.txt"), ("a.parquet", "found no Parquet file"), ("folder", "found folder")],
)
def test_foreign_files_are_refused(tmp_path: Path, name: str, reason: str) -> None:
    if name == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text("mine")
    with pytest.raises(Unfit, match=reason):
        results.check(tmp_path)


def test_a_place_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(Unfit, match="found a file"):
        results.check(tmp_path / "file")
    for place in (tmp_path / "none" / "audits", Path("s3://bucket/audits")):
        with pytest.raises(Unfit, match="there is no directory"):
            results.check(place)


def test_a_killed_audit_leaves_nothing_that_a_reader_takes_for_data(tmp_path: Path) -> None:
    append(tmp_path)
    before = pq.read_table(next(tmp_path.iterdir())).num_rows
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2, "the killed one left a part"
    assert ds.dataset(tmp_path).count_rows() == before
    with duckdb.connect() as duck:
        assert duck.sql(f"SELECT count(*) FROM '{tmp_path}/*.parquet'").fetchall() == [(before,)]
    append(tmp_path)
    assert ds.dataset(tmp_path).count_rows() == 2 * before


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results.pq, "write_table", full)
    with pytest.raises(DatasetNotWritten, match="No space left"):
        append(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_store_whose_url_is_ambiguous_is_masked() -> None:
    assert results.place_of(SecretUrl("postgresql://me:pass word@db/delayer")) == "***"
    assert results.place_of(SecretUrl("postgresql://me:pass?host=word@db/delayer")) == "***"
    assert results.place_of(SecretUrl("postgresql:///delayer?host=/run/postgresql")) == "/run/postgresql/delayer"
