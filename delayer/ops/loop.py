"""The event loop of a process, and its end in bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import structlog
import uvloop

log = structlog.get_logger(__name__)

T = TypeVar("T")

LEAVE: Final = 0.5
"""Seconds for tasks that are still there at the end, once cancelled."""


def run(main: Coroutine[Any, Any, T], *, leave: float = LEAVE) -> T:
    """Run ``main`` in a new loop, and return what it returns.

    Tasks that it leaves behind are cancelled, and waited for ``leave`` seconds: asyncio's own runner waits as long as
    they like, and a driver that tidies up beside a server that hangs likes seconds (seen: five). Those that have not
    gone by then end with the process. The loop is not closed: that would wait for
    threads that look a name up.
    """
    loop = uvloop.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(_send_away(leave))
        asyncio.set_event_loop(None)


async def _send_away(seconds: float) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    done, left = await asyncio.wait(tasks, timeout=seconds) if tasks else (set(), set())
    for task in done:
        if not task.cancelled() and (failure := task.exception()) is not None:
            log.error("part failed too", reason=repr(failure))
    if left:
        # They are destroyed while pending, which would be reported once more for each of them.
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        log.warning("tasks left behind", tasks=sorted(task.get_name() for task in left), after_seconds=seconds)
