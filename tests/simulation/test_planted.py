"""Simulations find planted bugs, each in its mode and from the first seeds."""

from __future__ import annotations

import pytest

from tests.simulation.planted import PLANTED
from tests.simulation.test_native import simulate


@pytest.mark.long
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str) -> None:
    code, results = simulate("--seed", "1", "--runs", "8", "--first", "--plant", bug)
    assert code == 1
    assert results[-1]["check"] in PLANTED[bug].checks, results[-1]["failure"]
