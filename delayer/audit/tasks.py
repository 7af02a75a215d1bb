"""Work on executors: items in portions, each portion a Spark task that may be repeated.

A task returns a value for each item. If a worker or an executor dies, Spark reruns its portion from the beginning, up
to ``spark.task.maxFailures`` times. So the work on an item must be one transaction that is safe to repeat.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from asyncpg import Connection

from delayer.audit.errors import JobFailed
from delayer.core.errors import StoreLost
from delayer.core.readable import Say, counted, mask
from delayer.store.admin import traffic
from delayer.store.admin.traffic import Traffic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from delayer.audit.remote import OperationWatcher

_STORE_LOST: Final = re.compile(r"delayer\.core\.errors\.StoreLost: (.*)")
# Not the class alone, with which Spark Connect's "JVM stacktrace:" begins: the message precedes it.
_BARE_JAVA: Final = r"(?:\w+\.)+\w+$"
_PYTHON: Final = re.compile(rf"^(?!{_BARE_JAVA})((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Lost)\b.*)$", re.MULTILINE)

# Spark's message for an abandoned task; the reason follows, from the executor or from Java.
_LOST_TASK: Final = re.compile(r"most recent failure: Lost task \S+ in stage \S+ \(TID \d+\) \([^)]*\):\s*(\S.*)")
_WRONG_PYTHON: Final = re.compile(r"Cannot run program|ModuleNotFoundError|PYTHON_VERSION_MISMATCH")
_NO_PYTHON: Final = (
    ". Next: does every machine have a Python of this version with delayer[spark]? --conf spark.pyspark.python=… says "
    "where it is; with --remote, PYSPARK_PYTHON of the server"
)
_CALL: Final = "An error occurred while calling "
"""Prefix of the first line of every Py4J error, which carries no information."""


class StageWatcher:
    """``with watching("reading messages"):`` shows the stages of the Spark jobs that the block starts in its thread."""

    def __init__(self, spark: SparkSession, say: Say, *, count_rows: bool = True) -> None:
        self._context: Any = spark.sparkContext
        self._say = say
        self._count_rows = count_rows

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Raises as :func:`translate_errors` does."""
        self._context.setJobGroup(name, name, interruptOnCancel=True)
        over = threading.Event()
        looking = threading.Thread(target=self._look, args=(name, over), name="delayer progress", daemon=True)
        self._say(name, 0, 0)
        looking.start()
        try:
            with translated(name):
                yield
        except BaseException:
            # An interrupted job's tasks hold connections, so cancel them. Our connection to the JVM answers only when
            # the job is done; this thread has its own.
            cancelling = threading.Thread(target=self.cancel, args=(name,), daemon=True)
            cancelling.start()
            cancelling.join(5.0)
            raise
        finally:
            over.set()
            looking.join()

    def cancel(self, name: str) -> None:
        """End the block of this name: its job fails."""
        from py4j.protocol import Py4JError  # noqa: PLC0415

        with suppress(Py4JError, OSError):  # The JVM may have exited first.
            self._context.cancelJobGroup(name)

    def _look(self, name: str, over: threading.Event) -> None:
        from py4j.protocol import Py4JError  # noqa: PLC0415

        with suppress(Py4JError, OSError):  # The JVM is gone. The caller that waits for the tasks gets that error too.
            while not over.wait(0.25):
                rows, done, of = self.seen(name)
                self._say(f"{name}, {rows:,} rows" if rows and self._count_rows else name, done, of)

    def seen(self, name: str) -> tuple[int, int, int]:
        """Count rows read, tasks done and all tasks, over the stages that have begun."""
        tracker, store = self._context.statusTracker(), self._context._jsc.sc().statusStore()
        jobs = (tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(name))
        stages = {stage for job in jobs if job is not None for stage in job.stageIds}
        known = [info for stage in stages if (info := tracker.getStageInfo(stage)) is not None]
        rows = sum(store.lastStageAttempt(info.stageId).inputRecords() for info in known)
        return rows, sum(info.numCompletedTasks for info in known), sum(info.numTasks for info in known)


def is_remote(spark: SparkSession) -> bool:
    """Whether this is a session on a Spark Connect server, which has no SparkContext (audit.remote)."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def watcher(spark: SparkSession, say: Say, *, count_rows: bool = True) -> StageWatcher | OperationWatcher:
    """Return what shows the progress of jobs. ``count_rows``: also the rows that Spark has read, if it knows them."""
    if not is_remote(spark):
        return StageWatcher(spark, say, count_rows=count_rows)
    from delayer.audit.remote import OperationWatcher  # noqa: PLC0415 - imports this module

    return OperationWatcher(spark, say)


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raise StoreLost if a task lost the store, JobFailed for Spark's other errors. Keeps only the text, because
    operators do not need a stack of two languages, and passwords can be masked only in text."""
    from py4j.protocol import Py4JError, Py4JNetworkError  # noqa: PLC0415
    from pyspark.errors import PySparkException  # noqa: PLC0415

    try:
        yield
    except (Py4JNetworkError, ConnectionError):
        raise JobFailed(f"{doing}: the Java virtual machine of the job has ended") from None
    except (PySparkException, Py4JError) as error:
        raise failure(doing, told_by(error)) from None


def told_by(error: Exception) -> str:
    """Return Spark's whole error as text."""
    java = getattr(error, "java_exception", None)
    return f"{error}\n{java.getMessage() if java is not None else ''}"


def failure(doing: str, text: str) -> StoreLost | JobFailed:
    """Classify Spark's error text. Pure."""
    from delayer.audit.connection import advice_for  # noqa: PLC0415 - needs the extra

    if lost := _STORE_LOST.search(text):
        return StoreLost(mask(lost[1]), advice_for(lost[1]))
    lines = [line.strip(": ") for line in text.splitlines() if line.strip() and not line.startswith(_CALL)]
    lost_task, python = _LOST_TASK.search(text), _PYTHON.findall(text)
    if lost_task is not None and not lost_task[1].startswith("org.apache.spark.api.python.PythonException"):
        reason = lost_task[1]
    else:
        reason = python[-1] if python else next(iter(lines), "no reason given")
    if _WRONG_PYTHON.search(text):
        reason = reason.rstrip(".") + _NO_PYTHON
    return JobFailed(f"{doing}: {mask(reason)}")


HUNG: Final = "60s"
SESSION: Final[Mapping[str, str]] = {
    # After this time Postgres terminates a session that hangs in a transaction, which frees its rows and its turn.
    "idle_in_transaction_session_timeout": HUNG,
    "idle_session_timeout": HUNG,
}


def step_back() -> None:
    """Lower the priority of this process and its children. It does not slow the database, so see :func:`turn`."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)


@asynccontextmanager
async def turn(connection: Connection, seen: Traffic, *, hurried: bool = False) -> AsyncIterator[bool]:
    """Throttle a session's piece of work, and yield whether there is traffic. Under load, one session works at a time,
    and rests after the block for as long as it took. ``hurried``: neither wait nor rest. Raises DRIVER_ERRORS."""
    held = False
    while not (hurried or held) and await seen.look(connection):
        if not (held := await traffic.take_turn(connection)):
            await asyncio.sleep(0.05)
    began = time.monotonic()
    try:
        yield held
        if held:
            await asyncio.sleep(min(10.0, time.monotonic() - began))
    finally:
        if held and not connection.is_closed():
            await traffic.end_turn(connection)


T = TypeVar("T")
R = TypeVar("R")
AT_ONCE: Final = 1_000
"""Tasks of one query. Their inputs travel in its function with the store's URL. Spark would write a function of more
than 1 MiB to a file."""


def run(
    spark: SparkSession, name: str, tasks: Sequence[Sequence[T]], work: Callable[[Sequence[T]], Iterable[R]], say: Say
) -> list[R]:
    """Run ``work`` on each of ``tasks`` on the executors; return all results in the order of the tasks. ``say`` gets
    the numbers of finished and all tasks. An interruption cancels tasks; commits stay. Raises JobFailed, StoreLost."""
    found: list[R] = []
    with watcher(spark, say, count_rows=False)(name):  # Its rows are the numbers of tasks.
        for start in range(0, len(tasks), AT_ONCE):
            some = tasks[start : start + AT_ONCE]
            # A partition for each task, whose only row is the task's number. Spark Connect has no RDDs.
            frame = spark.range(0, len(some), 1, len(some)).mapInArrow(_portions(some, work), "result binary")
            found += [pickle.loads(row.result) for row in frame.collect()]
    return found


EXECUTOR_SECONDS: Final = 120.0
"""How long a job waits for its first executor."""


def check_executor(spark: SparkSession, say: Say) -> None:
    """Run a task that does nothing. A job calls this before it takes a snapshot, because Spark waits forever for an
    executor, and an old snapshot holds up VACUUM. Raises JobFailed, also if no executor takes the task in time."""
    name = "waiting for an executor"
    late = threading.Event()
    cancel = watcher(spark, say).cancel

    def give_up() -> None:
        late.set()
        cancel(name)

    limit = threading.Timer(EXECUTOR_SECONDS, give_up)
    limit.daemon = True
    limit.start()
    try:
        run(spark, name, [[0]], list, say)
    except JobFailed:
        if not late.is_set():
            raise
        memory, cores = spark.conf.get("spark.executor.memory", "1g"), spark.conf.get("spark.executor.cores", "1")
        raise JobFailed(
            f"no worker offered an executor of {memory} and {counted(int(cores or 1), 'core')} within "
            f"{EXECUTOR_SECONDS:.0f} s. Next: compare spark.executor.memory and spark.executor.cores (--conf, or with "
            "--remote settings of the server) with what Spark's page says is free on the workers"
        ) from None
    finally:
        limit.cancel()


def _portions(
    tasks: Sequence[Sequence[T]], work: Callable[[Sequence[T]], Iterable[R]]
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Make the function of an executor: it gets batches of task numbers and returns batches of pickled results."""

    def run_portions(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa  # noqa: PLC0415 - the driver may not need it

        step_back()  # The machine's daemons come first.
        for batch in batches:
            for number in batch.column(0).to_pylist():
                results = pa.array([pickle.dumps(one) for one in work(tasks[number])], pa.binary())
                yield pa.RecordBatch.from_arrays([results], ["result"])

    return run_portions
