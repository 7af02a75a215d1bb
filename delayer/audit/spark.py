"""The Spark session of a job: on this machine unless told otherwise, quiet, and refused with a reason if it cannot be.

Nothing here or in what is handed to Spark may contain the store's URL: Spark shows its settings in its pages, its event
log and its plans. See delayer/audit/source.py for how the URL travels.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from delayer.audit.errors import JavaMissing, JobMisused, SparkMissing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXTRACT: Final = "delayer-audit-"
SCRATCH: Final = "delayer-spark-"
_LOCK: Final = ".lock"
_BOOT, _MACHINE = Path("/proc/sys/kernel/random/boot_id"), Path("/etc/machine-id")


class Origin(NamedTuple):
    """Where a run is, or was: the host's name, the identity of the machine's installation ("" where it has none, as in
    most containers), and what its kernel called this run of itself."""

    host: str
    machine: str
    boot: str

    @classmethod
    def here(cls) -> Origin:
        return cls(socket.gethostname(), _first_line(_MACHINE), _first_line(_BOOT))

    @classmethod
    def read(cls, content: bytes) -> Origin | None:
        """What :meth:`written` gave; None for anything else."""
        parts = content.decode(errors="replace").split("\n")
        return cls(*parts) if len(parts) == 3 else None

    def written(self) -> bytes:
        return "\n".join(self).encode()

    def sees(self, other: Origin) -> bool:
        """Whether a free lock of ``other`` means that it is dead: both have one kernel, which knows; or it is this
        machine, by more than its name, before it was started again."""
        if self.boot and self.boot == other.boot:
            return True
        return bool(self.machine) and (self.host, self.machine) == (other.host, other.machine)


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError):  # there is none
        return ""


@contextmanager
def scratch_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """A fresh directory below ``parent``, after what dead runs left there is gone. Raises OSError."""
    sweep(parent)
    lock, held = _locked(parent, prefix)
    made = lock.with_name(lock.name.removesuffix(_LOCK))
    try:
        made.mkdir(mode=0o700)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        if not made.exists():
            lock.unlink(missing_ok=True)
        os.close(held)


def sweep(parent: Path) -> list[Path]:
    """Remove what dead runs on this machine left below ``parent``; which directories that were."""
    gone = []
    here = Origin.here()
    locks = [path for prefix in (EXTRACT, SCRATCH) for path in parent.glob(f"{prefix}*{_LOCK}")]
    for lock in sorted(locks):
        try:
            held = _hold(lock)
        except OSError:  # another user's, or just removed
            continue
        if held is None:
            continue
        try:
            origin = Origin.read(os.pread(held, 1024, 0))
            if os.fstat(held).st_uid != os.geteuid() or origin is None or not here.sees(origin):
                continue
            left = lock.with_name(lock.name.removesuffix(_LOCK))
            shutil.rmtree(left, ignore_errors=True)
            # What a JVM in its last moments wrote behind our back is left to the next run.
            if not left.exists():
                lock.unlink(missing_ok=True)
                gone.append(left)
        finally:
            os.close(held)
    return gone


def _locked(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new lock, held. It has its content before it has its name: one without is nobody's."""
    handle, name = tempfile.mkstemp(prefix=f".{prefix}", dir=parent)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.write(handle, Origin.here().written())
    made = Path(name)
    lock = made.with_name(f"{made.name.removeprefix('.')}{_LOCK}")
    made.rename(lock)
    return lock, handle


def _hold(lock: Path) -> int | None:
    """The lock, held; None where somebody else holds it. Raises OSError."""
    handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


JAVA_NEEDED: Final = 17
LOCAL: Final = "local[*]"
_LOGGING: Final = Path(__file__).with_name("log4j2.properties")

# A JVM that hands out tasks, and works on none of their rows, is done before compiling it well has paid for itself; and
# that takes the cores which the tasks want.
_BRIEF: Final = "-XX:TieredStopAtLevel=1"

# Bounds of what one exchange between the JVM and a Python worker holds: rows of any size must not add up.

_EVERYWHERE: Final[Mapping[str, str]] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(10_000),
    "spark.sql.execution.arrow.maxBytesPerBatch": str(16 << 20),
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.ui.showConsoleProgress": "false",
    # Spark's own default, and URLs: whoever puts one into a setting of Spark's must not find it on a page.
    "spark.redaction.regex": "(?i)secret|password|passwd|token|credential|access[.]?key|url",
}
_HERE: Final[Mapping[str, str]] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",  # a page that anybody who reaches the machine can read; --conf turns it on
    "spark.sql.catalogImplementation": "in-memory",
}


def is_local(master: str | None) -> bool:
    """Whether driver and executors are on this machine: a path on its disk is known to all of them."""
    return master is not None and master.partition("[")[0] in ("local", "local-cluster")


def submitted() -> bool:
    """Whether spark-submit started this process: the JVM is there already, and knows its master."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def check_work(master: str | None, work: str | None) -> None:
    """Raise JobMisused where driver and executors would write to different disks."""
    chosen = master if master is not None or submitted() else LOCAL
    if chosen is not None and not is_local(chosen) and work is None:
        raise JobMisused(f"--work is needed with the master {chosen}: a directory or URL that all machines share")


def settings(
    master: str | None, work: str | None, more: Mapping[str, str], *, handing_out: bool = False
) -> dict[str, str]:
    """Spark's settings for a job. ``work``: a local directory for what Spark spills. ``more`` wins. ``handing_out``: no
    row of the store passes through the JVM."""
    found = dict(_EVERYWHERE)
    if is_local(master):
        found |= _HERE
        logging = f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}"
        found["spark.driver.extraJavaOptions"] = f"{_BRIEF} {logging}" if handing_out else logging
        if work is not None and not urlsplit(work).scheme:
            found |= {"spark.local.dir": work, "spark.sql.warehouse.dir": str(Path(work) / "warehouse")}
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
    """A session, stopped at the end. ``master``: None is spark-submit's, without that ``local[*]``. The rest as in
    :func:`settings`.

    Raises SparkMissing, JavaMissing, JobMisused.
    """
    check_machine()
    more = more or {}
    if "spark.master" in more:  # it would win, behind the back of everything that depends on where the tasks run
        raise JobMisused("--conf spark.master: expected --master")
    chosen = master if master is not None or submitted() else LOCAL
    _point_to_python(chosen, more)
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
        except (PySparkException, RuntimeError) as error:
            raise JobMisused(f"Spark did not start with master {chosen}: {str(error).splitlines()[0]}") from error
        _hush(spark)
        try:
            with _orderly():
                yield spark
        finally:
            _stop(spark)


@contextmanager
def _scratch(master: str | None, work: str | None) -> Iterator[str | None]:
    """A directory for what Spark spills on this machine, which a killed run would leave there: keys and headers."""
    if not is_local(master) or submitted():
        yield None
        return
    parent = Path(tempfile.gettempdir() if work is None or urlsplit(work).scheme else work)
    parent.mkdir(parents=True, exist_ok=True)
    with scratch_directory(parent, SCRATCH) as made:
        yield str(made)


def _hush(spark: SparkSession) -> None:
    """A JVM that ends before us, as at systemd's stop, is no traceback on stderr from a thread of PySpark's."""
    server: Any = spark.sparkContext._accumulatorServer
    tell = server.handle_error

    def handle_error(request: object, address: object) -> None:
        if not isinstance(sys.exception(), EOFError | ConnectionError):
            tell(request, address)

    server.handle_error = handle_error


def _stop(spark: SparkSession) -> None:
    from py4j.protocol import Py4JError  # noqa: PLC0415

    # systemd ends the JVM in the same moment as us; then there is nothing left to stop.
    with suppress(Py4JError, OSError):
        spark.stop()


def end_machine(spark: SparkSession) -> None:
    """End the JVM that this process started, tasks and all, and wait until it is gone; spark-submit's is not ours."""
    gateway = spark.sparkContext._gateway
    process = getattr(gateway, "proc", None)  # a subprocess.Popen, where launch_gateway made it
    if process is None:
        return
    process.terminate()  # not kill: its hooks remove what it spilled
    try:
        # What a JVM has to end by itself.
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _orderly() -> Iterator[None]:
    """Let SIGTERM (systemd's stop) end the block like any exception, so that what it wrote is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(_number: int, _frame: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_machine() -> None:
    """Raise SparkMissing or JavaMissing unless there is what a session needs."""
    check_packages()
    if not submitted():
        check_java(os.environ)


def check_packages() -> None:
    """Raise SparkMissing unless the extra is installed."""
    for module in ("pyspark", "pyarrow", "pandas", "adbc_driver_postgresql"):
        if find_spec(module) is None:  # to import pandas takes most of a second, and not every job needs it
            raise SparkMissing(module)


def check_java(environ: Mapping[str, str]) -> None:
    """Raise JavaMissing unless the Java that Spark would start is one that it runs on."""
    java = _java(environ)
    if java is None:
        raise JavaMissing(None, JAVA_NEEDED)
    told = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, env=dict(environ))
    version = version_of(told.stderr + told.stdout)
    if version is None:
        raise JavaMissing(None, JAVA_NEEDED)
    if version < JAVA_NEEDED:
        raise JavaMissing(str(version), JAVA_NEEDED)


def version_of(told: str) -> int | None:
    """The major version in what ``java -version`` prints: 17 of "17.0.15", 8 of "1.8.0_402"; None if there is none."""
    match = re.search(r'version "(\d+)(?:\.(\d+))?', told)
    if match is None:
        return None
    first, second = int(match[1]), int(match[2] or 0)
    return second if first == 1 else first


def _java(environ: Mapping[str, str]) -> str | None:
    """As Spark's own scripts look for it: JAVA_HOME, if it is set, and nothing else then."""
    if home := environ.get("JAVA_HOME"):
        java = Path(home, "bin", "java")
        return str(java) if os.access(java, os.X_OK) else None
    return shutil.which("java", path=environ.get("PATH"))


def _point_to_python(master: str | None, more: Mapping[str, str]) -> None:
    """Let the workers run this interpreter: the ``python3`` on the path may lack our packages.

    On a cluster the administrator's choice stands, if there is one: this path may not exist on the other machines.
    PySpark itself reads the environment alone.
    """
    if is_local(master):
        os.environ["PYSPARK_PYTHON"] = sys.executable
    elif "spark.pyspark.python" in more:
        os.environ["PYSPARK_PYTHON"] = more["spark.pyspark.python"]
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
