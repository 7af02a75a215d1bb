"""One Spark session for a whole run of the tests.

A JVM takes 4 s and half a gigabyte, so only one worker of pytest-xdist should have one. tests/conftest.py gives all
tests of this directory to the same worker. Long tests without Spark belong elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from delayer.audit import spark as sessions
from delayer.audit.errors import JobImpossible

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVENTS = "spark-events"


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Two cores of this machine, and up to four tries of a task. Spark's pages, on a loopback port, and its event log
    let a test search them for secrets."""
    events = tmp_path_factory.mktemp(EVENTS)
    more = {
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.sql.shuffle.partitions": "4",
        "spark.driver.memory": "768m",
    }
    work = tmp_path_factory.mktemp("spark")
    try:
        with sessions.session("delayer tests", master="local[2,4]", work=str(work), more=more) as session:
            yield session
    except JobImpossible as error:
        pytest.skip(f"{error} Or: .ci/setup servers")


@pytest.fixture
def work(tmp_path: Path) -> str:
    """A directory for the extract of a job."""
    made = tmp_path / "work"
    made.mkdir()
    return str(made)
