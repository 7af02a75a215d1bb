"""The worker's side: how a process knows that it is one, and that its supervisor lives; and how one is started."""

from __future__ import annotations

import asyncio
import ctypes
import select
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping
from typing import Final

import structlog

log = structlog.get_logger(__name__)

NUMBER: Final = "DELAYER_WORKER_NUMBER"
"""The environment variable that makes a ``delayer run`` a worker. Set by the supervisor, and by nobody else."""

ORPHANED: Final = 10
"""Seconds that a worker has to stop when its supervisor is gone, as many as are promised for every stop."""

_FROM_SYSTEMD: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
_LINE: Final = 0
"""Our end of the line to the supervisor (ear.py), on which it says nothing: only its end can be read here."""
_SET_PARENT_DEATH_SIGNAL: Final = 1


def number(environ: Mapping[str, str]) -> int | None:
    """The number of the worker that we are; None if we are none."""
    text = environ.get(NUMBER, "")
    return int(text) if text.isdecimal() else None


def watch_supervisor(gone: Callable[[], None]) -> None:
    """Call ``gone`` in the running loop, once, when the supervisor has ended, however it did."""
    loop = asyncio.get_running_loop()

    def readable() -> None:
        if _supervisor_gone():
            loop.remove_reader(_LINE)
            log.error("supervisor gone")
            gone()

    loop.add_reader(_LINE, readable)


def do_not_outlive_supervisor(patience: int = ORPHANED) -> None:
    """See to it that we end ``patience`` seconds after the supervisor, even if our loop never comes round again.

    A worker that is well stops in order (:func:`watch_supervisor`); to be killed at once, which PR_SET_PDEATHSIG could
    have done as well, would cut off what it has in flight. So the signal that we ask for is SIGCONT: it wakes up who
    was stopped, does nothing to who runs, and its handler is called between any two steps of a loop that spins. That
    sets an alarm, which nobody handles: the kernel ends us.
    """

    def perhaps_orphaned(*_: object) -> None:
        # SIGCONT also comes from others, and when the thread that started us ends before its process does.
        if _supervisor_gone():
            signal.alarm(patience)

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGCONT, perhaps_orphaned)
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGCONT)
    perhaps_orphaned()  # it may have ended before we could ask; our parent is somebody else then, who lives


def _supervisor_gone() -> bool:
    """Whether its end of the line is closed. The kernel closes it before it tells the children of a death."""
    line = select.poll()
    line.register(_LINE, 0)  # no more than what is always told: that the other end is closed, or that words were lost
    return bool(line.poll(0))


def environment(environ: Mapping[str, str], worker: int, limit: float) -> dict[str, str]:
    """What worker number ``worker`` gets as its environment: ours, but it reports on its standard input instead of to
    systemd, at least every ``limit`` seconds."""
    kept = {name: value for name, value in environ.items() if name not in _FROM_SYSTEMD}
    return kept | {NUMBER: str(worker), "NOTIFY_SOCKET": f"fd:{_LINE}", "WATCHDOG_USEC": str(round(limit * 1e6))}


def command() -> list[str]:
    """The command that started us, for a fresh interpreter that does the same."""
    return [sys.executable, *sys.orig_argv[1:]]


async def start(argv: list[str], environ: Mapping[str, str], line: int) -> Process:
    """Start a worker, with ``line`` as its standard input. Its log goes where ours goes. Raises OSError.

    In a session of its own: Ctrl-C in a terminal goes to everybody in front of it, and the workers are to hear from us.
    """
    return await asyncio.create_subprocess_exec(*argv, env=dict(environ), stdin=line, start_new_session=True)
