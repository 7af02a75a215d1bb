"""Spark reads the waiting messages and the results of audits that delayer wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from delayer.audit import results
from tests.audit.compacting import run_delayer
from tests.integration.test_backlog_export import assert_same, by_id, expected, fill
from tests.support.store import sql
from tests.support.tables import BACKLOG, RESULTS, contract, run_examples
from tests.unit.audit import audit_reports
from tests.unit.audit.test_results import STORE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.deadline(180)
@pytest.mark.parametrize("form", ["parquet", "delta"])
async def test_spark_reads_the_dataset(
    spark: SparkSession, database: str, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Delta table by the files that its log names: Delta's own package for Spark is not from PyPI."""
    where = str(tmp_path / "backlog")
    async with sql(database) as admin:
        there = await fill(admin)
    code, _, told = await run_delayer(database, "backlog", "export", where, "--format", form, "--bodies")
    assert code == 0, told
    files = [where] if form == "parquet" else DeltaTable(where).file_uris()
    found = spark.read.option("basePath", where).parquet(*files)
    assert found.dtypes == [(one.name, one.type) for one in contract(BACKLOG)]
    assert_same(by_id(found.toArrow().to_pylist()), {id_: expected(row, bodies=True) for id_, row in there.items()})
    word, path = ("spark.conf", "/srv/backlog") if form == "parquet" else ("basePath", "/srv/backlog-delta")
    capsys.readouterr()
    assert run_examples(BACKLOG, word, {path: Path(where)}, spark=spark.newSession()) == 1, "with settings of its own"
    assert ("orders.eu" if form == "parquet" else f"{len(there)} messages") in capsys.readouterr().out


def test_spark_reads_the_results_of_audits(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "audits"
    report = audit_reports.full()
    for _ in range(2):
        results.append(where, report, STORE)
    (where / ".delayer-0.part").write_text("of a killed audit")
    found = spark.read.parquet(str(where))
    assert found.dtypes == [(one.name, one.type) for one in contract(RESULTS)]
    assert found.count() == 2 * len(report.rules)
    assert run_examples(RESULTS, "spark.read", {"/srv/audits": where}, spark=spark) == 1
    told = capsys.readouterr().out
    assert told.count("db:5432/delayer") == 2 * len([one for one in report.rules if one.severity])
