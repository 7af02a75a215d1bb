"""`delayer audit` from end to end: its output, exit codes and files, and the secrets that must not be in them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from delayer.audit import compact, extract, job, rules, source, tasks
from delayer.audit.errors import JobFailed
from delayer.audit.findings import AuditReport
from delayer.audit.tasks import StageWatcher
from delayer.cli import submit
from delayer.cli.main import cli
from delayer.core.secret import SecretUrl
from tests.audit.test_job_parts import java
from tests.audit.test_reading import execute, fill, load, pack, take
from tests.support.daemon import EXECUTABLE

PASSWORD = "hunter2-in-the-url"
ODD = r"work [1] of {'us'}*?\%20"
"""A name of a directory, with signs of SQL, of URLs and of patterns."""
FEW = ("--conf", "spark.sql.shuffle.partitions=4")
"""Spark's default is 200 for spark-submit, and ours is 32 here: most of the time of a job with 3,000 messages."""


def options(url: str, **more: Any) -> job.Options:
    return replace(job.Options(store=SecretUrl(url)), **more)


def audit(spark: SparkSession, url: str, **more: Any) -> AuditReport:
    return job.run(spark, options(url, **more), lambda _what, _done, _of: None)


def violated(report: AuditReport) -> dict[str, int]:
    return {rule.rule: rule.violations for rule in report.rules if rule.violations}


@pytest.fixture
def filled(database: str) -> str:
    fill(database)
    return database


# ---- the job


def test_a_sound_store_has_no_violations(spark: SparkSession, filled: str, tmp_path: Path) -> None:
    pack(filled)
    work = tmp_path / ODD
    told: list[tuple[str, int, int]] = []
    report = job.run(spark, options(filled, work=str(work)), lambda *words: told.append(words))
    assert violated(report) == {}
    assert report.past is None
    assert report.totals.waiting + report.totals.packed == 3000
    assert report.totals.held == 2
    assert report.totals.expected == report.totals.waiting
    assert sum(share.messages for share in report.calendar.destinations) == 3000
    (asked,) = [run for run in report.rules if run.rule == "destinations"]
    assert asked.skipped.startswith("not asked for 3,002 of 3,002 messages"), "held ones have destinations too"
    assert "--no-broker" in asked.skipped
    assert list(work.iterdir()) == []
    # The progress counts the tasks.
    names = [name for name, _, _ in told]
    assert "reading message" in names
    assert "judging" in names
    assert any(of > 0 for _, _, of in told)
    assert all(0 <= done <= of for _, done, of in told)


def test_many_tasks_are_several_queries_with_results_in_order(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "AT_ONCE", 3)
    portions = [[n, n + 1] for n in range(0, 14, 2)]
    told: list[tuple[str, int, int]] = []
    found = tasks.run(spark, "doubling", portions, lambda some: [2 * n for n in some], lambda *one: told.append(one))
    assert found == list(range(0, 28, 2))
    assert {name for name, _, _ in told} == {"doubling"}
    assert tasks.run(spark, "nothing", [], lambda some: some, lambda *_: None) == []


@contextmanager
def busy(spark: SparkSession, cores: int = 2) -> Iterator[None]:
    """Another job has all cores."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:
        server.settimeout(60.0)
        place = server.getsockname()

        def wait(batches: Iterable[Any]) -> Iterator[Any]:
            with socket.create_connection(place) as until_closed:
                until_closed.recv(1)
            yield from batches

        other = thread.submit(spark.range(0, cores, 1, cores).mapInArrow(wait, "id long").collect)
        with ExitStack() as stack:
            for _ in range(cores):
                stack.enter_context(server.accept()[0])
            yield
        assert len(other.result()) == cores


def test_a_job_without_an_executor_ends_before_it_takes_a_snapshot(
    spark: SparkSession, filled: str, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "EXECUTOR_SECONDS", 0.5)
    monkeypatch.setattr(extract, "hold_snapshot", lambda _: pytest.fail("it took a snapshot"))
    planned = compact.CompactionPlan(0, 0, (), 0)
    with busy(spark):
        with pytest.raises(JobFailed, match=r"no worker offered an executor of 1g and 1 core within 0 s\. Next: "):
            audit(spark, filled, work=work)
        with pytest.raises(JobFailed, match="no worker offered an executor"):
            compact.run(spark, filled, planned, 250, lambda *_: None)


# ---- secrets


def secret(url: str) -> str:
    return url.replace("@", f":{PASSWORD}@")


def test_the_password_is_nowhere(
    spark: SparkSession, filled: str, work: str, capfd: pytest.CaptureFixture[str]
) -> None:
    url = secret(filled)
    pack(filled)
    report = rules.judge(take(spark, url, work), options(url))
    frame = load(spark, url, "message").where("id > 5")
    frame.collect()
    frame.explain("extended")
    frame.explain("formatted")
    frame.explain("codegen")
    told = capfd.readouterr()
    plan = str(frame._jdf.queryExecution().toString())
    assert "delayer" in plan
    conf = spark.sparkContext.getConf()
    places = [work, conf.get("spark.local.dir"), urlsplit(conf.get("spark.eventLog.dir")).path]
    files = [content for place in places for content in contents(Path(str(place)))]
    assert len(files) > 10
    seen = [told.out, told.err, plan, str(conf.getAll()), report.to_json(), *pages(spark)]
    assert not [text for text in seen if PASSWORD in text]
    assert not [content for content in files if PASSWORD.encode() in content]
    # The search works: it finds other words.
    assert any("reading message" in text for text in seen)
    assert any(b"reading message" in content for content in files)


def contents(directory: Path) -> Iterator[bytes]:
    """The contents of all files, except those Spark removes while we read."""
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                yield path.read_bytes()


def pages(spark: SparkSession) -> Iterator[str]:
    """The pages of Spark, as every visitor sees them."""
    context = spark.sparkContext
    base = context.uiWebUrl
    assert base is not None
    api = f"/api/v1/applications/{context.applicationId}"
    executions = json.loads(opened(f"{base}{api}/sql?details=true&planDescription=true&length=1000"))
    yield json.dumps(executions)
    for path in ("/jobs/", "/stages/", "/storage/", "/environment/", "/executors/", "/SQL/", f"{api}/environment"):
        yield opened(base + path)
    for execution in executions[-20:]:
        yield opened(f"{base}/SQL/execution/?id={execution['id']}")


def opened(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def test_errors_do_not_quote_the_url(spark: SparkSession, filled: str, work: str) -> None:
    missing = secret(filled).replace(urlsplit(filled).path, "/no_such_database")
    spark.dataSource.register(source.data_source_for(SecretUrl(missing)))
    read = spark.read.format("delayer").option("relation", "held")
    with pytest.raises(Exception, match="no_such_database") as raised, StageWatcher(spark, lambda *_: None)("reading"):
        read.load().collect()
    chain = [raised.value, raised.value.__cause__, raised.value.__context__]
    assert PASSWORD not in "".join(f"{one!r} {getattr(one, '_desc', '')}" for one in chain)
    assert PASSWORD not in repr(source.data_source_for(SecretUrl(missing)).__dict__)
    assert PASSWORD not in repr(source.StoreReader({"relation": "held"}, SecretUrl(missing))._reading)


# ---- the command


def delayer(*arguments: str, program: list[str] | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    ours = {
        name: value for name, value in os.environ.items() if not name.startswith(("DELAYER_", "PYSPARK_", "SPARK_"))
    } | {"SPARK_SUBMIT_OPTS": os.environ["SPARK_SUBMIT_OPTS"]}
    return subprocess.run(
        [*(program or [str(EXECUTABLE)]), *arguments],
        env=ours | environ, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip


def test_the_command(filled: str, tmp_path: Path) -> None:
    file, page, work = (tmp_path / name for name in ("url", "backlog.html", ODD))
    file.write_text(secret(filled))
    given = ["--set", f"store.url_file={file}", "audit", "--deep", "--no-broker", "--work", str(work)]
    spark = ["--conf", "spark.driver.memory=768m", "--conf", "spark.log.level=INFO", *FEW]
    done = delayer(*given, *spark, "--html", str(page))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3,000 wait" in done.stdout
    assert PASSWORD not in done.stdout + done.stderr
    assert "<html" in page.read_text()
    assert list(work.iterdir()) == []


def test_the_command_by_spark_submit_with_a_violation(filled: str, tmp_path: Path) -> None:
    execute(filled, "DELETE FROM message WHERE id = 17")
    starter = Path(sys.executable).parent / "spark-submit"
    program = [str(starter), "--master", "local[2]", "--driver-memory", "768m", *FEW, submit.__file__]
    environ = {"PYSPARK_PYTHON": sys.executable, "DELAYER_STORE__URL": secret(filled)}
    work = tmp_path / ODD
    done = delayer("audit", "--deep", "--json", "--no-broker", "--work", str(work), program=program, **environ)
    assert done.returncode == 1, done.stderr
    *_, last = done.stdout.splitlines()  # spark-submit sends stderr there too
    assert "conservation" in [run["rule"] for run in json.loads(last)["rules"] if run["violations"]]
    assert PASSWORD not in done.stdout + done.stderr
    assert list(work.iterdir()) == []
    assert list(tmp_path.iterdir()) == [work], "the extract was in another directory"


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--no-broker"], 3, "the store is out of reach"),
        (["--html", "/nowhere/page.html"], 2, "there is no directory"),
        (["--master", "spark://nowhere:7077"], 2, "--work is needed"),
        (["--work", "/nowhere/work"], 2, "--work /nowhere/work: expected a directory"),
        (["--sample", "0"], 2, "--sample"),
        (["--conf", "nonsense"], 2, "expected KEY=VALUE"),
    ],
    ids=lambda value: "" if isinstance(value, int | str) else value[0],
)
def test_bad_options_are_reported_before_spark_starts(
    arguments: list[str], code: int, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    java(tmp_path, 'openjdk version "17.0.1"')  # Spark cannot start with it.
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    url = "postgresql://u:hunter2@127.0.0.1:1/d"
    idle = SparkSession.getActiveSession() is None
    result = CliRunner().invoke(cli, ["--store-url", url, "audit", "--deep", *arguments], prog_name="delayer")
    assert (SparkSession.getActiveSession() is None) == idle, "a session was started, or ended"
    assert (result.exit_code, told in result.output) == (code, True), result.output
    assert "hunter2" not in result.output


def test_no_java_is_exit_3_and_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    result = CliRunner().invoke(cli, ["audit", "--deep"], prog_name="delayer")
    assert result.exit_code == 3, result.output
    assert "default-jre-headless" in result.output
