"""``delayer``, with a line in a file for each of its own durations that was long, and for long garbage collections:

    python -m bench.traced FILE --config … run

The metrics of a daemon have no time stamps. To say why a message was late, the bench must know when something was slow.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

from bench.evidence import LONG_SECONDS, Span
from delayer.cli.main import main as delayer
from delayer.core.counters import Counters


class Trace:
    """Appends a span to the file for each duration of LONG_SECONDS or more."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._collecting = 0.0

    def ended(self, what: str, seconds: float) -> None:
        if seconds >= LONG_SECONDS:
            now = time.time()
            self._file.write(json.dumps(Span(what, now - seconds, now)) + "\n")

    def collects(self, phase: str, _: object) -> None:
        if phase == "start":
            self._collecting = time.perf_counter()
        else:
            self.ended("gc", time.perf_counter() - self._collecting)


def main() -> None:
    trace = Trace(Path(sys.argv.pop(1)))
    took = Counters.took

    def traced(self: Counters, what: str, seconds: float) -> None:
        took(self, what, seconds)
        trace.ended(what, seconds)

    Counters.took = traced  # type: ignore[method-assign]
    gc.callbacks.append(trace.collects)
    delayer()


if __name__ == "__main__":
    main()
