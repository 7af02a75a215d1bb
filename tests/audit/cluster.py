"""A cluster on this machine: Spark's standalone master and workers. Each executor is a separate JVM.

    with Cluster() as cluster:
        delayer("audit", "--deep", "--master", cluster.url, "--work", work, **cluster.environment)

Only jobs of other processes can use it: a session of this process keeps its first master.
"""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil
import pyspark

from tests.support import ports, reaper
from tests.support.processes import Family, clean_environment, make_directory, remove_directory

HOME: Final = Path(pyspark.__file__).parent
_SETTINGS: Final[Mapping[str, str]] = {
    "spark.driver.host": ports.HOST,
    "spark.driver.bindAddress": ports.HOST,
    "spark.driver.memory": "768m",
    "spark.executor.cores": "1",  # so that a worker of two cores has two executors
    "spark.executor.memory": "768m",
    "spark.ui.enabled": "false",
}
_EXECUTOR: Final = "CoarseGrainedExecutorBackend"
START_SECONDS: Final = 90.0


class Cluster:
    """A master and ``workers``, each with ``executors`` cores, one for each executor."""

    def __init__(self, executors: int = 2, workers: int = 1) -> None:
        self._executors, self._workers = executors, workers
        self._directory = make_directory()
        self._port, self._page = ports.reserve(), ports.reserve()
        self._families: list[Family] = []
        self._settings = self._directory / "settings"
        self._settings.mkdir()
        lines = [f"{name} {value}\n" for name, value in _SETTINGS.items()]
        (self._settings / "spark-defaults.conf").write_text("".join(lines))

    @property
    def url(self) -> str:
        """For ``--master``."""
        return f"spark://{ports.HOST}:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that a job needs on so small a cluster."""
        return {"SPARK_CONF_DIR": str(self._settings)}

    def with_fault(self, fault: str, settings: Path) -> dict[str, str]:
        """The environment of a job whose executors have this fault; ``settings`` is its own directory."""
        settings.mkdir(exist_ok=True)
        given = (self._settings / "spark-defaults.conf").read_text()
        (settings / "spark-defaults.conf").write_text(f"{given}spark.executorEnv.DELAYER_FAULT {fault}\n")
        return {"SPARK_CONF_DIR": str(settings)}

    def executors(self) -> list[psutil.Process]:
        """The JVMs of the running executors."""
        found = []
        for pid in (pid for family in self._families for pid in family.pids()):
            try:
                process = psutil.Process(pid)
                if any(_EXECUTOR in word for word in process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def connected_to(self, port: int) -> list[int]:
        """The pids of executors connected to this port, directly or through their Python workers."""
        return [one.pid for one in self.executors() if any(_connected(each, port) for each in reaper.family(one.pid))]

    def kill_executor(self, pid: int | None = None) -> None:
        """Send SIGKILL to an executor and its Python workers, like a power cut of one machine."""
        reaper.send(reaper.family(pid or self.executors()[0].pid), signal.SIGKILL)

    def __enter__(self) -> Self:
        try:
            at = ["--host", ports.HOST, "--port", str(self._port), "--webui-port", str(self._page)]
            self._start("master.Master", at).wait_ready(
                lambda: self._alive() is not None, "Spark's master", START_SECONDS
            )
            size = ["--host", ports.HOST, "--cores", str(self._executors), "--memory", f"{self._executors}g"]
            for n in range(1, self._workers + 1):
                worker = self._start("worker.Worker", [*size, "--webui-port", "0", self.url], f"-{n}")
                worker.wait_ready(lambda count=n: self._alive() == count, "Spark's worker", START_SECONDS)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop all processes, including executors, and delete their files."""
        for family in reversed(self._families):
            family.kill()
        self._families.clear()
        remove_directory(self._directory)

    def _start(self, of: str, arguments: list[str], mark: str = "") -> Family:
        name = of.partition(".")[0] + mark
        environment = clean_environment("SPARK_", "PYSPARK_", "DELAYER_") | {
            "SPARK_HOME": str(HOME),
            "SPARK_LOCAL_IP": ports.HOST,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_WORKER_DIR": str(self._directory / f"work{mark}"),
            "SPARK_LOCAL_DIRS": str(self._directory / "scratch"),
        }
        (self._directory / "scratch").mkdir(exist_ok=True)
        argv = [HOME / "bin" / "spark-class", f"org.apache.spark.deploy.{of}", *arguments]
        family = Family(argv, env=environment, cwd=self._directory, log=self._directory / f"{name}.log")
        self._families.append(family)
        return family

    def _alive(self) -> int | None:
        """The number of workers that the master knows; None until it answers."""
        try:
            with urllib.request.urlopen(f"http://{ports.HOST}:{self._page}/json/", timeout=5) as answer:
                found: int = json.load(answer)["aliveworkers"]
        except OSError:
            return None
        return found


def _connected(process: psutil.Process, port: int) -> bool:
    try:
        return any(one.raddr and one.raddr.port == port for one in process.net_connections("tcp"))
    except psutil.NoSuchProcess:
        return False
