"""Short simulations of native mode, each in a process of its own: seeded, repeatable, and able to fail."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def simulate(*words: str) -> tuple[int, list[dict[str, Any]]]:
    """Returns the exit code, and the result of each run."""
    argv = [sys.executable, "-m", "tests.simulation", "--seconds", "100", "--rate", "5", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_the_promises_hold() -> None:
    code, results = simulate("--mode", "native", "--seed", "1", "--runs", "3")
    assert [one["failure"] for one in results] == [""] * 3
    assert code == 0
    assert all(sum(one["faults"].values()) == 9 for one in results)


def test_a_seed_gives_the_same_run_in_every_process() -> None:
    (_, [one]), (_, [same]), (_, [other]) = (simulate("--mode", "native", "--seed", seed) for seed in ("7", "7", "8"))
    assert one["hash"] == same["hash"] != other["hash"]
