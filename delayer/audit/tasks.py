"""Work on executors: items in portions, each portion a task of Spark, which may be repeated.

What became of an item is a value that the task returns. A task that dies (its Python worker killed, its executor
lost) is started again by Spark, from the beginning of its portion, as often as ``spark.task.maxFailures`` says: so the
work on an item must be one transaction, and doing it again must be harmless.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from delayer.audit import spark as sessions
from delayer.audit import turns
from delayer.audit.watching import Say, Watching

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")
R = TypeVar("R")

RETRIES: Final = 4
"""How often a task is tried, where the master does not say: on one machine Spark's own default is once."""


def with_retries(master: str | None) -> str:
    """``local[N]`` as a master that starts a task again whose worker died; any other as it is; for None all cores."""
    if master is None or master == "local":
        return f"local[{'*' if master is None else 1},{RETRIES}]"
    match = re.fullmatch(r"local\[(\*|\d+)\]", master)
    return f"local[{match[1]},{RETRIES}]" if match else master


@contextmanager
def session(name: str, master: str | None, more: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """A session whose tasks are started again when their worker dies. Raises SparkMissing, JavaMissing, JobMisused."""
    chosen = None if master is None and sessions.submitted() else with_retries(master)
    with sessions.session(name, master=chosen, more=more, handing_out=True) as spark:
        yield spark


def portions(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """``items`` in portions of at most ``size``, in their order."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def run(
    spark: SparkSession, name: str, tasks: Sequence[Sequence[T]], work: Callable[[Sequence[T]], Iterable[R]], say: Say
) -> list[R]:
    """``work`` on each of ``tasks``, on the executors; everything that it returned, in the order of the tasks.

    ``say`` hears how many tasks are done, of how many. An interruption cancels the tasks. Raises JobFailed; what other
    tasks committed stays.
    """
    if not tasks:
        return []
    with Watching(spark, say)(name):
        found: list[R] = spark.sparkContext.parallelize(tasks, len(tasks)).flatMap(partial(_last, work)).collect()
        return found


def _last(work: Callable[[Sequence[T]], Iterable[R]], portion: Sequence[T]) -> Iterable[R]:
    """On an executor: daemons on its machine come first."""
    turns.step_back()
    return work(portion)


def cancel(spark: SparkSession, name: str) -> None:
    """Let the tasks of :func:`run` end where they are; from any thread."""
    spark.sparkContext.cancelJobGroup(name)
