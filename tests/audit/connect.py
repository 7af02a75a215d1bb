"""A Spark Connect server on this machine, for jobs with ``--remote``."""

from __future__ import annotations

import os
import socket
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.audit.cluster import HOME, START_SECONDS
from tests.support import ports
from tests.support.processes import Family, clean_environment, make_directory, remove_directory

_SETTINGS = {
    "spark.connect.grpc.binding.address": ports.HOST,
    "spark.driver.host": ports.HOST,
    "spark.driver.bindAddress": ports.HOST,
    "spark.sql.shuffle.partitions": "4",
    "spark.log.level": "INFO",
}


class Server:
    """A running server. ``log``: what it has logged."""

    def __init__(self, directory: Path) -> None:
        self.port, self._page = ports.reserve(), ports.reserve()
        self.url = f"sc://{ports.HOST}:{self.port}"
        settings = _SETTINGS | {
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.ui.port": str(self._page),
            "spark.sql.warehouse.dir": str(directory / "warehouse"),
            "spark.local.dir": str(directory),
        }
        conf = [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]
        argv = [HOME / "bin" / "spark-submit", "--master", "local[2,4]", "--driver-memory", "768m", *conf]
        environment = clean_environment("SPARK_", "PYSPARK_", "DELAYER_") | {
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_SUBMIT_OPTS": os.environ["SPARK_SUBMIT_OPTS"],
        }
        self.family = Family(
            [*argv, "--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"],
            env=environment, cwd=directory, log=directory / "server.log",
        )  # fmt: skip

    @property
    def log(self) -> str:
        return self.family.log.read_text(errors="replace")

    def pages(self) -> str:
        """What its web interface shows of the queries."""
        found = ""
        for path in ("connect/", "SQL/", "jobs/", "environment/"):
            with urllib.request.urlopen(f"http://{ports.HOST}:{self._page}/{path}", timeout=30) as answer:
                found += answer.read().decode()
        return found

    def accepts(self) -> bool:
        with suppress(OSError), socket.create_connection((ports.HOST, self.port), 1.0):
            return True
        return False


@contextmanager
def server() -> Iterator[Server]:
    directory = make_directory()
    started = Server(directory)
    try:
        started.family.wait_ready(started.accepts, "Spark Connect", START_SECONDS)
        yield started
    finally:
        started.family.kill()
        remove_directory(directory)
