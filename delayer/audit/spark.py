"""A job's Spark session: on this machine by default, quiet, and rejected with a reason if it cannot start.

No setting here may contain the store's URL, because Spark shows its settings in its pages, event log and plans.
delayer/audit/source.py explains how the URL reaches the executors.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from delayer.audit import tasks
from delayer.audit.errors import JobFailed, JobImpossible, JobMisused

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_NEEDED: Final = 17
_LOGGING: Final = Path(__file__).with_name("log4j2.properties")

# A JVM that only schedules tasks exits before C2 pays off, and JIT threads would take cores from the tasks. For 100
# tasks it used about 10 s of processor time with this option, and 21 s without.
_BRIEF: Final = "-XX:TieredStopAtLevel=1"

OF_SESSIONS: Final[Mapping[str, str]] = {
    "spark.sql.session.timeZone": "UTC",
    # Limit one exchange between the JVM and a Python worker, so that large rows do not add up.
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(10_000),
    "spark.sql.execution.arrow.maxBytesPerBatch": str(16 << 20),
    "spark.sql.parquet.compression.codec": "zstd",
}
_EVERYWHERE: Final[Mapping[str, str]] = {
    **OF_SESSIONS,
    "spark.ui.showConsoleProgress": "false",
    # Spark's default plus URLs, so that pages never show a URL in one of Spark's settings.
    "spark.redaction.regex": "(?i)secret|password|passwd|token|credential|access[.]?key|url",
}
_HERE: Final[Mapping[str, str]] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",  # Every client that reaches the machine can read the page. --conf turns it on.
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.shuffle.partitions": "32",  # The rules took 17 s for 3,000 messages; with Spark's default of 200, 26 s.
}


def is_local(master: str | None) -> bool:
    """Whether driver and executors share this machine, and so its disk."""
    return master is not None and master.partition("[")[0] in ("local", "local-cluster")


def with_retries(master: str | None) -> str:
    """Return Spark's master (None: all local cores). ``local[N]`` gets four attempts per task, as a worker may die."""
    cores = {None: "*", "local": "1"}.get(master)
    if cores is None and (match := re.fullmatch(r"local\[(\*|\d+)\]", master or "")):
        cores = match[1]
    return str(master) if cores is None else f"local[{cores},4]"


def submitted() -> bool:
    """Whether spark-submit started this process. If so, the JVM is running and has its master."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def check_reachable(what: str, hosts: Iterable[str], option: str) -> None:
    """Raise JobFailed unless one of ``hosts`` (HOST:PORT) accepts a connection. Spark itself gives up only after
    minutes and a hundred log lines."""
    reason: Exception | None = None
    for host in hosts:
        try:
            at = urlsplit(f"//{host}")
            socket.create_connection((at.hostname, at.port), 5.0).close()
        except (OSError, ValueError) as error:
            reason = error
        else:
            return
    raise JobFailed(f"{what} is out of reach: {reason}. Next: check {option}, and that Spark runs there")


def is_url(work: str) -> bool:
    """Whether ``work`` is a URL of shared storage, and not a path on this machine."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", work) is not None


def check_work(master: str | None, work: str | None) -> None:
    """Raise JobMisused if driver and executors would write to different disks, or the driver cannot write to
    ``work``."""
    if master is not None and not is_local(master) and work is None:
        raise JobMisused(f"--work is needed with the master {master}: a directory or URL that all machines share")
    if work is not None and not is_url(work):
        make_directory("delayer-spark-", work).cleanup()


def make_directory(prefix: str, work: str | None) -> tempfile.TemporaryDirectory[str]:
    """Create a directory for this user only below ``work``, a path; None means the system's directory for temporary
    files. Creates ``work`` if its parent exists. Raises JobMisused."""
    try:
        if work is not None:
            Path(work).mkdir(exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=prefix, dir=work, ignore_cleanup_errors=True)
    except OSError as error:
        where = "the directory for temporary files" if work is None else f"--work {work}"
        raise JobMisused(f"{where}: expected a directory, or a new one whose parent exists: {error.strerror}") from None


def settings(
    master: str | None, work: str | None, more: Mapping[str, str], *, handing_out: bool = False
) -> dict[str, str]:
    """Build Spark's settings for a job. ``work``: a local directory for spilled data. ``more`` overrides.
    ``handing_out``: no row of the store passes through the JVM."""
    found = dict(_EVERYWHERE)
    if is_local(master):
        found |= _HERE
        logging = f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}"
        found["spark.driver.extraJavaOptions"] = f"{_BRIEF} {logging}" if handing_out else logging
        if work is not None and not is_url(work):
            found |= {"spark.local.dir": work, "spark.sql.warehouse.dir": str(Path(work) / "warehouse")}
    elif master is not None:  # spark-submit has settings of its own.
        found["spark.log.level"] = "ERROR"
    return found | dict(more)


@contextmanager
def session(
    name: str,
    *,
    master: str | None = None,
    work: str | None = None,
    more: Mapping[str, str] | None = None,
    handing_out: bool = False,
) -> Iterator[SparkSession]:
    """Open a session that retries tasks when their worker dies, and stop it on exit.

    ``master`` None means spark-submit's, or else all cores of this machine. For the rest, see :func:`settings`. Raises
    JobImpossible, JobMisused, JobFailed, StoreLost.
    """
    check_machine()
    more = more or {}
    if "spark.master" in more:  # It would bypass the checks above.
        raise JobMisused("--conf spark.master: expected --master")
    chosen = None if master is None and submitted() else with_retries(master)
    if chosen is not None and not re.match(r"local\b|local-cluster\[|spark://|k8s://|yarn$", chosen):
        raise JobMisused(f"--master {chosen}: expected local[N], spark://HOST:PORT, yarn or k8s://…")
    if chosen is not None and chosen.startswith("spark://"):
        check_reachable(f"Spark's master {chosen}", chosen.removeprefix("spark://").split(","), "--master")
    _point_to_python(chosen, more)
    from py4j.protocol import Py4JError  # noqa: PLC0415
    from pyspark.errors import PySparkException  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    with _scratch(chosen, work) as scratch:
        builder = SparkSession.builder.appName(name)
        if chosen is not None:
            builder = builder.master(chosen)
        for key, value in settings(chosen, scratch, more, handing_out=handing_out).items():
            builder = builder.config(key, value)
        try:
            spark = builder.getOrCreate()
        except (PySparkException, Py4JError, RuntimeError) as error:
            raise tasks.failure(f"Spark did not start with master {chosen}", tasks.told_by(error)) from None
        except (SystemExit, KeyboardInterrupt):
            _end_children()
            raise
        _hush(spark)
        try:
            with tasks.translated("Spark"):
                yield spark
        finally:
            with suppress(Py4JError, OSError):  # systemd stops the JVM together with us, which leaves nothing to stop.
                spark.stop()


@contextmanager
def _scratch(master: str | None, work: str | None) -> Iterator[str | None]:
    """Create a directory on this machine for Spark's spilled data, which includes keys and destinations."""
    if not is_local(master) or submitted():
        yield None
        return
    with make_directory("delayer-spark-", None if work is None or is_url(work) else work) as made:
        if "," in made:
            raise JobMisused(
                f"{Path(made).parent}: expected a path without commas, because Spark splits it there. "
                "Next: choose another --work, or another TMPDIR"
            )
        yield made


def _hush(spark: SparkSession) -> None:
    """Keep PySpark's traceback off stderr if the JVM exits before this process, as when systemd stops us."""
    server: Any = spark.sparkContext._accumulatorServer
    tell = server.handle_error

    def handle_error(request: object, address: object) -> None:
        if not isinstance(sys.exception(), EOFError | ConnectionError):
            tell(request, address)

    server.handle_error = handle_error
    # Py4J's log records of a lost JVM and of Ctrl-C are tracebacks that repeat the error Py4J raises.
    logging.root.addFilter(lambda record: not str(record.msg).endswith("while sending command."))


def _end_children() -> None:
    """Terminate the JVM that PySpark is starting, which would otherwise wait for us forever. PySpark does not report
    its process id yet, but Linux lists a thread's children, and this thread has no others."""
    with suppress(OSError):
        for pid in Path("/proc/thread-self/children").read_text().split():
            os.kill(int(pid), signal.SIGTERM)


def end_machine(spark: SparkSession) -> None:
    """Stop the JVM that this process started, with its tasks, and wait for it. Leaves spark-submit's JVM running."""
    gateway = spark.sparkContext._gateway
    process = getattr(gateway, "proc", None)  # A subprocess.Popen, if launch_gateway started it.
    if process is None:
        return
    process.terminate()  # A kill would leave the JVM's spilled files behind.
    try:
        # Seconds for a JVM to exit by itself.
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def check_machine() -> None:
    """Raise JobImpossible unless a session can start."""
    check_packages()
    if not submitted():
        check_java(os.environ)


def check_packages(*more: str) -> None:
    """Raise JobImpossible unless the extra is installed, and the modules ``more``."""
    for module in ("pyspark", "pyarrow", "pandas", "adbc_driver_postgresql", *more):
        if find_spec(module) is None:  # Do not import: pandas takes most of a second, and not every job needs it.
            raise JobImpossible(
                f"the Python package {module} is missing: audit --deep and compact are an extra. "
                "Next: pip install '.[spark]' in delayer's checkout, or the wheel with [spark] behind its name."
            )


def check_java(environ: Mapping[str, str]) -> None:
    """Raise JobImpossible unless Spark supports the Java that it would start."""
    version = None
    home = environ.get("JAVA_HOME")  # If it is set, Spark's scripts look for java only there.
    java = shutil.which("java", path=str(Path(home, "bin")) if home else environ.get("PATH"))
    if java is None and home:
        raise JobImpossible(
            f"JAVA_HOME={home} has no bin/java, and Spark looks nowhere else. Next: unset JAVA_HOME, or set it to a "
            f"Java {JAVA_NEEDED} or later."
        )
    if java is not None:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, env=dict(environ))
        version = version_of(told.stderr + told.stdout)
    if version is None or version < JAVA_NEEDED:
        what = "Java is missing" if version is None else f"Java {version} is too old"
        raise JobImpossible(
            f"{what}: Spark needs Java {JAVA_NEEDED} or later. Next: install it (Debian and Ubuntu: "
            "apt install default-jre-headless; Fedora and RHEL: dnf install java-21-openjdk-headless), or set "
            "JAVA_HOME to where it is."
        )


def version_of(told: str) -> int | None:
    """Parse the major version from ``java -version``: 17 from "17.0.15", 8 from "1.8.0_402"; None if absent."""
    match = re.search(r'version "(?:1\.)?(\d+)', told)
    return int(match[1]) if match else None


def _point_to_python(master: str | None, more: Mapping[str, str]) -> None:
    """Make the workers run this interpreter, because the ``python3`` on the path may lack our packages. On a cluster
    the administrator's choice wins, as this path may not exist there. PySpark reads only the environment."""
    if is_local(master):
        os.environ["PYSPARK_PYTHON"] = sys.executable
    elif "spark.pyspark.python" in more:
        os.environ["PYSPARK_PYTHON"] = more["spark.pyspark.python"]
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
