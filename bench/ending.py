"""How a benchmark ends before its time: SIGINT and SIGTERM cancel it, so that servers, databases and directories of its
own are removed on the way out."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
KILLED_BY = 128
"""A shell's exit code for what a signal ended, less the signal's number."""


class Ended(Exception):
    """By a signal, before everything was done."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.exit_code = KILLED_BY + number


def run(work: Coroutine[Any, Any, T]) -> T:
    """The work, in an event loop of its own. Raises Ended when a signal came first. A second signal acts as ever."""
    return asyncio.run(_until_signalled(work))


async def _until_signalled(work: Coroutine[Any, Any, T]) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    came: list[signal.Signals] = []

    def end(number: signal.Signals) -> None:
        came.append(number)
        for one in SIGNALS:
            loop.remove_signal_handler(one)
        task.cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, end, number)
    try:
        return await task
    except asyncio.CancelledError:
        if came:
            raise Ended(came[0]) from None
        raise
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
