"""Work on executors: items in portions, each portion a task of Spark, which may be repeated; and how far it is.

What became of an item is a value that the task returns. A task that dies (its Python worker killed, its executor
lost) is started again by Spark, from the beginning of its portion, as often as ``spark.task.maxFailures`` says: so the
work on an item must be one transaction, and doing it again must be harmless.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from delayer.audit import spark as sessions
from delayer.audit.errors import JobFailed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")
R = TypeVar("R")

LOOK_SECONDS: Final = 0.25


RETRIES: Final = 4
"""How often a task is tried, where the master does not say: on one machine Spark's own default is once."""


def with_retries(master: str | None) -> str:
    """``local[N]`` as a master that starts a task again whose worker died; any other as it is; for None all cores."""
    if master in (None, "local"):
        return f"local[{'*' if master is None else 1},{RETRIES}]"
    assert master is not None
    match = re.fullmatch(r"local\[(\*|\d+)\]", master)
    return f"local[{match[1]},{RETRIES}]" if match else master


@contextmanager
def session(name: str, master: str | None) -> Iterator[SparkSession]:
    """A session whose tasks are started again when their worker dies. Raises SparkMissing, JavaMissing, JobMisused."""
    chosen = None if master is None and sessions.submitted() else with_retries(master)
    with sessions.session(name, master=chosen) as spark:
        yield spark


def portions(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """``items`` in portions of at most ``size``, in their order."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def run(
    spark: SparkSession,
    name: str,
    tasks: Sequence[Sequence[T]],
    work: Callable[[Sequence[T]], Iterable[R]],
    say: Callable[[int, int], None],
) -> list[R]:
    """``work`` on each of ``tasks``, on the executors; everything that it returned, in the order of the tasks.

    ``say`` hears how many tasks are done, of how many. An interruption cancels the tasks. Raises JobFailed; what other
    tasks committed stays.
    """
    if not tasks:
        return []
    running = _Running(spark, name, tasks, work)
    running.start()
    try:
        while running.is_alive():
            running.join(LOOK_SECONDS)
            say(running.done(), len(tasks))
    except BaseException:
        cancel(spark, name)
        running.join()
        raise
    if running.failure is not None:
        raise JobFailed(f"{name}: {_reason(running.failure)}") from running.failure
    say(len(tasks), len(tasks))
    return running.results


def cancel(spark: SparkSession, name: str) -> None:
    """Let the tasks of :func:`run` end where they are; from any thread."""
    spark.sparkContext.cancelJobGroup(name)


class _Running(threading.Thread, Generic[T, R]):
    """One job of Spark, on a thread of its own, so that somebody can watch it."""

    def __init__(
        self, spark: SparkSession, name: str, tasks: Sequence[Sequence[T]], work: Callable[[Sequence[T]], Iterable[R]]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._context: Any = spark.sparkContext
        self._tasks = tasks
        self._work = work
        self.results: list[R] = []
        self.failure: Exception | None = None

    def run(self) -> None:
        from py4j.protocol import Py4JError  # noqa: PLC0415 - whether the extra is there is checked with the session
        from pyspark.errors import PySparkException  # noqa: PLC0415

        self._context.setJobGroup(self.name, self.name, interruptOnCancel=True)
        try:
            self.results = self._context.parallelize(self._tasks, len(self._tasks)).flatMap(self._work).collect()
        except (PySparkException, Py4JError) as error:
            self.failure = error

    def done(self) -> int:
        """Tasks that are completed."""
        tracker = self._context.statusTracker()
        stages = [
            stage
            for job in tracker.getJobIdsForGroup(self.name)
            for stage in getattr(tracker.getJobInfo(job), "stageIds", ())
        ]
        return sum(getattr(tracker.getStageInfo(stage), "numCompletedTasks", 0) for stage in stages)


def _reason(error: Exception) -> str:
    """The line that says why, without the stack traces of two languages."""
    java = getattr(error, "java_exception", None)
    text = str(error if java is None else java.getMessage())
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
