"""The command line of a look that stands by itself: `python -m bench.where`, `python -m bench.rolling`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from rich.console import Console

from bench import ending, report
from bench.__main__ import RESULTS
from bench.figures import Result
from bench.given import at_least
from delayer import telemetry


def main(
    name: str, description: str | None, measure: Callable[[int, int], Coroutine[Any, Any, Result]], lasts: int
) -> None:
    """Measure at the rate and for the seconds that the command line says (``lasts``), write bench/results/NAME.json,
    and print the table. Nothing is kept of what was ended before."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=description)
    parser.add_argument("--rate", type=at_least(1), default=5000, help="messages a second (default 5000)")
    parser.add_argument("--seconds", type=at_least(1), default=lasts, help=f"how long (default {lasts})")
    given = parser.parse_args()
    telemetry.configure("console", "error")
    try:
        result = ending.run(measure(given.rate, given.seconds))
    except ending.Ended as ended:
        print(f"{ended}: ended before all was measured; nothing is kept", file=sys.stderr)
        sys.exit(ended.exit_code)
    result.save(RESULTS / f"{name}.json")
    report.show(result, Console())
