"""Raising one of several failures, without keeping what they hold on to.

An exception holds its traceback, a traceback its frames, a frame its variables: here whole batches. A frame that is in
the traceback of an exception and has it in a variable besides is a ring, which only the garbage collector breaks, and
that runs rarely in this process (delayer/app.py).
"""

from __future__ import annotations

from asyncio import Task
from collections.abc import Iterable

from delayer.core.errors import BrokerLost, StoreLost

LOSSES = (BrokerLost, StoreLost)


def take_failures(tasks: set[Task[None]]) -> list[BaseException]:
    """What the finished ``tasks`` failed of; the set is emptied, for the caller may be about to raise one of these."""
    failures = [
        failure for task in tasks if task.done() and not task.cancelled() and (failure := task.exception()) is not None
    ]
    tasks.clear()
    return failures


def raise_first(results: Iterable[BaseException | None], *, unless: tuple[type[BaseException], ...] = ()) -> None:
    """Raise the first failure that is a bug, else the first loss; return if there is none but those in ``unless``.

    Of a bug and a loss the loss says little: everything is given back, and comes again.
    """
    failures = [result for result in results if result is not None and not isinstance(result, unless)]
    failures.sort(key=lambda failure: isinstance(failure, LOSSES))
    del results
    first = failures[0] if failures else None
    failures.clear()
    try:
        if first is not None:
            raise first
    finally:
        del first
