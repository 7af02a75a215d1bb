"""The worker's side: how a process knows that it is one, and that its supervisor lives; and how one is started."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import structlog

log = structlog.get_logger(__name__)

NUMBER: Final = "DELAYER_WORKER_NUMBER"
"""The environment variable that makes a ``delayer run`` a worker. Set by the supervisor, and by nobody else."""

_FROM_SYSTEMD: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
_LIFELINE: Final = 0


def number(environ: Mapping[str, str]) -> int | None:
    """The number of the worker that we are; None if we are none."""
    text = environ.get(NUMBER, "")
    return int(text) if text.isdecimal() else None


def watch_supervisor(gone: Callable[[], None]) -> None:
    """Call ``gone`` in the running loop, once, when the supervisor has ended, however it did.

    Its end of the pipe that is our standard input closes then; nothing is ever written to it.
    """
    loop = asyncio.get_running_loop()

    def readable() -> None:
        if not os.read(_LIFELINE, 1):
            loop.remove_reader(_LIFELINE)
            log.error("supervisor gone")
            gone()

    loop.add_reader(_LIFELINE, readable)


@contextmanager
def lifeline() -> Iterator[int]:
    """The supervisor's side of that pipe: the descriptor that every worker gets as its standard input."""
    theirs, ours = os.pipe()  # neither is inherited by itself, so that nobody else holds our end open
    try:
        yield theirs
    finally:
        os.close(theirs)
        os.close(ours)


def environment(environ: Mapping[str, str], worker: int, address: str, limit: float) -> dict[str, str]:
    """What worker number ``worker`` gets as its environment: ours, but it reports to ``address`` instead of to systemd,
    at least every ``limit`` seconds."""
    kept = {name: value for name, value in environ.items() if name not in _FROM_SYSTEMD}
    return kept | {NUMBER: str(worker), "NOTIFY_SOCKET": address, "WATCHDOG_USEC": str(round(limit * 1e6))}


def command() -> list[str]:
    """The command that started us, for a fresh interpreter that does the same."""
    return [sys.executable, *sys.orig_argv[1:]]


async def start(argv: list[str], environ: Mapping[str, str], stdin: int) -> Process:
    """Start a worker. Its log goes where ours goes. Raises OSError.

    In a session of its own: Ctrl-C in a terminal goes to everybody in front of it, and the workers are to hear from us.
    """
    return await asyncio.create_subprocess_exec(*argv, env=dict(environ), stdin=stdin, start_new_session=True)
