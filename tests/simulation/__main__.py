"""Run simulations: ``python -m tests.simulation [--seconds N] [--rate N] [--seed N] [--runs N]``.

Each run has its own seed. Exits with 1 if a run breaks a promise, and prints its seed."""

from __future__ import annotations

import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":  # or sets have another order in each process
    os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
              os.environ | {"PYTHONHASHSEED": "0"})  # fmt: skip

from tests.simulation import clock

clock.install()

from tests.simulation.run import main  # noqa: E402 - after the clocks

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
