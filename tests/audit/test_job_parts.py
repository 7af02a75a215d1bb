"""The parts of a job that need neither Spark nor a server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from delayer.audit import connection, extract, job, restore, spark
from delayer.audit.errors import JobFailed, JobImpossible, JobMisused
from delayer.audit.tasks import failure
from delayer.core.errors import StoreLost
from delayer.core.secret import SecretUrl
from delayer.store.segments.catalog import SegmentEntry


@pytest.mark.parametrize(
    ("told", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ("Unable to locate a Java Runtime", None),
        ("", None),
    ],
)
def test_java_versions(told: str, version: int | None) -> None:
    assert spark.version_of(told) == version


def java(directory: Path, prints: str) -> Path:
    made = directory / "bin" / "java"
    made.parent.mkdir()
    made.write_text(f"#!/bin/sh\necho '{prints}' >&2\n")
    made.chmod(0o755)
    return made


def test_java_is_found_as_spark_finds_it(tmp_path: Path) -> None:
    found = java(tmp_path, 'openjdk version "17.0.1"')
    spark.check_java({"JAVA_HOME": str(tmp_path), "PATH": "/bin:/usr/bin"})
    spark.check_java({"PATH": f"{found.parent}:/bin"})


def test_java_that_is_too_old_says_so(tmp_path: Path) -> None:
    java(tmp_path, 'java version "11.0.2"')
    with pytest.raises(JobImpossible, match="Java 11 is too old: Spark needs Java 17"):
        spark.check_java({"JAVA_HOME": str(tmp_path), "PATH": "/bin:/usr/bin"})


def test_a_java_home_without_java_is_named(tmp_path: Path) -> None:
    found = java(tmp_path, 'openjdk version "17.0.1"')
    with pytest.raises(JobImpossible, match=r"JAVA_HOME=/nope has no bin/java, .* Next: unset JAVA_HOME"):
        spark.check_java({"JAVA_HOME": "/nope", "PATH": f"{found.parent}:/bin"})


@pytest.mark.parametrize(
    ("master", "local"),
    [
        ("local", True),
        ("local[*]", True),
        ("local[2,4]", True),
        ("spark://a:7077", False),
        ("yarn", False),
        (None, False),
    ],
)
def test_local_masters(master: str | None, local: bool) -> None:
    assert spark.is_local(master) is local
    assert spark.is_local(spark.with_retries("local[2]"))


@pytest.mark.parametrize("module", ["source", "tasks", "compact"])
def test_executors_import_few_modules(module: str) -> None:
    """Each process of Spark imports them before its first row: pandas and the settings took half a second more."""
    look = f"import sys, delayer.audit.{module}; print(*{{'pandas', 'pydantic'}} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert told.stdout.split() == []


def test_a_cluster_needs_a_place_that_its_machines_share() -> None:
    spark.check_work(None, None)
    spark.check_work("yarn", "hdfs://cluster/tmp")
    with pytest.raises(JobMisused, match="--work"):
        spark.check_work("spark://host:7077", None)


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("file", "File exists"),
        ("file/work", "Not a directory"),
        ("none/work", "No such file or directory"),
        ("/proc", "No such file or directory"),
        ("n" * 300, "File name too long"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, place: str, why: str) -> None:
    (tmp_path / "file").touch()
    work = str(tmp_path / place)
    for use in (
        lambda: spark.check_work("spark://host:7077", work),
        extract.workplace(work).__enter__,
        spark._scratch("local[*]", work).__enter__,
    ):
        with pytest.raises(JobMisused, match=f"--work .*: expected a directory, or a new one .*: {why}"):
            use()
    assert [one.name for one in tmp_path.iterdir()] == ["file"], "a mistyped path leaves nothing"


def test_a_new_place_is_made_and_left_empty(tmp_path: Path) -> None:
    spark.check_work(None, str(tmp_path / "work"))
    assert list(tmp_path.glob("**/*")) == [tmp_path / "work"]
    spark.check_work("yarn", "hdfs://[")


def test_a_comma_would_scatter_what_spark_spills(tmp_path: Path) -> None:
    with pytest.raises(JobMisused, match="expected a path without commas"), spark._scratch("local", f"{tmp_path}/a,b"):
        pytest.fail("Spark would make the directory a")


def test_the_master_of_spark_submit_needs_a_shared_place_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job knows this master only from the session."""
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    spark.check_work(None, None)
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(master="spark://host:7077"))
    with pytest.raises(JobMisused, match="--work is needed with the master spark://host:7077"):
        job.run(session, job.Options(SecretUrl("postgresql://nowhere/none")), lambda *_: None)


@pytest.mark.parametrize(
    ("master", "error", "text"),
    [
        ("nonsense", JobMisused, "expected local"),
        ("spark://127.0.0.1:1", JobFailed, r"spark://127.0.0.1:1 is out of reach: .* refused\. Next: check --master"),
        ("spark://127.0.0.1:1,127.0.0.1:70000", JobFailed, "out of reach: Port out of range"),
    ],
)
def test_an_unreachable_master_is_named(master: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text), spark.session("x", master=master):
        pytest.fail("a session was made")


def test_the_master_is_an_option_and_no_setting() -> None:
    with pytest.raises(JobMisused, match="expected --master"), spark.session("x", more={"spark.master": "yarn"}):
        pytest.fail("a session was made")


@pytest.mark.parametrize(
    ("master", "more", "environment", "expected"),
    [
        ("local[*]", {"spark.pyspark.python": "/there"}, "/chosen", sys.executable),
        ("yarn", {}, None, sys.executable),
        ("yarn", {}, "/chosen", "/chosen"),
        ("yarn", {"spark.pyspark.python": "/there"}, "/chosen", "/there"),
        (None, {"spark.pyspark.python": "/there"}, None, "/there"),
    ],
)
def test_the_python_of_the_workers(
    monkeypatch: pytest.MonkeyPatch, master: str | None, more: dict[str, str], environment: str | None, expected: str
) -> None:
    monkeypatch.setenv("PYSPARK_DRIVER_PYTHON", "")
    monkeypatch.setenv("PYSPARK_PYTHON", environment or "")
    if environment is None:
        monkeypatch.delenv("PYSPARK_PYTHON")
    spark._point_to_python(master, more)
    assert os.environ["PYSPARK_PYTHON"] == expected


def test_only_on_this_machine_are_pages_off_and_the_logging_ours() -> None:
    here, there = spark.settings("local[*]", "/w", {}), spark.settings("yarn", "/w", {})
    assert (here["spark.ui.enabled"], here["spark.local.dir"]) == ("false", "/w")
    assert not {"spark.ui.enabled", "spark.local.dir", "spark.driver.extraJavaOptions"} & set(there)
    assert (there["spark.log.level"], "spark.log.level" in spark.settings(None, None, {})) == ("ERROR", False)
    assert spark.settings("yarn", "/w", {"spark.log.level": "WARN"})["spark.log.level"] == "WARN"
    assert spark.settings("local[*]", None, {"spark.ui.enabled": "true"})["spark.ui.enabled"] == "true"


@pytest.mark.parametrize("handing_out", [True, False])
def test_a_jvm_that_reads_rows_is_compiled_well(handing_out: bool) -> None:
    options = "spark.driver.extraJavaOptions"
    here = spark.settings("local[*]", None, {}, handing_out=handing_out)[options]
    assert ("TieredStopAtLevel" in here) is handing_out
    assert "log4j2" in here
    assert options not in spark.settings("yarn", None, {}, handing_out=handing_out)


@pytest.mark.parametrize("module", ["pyspark", "pyarrow", "pandas", "adbc_driver_postgresql"])
def test_a_package_that_is_missing_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spark.check_packages()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(JobImpossible, match=module):
        spark.check_packages()


async def test_restore_needs_pyarrow_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    planned = restore.RestorePlan(0, [SegmentEntry(1, 0, 0, 0, 1, 1, 1, None)])
    with pytest.raises(StoreLost, match="pyarrow") as lost:
        await restore.run("postgresql://nowhere/none", planned, lambda *_: None)
    assert lost.value.advice.startswith("install delayer[segments]")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("postgresql://u:p%40ss@h:5/db", "postgresql://u:p%40ss@h:5/db?application_name=x"),
        ("postgresql://h/db?sslmode=require", "postgresql://h/db?application_name=x&sslmode=require"),
        ("postgresql://h/db?application_name=y", "postgresql://h/db?application_name=y"),
        ("postgresql:///?host=/run/pg&database=db", "postgresql:///?application_name=x&host=%2Frun%2Fpg&dbname=db"),
        (
            "postgresql://h/db?search_path=my own&work_mem=64MB",
            "postgresql://h/db?application_name=x&options=-c%20search_path%3Dmy%5C%20own%20-c%20work_mem%3D64MB",
        ),
    ],
)
def test_urls_for_libpq(given: str, expected: str) -> None:
    found = connection.libpq_url(given, "x")
    for ours in ("&connect_timeout=10", "&keepalives_idle=5", "&keepalives_interval=2", "&keepalives_count=3"):
        assert ours in found
        found = found.replace(ours, "")
    assert found == expected


def test_a_task_that_lost_the_store_is_a_loss_of_the_store() -> None:
    text = (
        "Job aborted due to stage failure: ... Traceback (most recent call last):\n"
        '  File "source.py", line 9, in read\n'
        "delayer.core.errors.StoreLost: message_p1: canceling statement due to conflict with recovery\n"
        "\tat org.apache.spark..."
    )
    found = failure("reading messages", text)
    assert isinstance(found, StoreLost)
    assert str(found) == "message_p1: canceling statement due to conflict with recovery"
    assert "hot_standby_feedback" in found.advice


def test_any_other_failure_is_one_line_without_passwords() -> None:
    text = "Job aborted\nTraceback:\n  File x\nValueError: what is postgresql://u:secret@h/db\n\tat org.apache"
    found = failure("judging", text)
    assert isinstance(found, JobFailed)
    assert str(found) == "judging: ValueError: what is postgresql://u:***@h/db"
    assert str(failure("judging", "Java heap space\n\tat x")) == "judging: Java heap space"


LOST_TASK = (
    "An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.\n"
    ": org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times, most "
    "recent failure: Lost task 0.3 in stage 0.0 (TID 3) (192.0.2.2 executor 1): {}\n"
    "\tat java.base/java.lang.Thread.run\n"
)


NEXT_PYTHON = (
    "Next: does every machine have a Python of this version with delayer[spark]? --conf spark.pyspark.python=… says "
    "where it is; with --remote, PYSPARK_PYTHON of the server"
)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (
            'java.io.IOException: Cannot run program "/nowhere/python": error=2, No such file or directory',
            'packing: java.io.IOException: Cannot run program "/nowhere/python": error=2, No such file or directory. '
            f"{NEXT_PYTHON}",
        ),
        (
            "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
            "  File x, line 1\nModuleNotFoundError: No module named 'pyarrow'\n",
            f"packing: ModuleNotFoundError: No module named 'pyarrow'. {NEXT_PYTHON}",
        ),
        (
            "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
            "  File x, line 1\npyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in "
            "worker has different version: 3.12 than that in driver: 3.11, PySpark cannot run with different minor "
            "versions.\nPlease check environment variables PYSPARK_PYTHON and PYSPARK_DRIVER_PYTHON are correctly set.",
            "packing: pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker "
            "has different version: 3.12 than that in driver: 3.11, PySpark cannot run with different minor versions. "
            f"{NEXT_PYTHON}",
        ),
        (
            "ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: OOM",
            "packing: ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: OOM",
        ),
        (
            "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
            "  File x, line 1\nValueError: no such thing\n",
            "packing: ValueError: no such thing",
        ),
    ],
)
def test_the_reason_of_a_failed_task_is_reported(reason: str, expected: str) -> None:
    assert str(failure("packing", LOST_TASK.format(reason))) == expected


@pytest.mark.parametrize(
    ("told", "java", "expected"),
    [
        (
            "[TABLE_OR_VIEW_NOT_FOUND] The table or view `x` cannot be found. SQLSTATE: 42P01; line 1 pos 14;\n'P",
            "sql.AnalysisException",
            "judging: [TABLE_OR_VIEW_NOT_FOUND] The table or view `x` cannot be found. SQLSTATE: 42P01; line 1 pos 14;",
        ),
        (
            "(org.apache.spark.SparkException) Job 3 cancelled",
            "SparkException",
            "judging: (org.apache.spark.SparkException) Job 3 cancelled",
        ),
        (
            "Job aborted\nTraceback (most recent call last):\n  File x, line 1\nAssertionError\n",
            "api.python.PythonException",
            "judging: AssertionError",
        ),
    ],
)
def test_the_stack_of_a_server_does_not_hide_its_message(told: str, java: str, expected: str) -> None:
    """As Spark Connect's client prints an error of Spark 4.3."""
    text = f"{told}\n\nJVM stacktrace:\norg.apache.spark.{java}\n\tat org.apache.spark.x(X.scala:1)\n"
    assert str(failure("judging", text)) == expected
