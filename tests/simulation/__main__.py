"""Run simulations: ``python -m tests.simulation --help``. The exit code is 1 if a run broke a promise."""

from __future__ import annotations

import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":  # or sets have another order in each process
    os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
              os.environ | {"PYTHONHASHSEED": "0"})  # fmt: skip

from tests.simulation import clock

clock.install()

from tests.simulation.command import main  # noqa: E402 - after the clocks

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
