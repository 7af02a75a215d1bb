"""Virtual time and seeded entropy for a whole process. Install them before the modules that use them are imported,
because some keep a reference to ``time.monotonic``."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from detangle import SimLoop
from detangle._context import current_host

EPOCH: Final = 1_800_000_000.0
"""The earliest time of day in a simulation, in seconds since 1970: 8:00."""
BEGINS: Final = (0.0, 57_300.0)
"""A simulation begins so many seconds later: one half of them five minutes before midnight."""

_REAL: Final = {name: getattr(time, name) for name in ("time", "monotonic", "perf_counter")}
_clock_gettime: Final = time.clock_gettime
_urandom: Final = os.urandom
_loop: SimLoop | None = None
_began = EPOCH
_entropy = random.Random(0)
ahead: dict[str, float] = {}
"""By how many seconds the time of day of a host is ahead of the rest."""


def time_of(host: str) -> float:
    """The time of day of a host in a simulation, in seconds since 1970."""
    assert _loop is not None
    return _began + _loop.time() + ahead.get(host, 0.0)


def _wall() -> float:
    return time_of(current_host.get() or "") if _loop is not None else _REAL["time"]()


def _steady(name: str) -> Callable[[], float]:
    real = _REAL[name]
    return lambda: _loop.time() if _loop is not None else real()


def _by_number(number: int) -> float:
    """All the clocks that a process asks for by number count steadily here."""
    return _loop.time() if _loop is not None else _clock_gettime(number)


def _in_ns(seconds: Callable[[], float]) -> Callable[[], int]:
    return lambda: int(seconds() * 1e9)


def _bytes(count: int) -> bytes:
    return _entropy.randbytes(count) if _loop is not None else _urandom(count)


def install() -> None:
    """Replace the clocks and the entropy of this process, for good. Outside of :func:`virtual` they are the real
    ones."""
    clocks: dict[str, Any] = {"time": _wall, "monotonic": _steady("monotonic"), "perf_counter": _steady("perf_counter")}
    for name, clock in clocks.items():
        setattr(time, name, clock)
        setattr(time, f"{name}_ns", _in_ns(clock))
    time.clock_gettime = _by_number
    os.urandom = _bytes
    random._urandom = _bytes  # type: ignore[attr-defined]  # what `secrets` uses


@contextmanager
def virtual(loop: SimLoop, seed: int) -> Iterator[None]:
    """Let the clocks show the loop's time, and the entropy follow from the seed."""
    global _loop, _began  # noqa: PLW0603 - the clocks of a process are global
    _loop = loop
    _entropy.seed(seed)
    _began = EPOCH + random.Random(seed).choice(BEGINS)  # Leaves the entropy of seeds that failed once as it was.
    ahead.clear()
    collect, gc.collect = gc.collect, lambda *_: 0  # The daemon collects after failures; here that takes 0.2 s.
    try:
        yield
    finally:
        _loop, gc.collect = None, collect


def cpu_seconds() -> float:
    """The time that this process used, for measurements of the simulation itself."""
    return time.process_time()


def real_seconds() -> float:
    """A steady clock for waits in real time."""
    return float(_REAL["monotonic"]())
