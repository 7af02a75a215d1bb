"""Signals before there is a loop to hear them. To load a daemon takes the better part of a second, and an order to stop
or to reload that comes meanwhile would kill the process as a crash does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

STOPS: Final = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def heeded() -> Iterator[None]:
    """Until somebody else hears them: an order to stop ends the process, stopped as told, since nothing has begun; an
    order to reload waits (:func:`hear_reload`)."""
    before = {signum: signal.signal(signum, _stopped) for signum in STOPS}
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        hear_reload()
        for signum, handler in before.items():
            signal.signal(signum, handler)


def hear_reload() -> None:
    """Whoever hears SIGHUP is there, and gets the one that waited."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def _stopped(_signum: int, _frame: object) -> None:
    os._exit(0)
