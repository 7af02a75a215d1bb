"""The store's password is nowhere while compact works: processes, logs, Spark's pages and files, errors."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from pyspark.sql import SparkSession

from delayer.audit import compact
from delayer.audit.errors import JobFailed
from delayer.core.errors import StoreLost
from tests.audit.compacting import FEW, ROWS, WEEK_MS, command, fault, filled, pack, until_quiet
from tests.audit.test_job import PASSWORD, contents, pages, secret

pytestmark = pytest.mark.deadline(300)


@contextmanager
def process_list(root: int) -> Iterator[set[str]]:
    """The command lines of a process and its descendants during the block, as every user of the machine sees them."""
    seen: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            with suppress(psutil.NoSuchProcess):
                for process in [one := psutil.Process(root), *one.children(recursive=True)]:
                    with suppress(psutil.NoSuchProcess):
                        seen.add(" ".join(process.cmdline()))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        over.set()
        looking.join()


async def test_the_password_is_not_visible_during_a_job(
    spark: SparkSession, database: str, capfd: pytest.CaptureFixture[str]
) -> None:
    conf = spark.sparkContext.getConf()
    places = [Path(urlsplit(conf.get("spark.eventLog.dir") or "").path), Path(conf.get("spark.local.dir") or "")]
    with process_list(os.getpid()) as processes:
        async with filled(database, FEW):
            with fault(spark, "compact.locked"), pytest.raises(JobFailed) as failed:
                await pack(spark, secret(database))
            await until_quiet(database, "delayer compact")  # else rows locked by dead sessions would stay rows
            # Messages that other tasks had packed before the failure stay packed.
            assert 0 < (await pack(spark, secret(database))).totals["messages"] <= FEW
    told = capfd.readouterr()
    error = "".join(f"{one!r}{one}" for one in (failed.value, failed.value.__cause__, failed.value.__context__))
    seen = [told.out, told.err, error, str(conf.getAll()), *processes, *pages(spark)]
    files = [content for place in places for content in contents(place)]
    assert not [text for text in seen if PASSWORD in text]
    assert not [one for one in files if PASSWORD.encode() in one]
    # The search works: it finds other words.
    assert any("packing" in text for text in seen)
    assert any(b"packing" in one for one in files)
    assert any("pyspark.daemon" in text for text in processes)


async def test_errors_do_not_quote_the_url(database: str) -> None:
    """Neither errors of the driver nor errors of an executor quote it."""
    nowhere = secret(database).replace(urlsplit(database).path, "/no_such_database")
    with pytest.raises(StoreLost) as planned:
        await compact.plan(nowhere, WEEK_MS, ROWS)
    window = compact.CompactionWindow(1, 0, 1, 1)
    [packed] = await asyncio.to_thread(compact.work, nowhere, ROWS, 1, [window])
    assert "no_such_database" in str(packed.lost)
    assert PASSWORD not in f"{planned.value!r}{planned.value}{planned.value.__cause__!r}{packed!r}"


async def test_the_command_does_not_show_the_password(database: str, tmp_path: Path) -> None:
    """The command gets the URL as a service does. No process list, output or file of it has the password."""
    async with filled(database, FEW):
        more = {"TMPDIR": str(tmp_path), "SPARK_LOCAL_DIRS": str(tmp_path)}
        log = {"enabled": "true", "dir": tmp_path.as_uri(), "compress": "false"}
        conf = [word for name, value in log.items() for word in ("--conf", f"spark.eventLog.{name}={value}")]
        arguments = ["compact", "--rows", "250", "--master", "local[2]", *conf]
        async with command(secret(database), *arguments, fault="", **more) as process:
            with process_list(process.pid) as processes:
                stdout, stderr = await process.communicate()
        assert process.returncode == 0, stderr.decode()
    assert re.search(rb"(1,[89]\d\d|2,000) messages", stdout)  # A compaction leaves the last few of a lane as rows.
    assert any("java" in text for text in processes)
    left = list(contents(tmp_path))
    assert any(b"SparkListenerJobEnd" in one for one in left)  # Spark's settings were in force
    assert not [text for text in processes if PASSWORD in text]
    assert not [text for text in [stdout, stderr, *left] if PASSWORD.encode() in text]
