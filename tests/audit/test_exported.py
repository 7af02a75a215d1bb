"""Spark reads what `delayer backlog export` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from tests.audit.compacting import run_delayer
from tests.integration.test_backlog_export import assert_same, by_id, expected, fill
from tests.support.store import sql

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.deadline(180)
@pytest.mark.parametrize("form", ["parquet", "delta"])
async def test_spark_reads_the_dataset(spark: SparkSession, database: str, tmp_path: Path, form: str) -> None:
    """A Delta table by the files that its log names: Delta's own package for Spark is not from PyPI."""
    where = str(tmp_path / "backlog")
    async with sql(database) as admin:
        there = await fill(admin)
    code, _, told = await run_delayer(database, "backlog", "export", where, "--format", form, "--bodies")
    assert code == 0, told
    files = [where] if form == "parquet" else DeltaTable(where).file_uris()
    found = spark.read.option("basePath", where).parquet(*files).toArrow().to_pylist()
    assert_same(by_id(found), {id_: expected(row, bodies=True) for id_, row in there.items()})
