"""Short simulations of store mode, each in a process of its own: seeded, repeatable, and able to fail. The bugs that
they find are planted in test_planted.py."""

from __future__ import annotations

import pytest

from tests.simulation.stored import FEATURES
from tests.simulation.test_native import simulate

pytestmark = pytest.mark.long


@pytest.mark.parametrize("mode", FEATURES)
def test_the_promises_hold(mode: str) -> None:
    code, results = simulate("--mode", mode, "--seed", "1", "--runs", "3")
    assert [one["failure"] for one in results] == [""] * 3
    assert code == 0


def test_a_seed_gives_the_same_run_in_every_process() -> None:
    (_, [one]), (_, [_, same]) = (simulate("--mode", "keys", *words) for words in (
        ("--seed", "8"), ("--seed", "7", "--runs", "2")
    ))  # fmt: skip
    assert one["hash"] == same["hash"]
