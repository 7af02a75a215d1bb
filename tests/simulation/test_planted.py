"""Simulations find planted bugs, each in its mode, from the first seeds, and by the check that is there for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.planted import PLANTED
from tests.simulation.run import check_of
from tests.simulation.test_native import simulate

CHECKS = sorted({check for bug in PLANTED.values() for check in bug.checks})
SOURCES = [path.read_text() for path in Path(__file__).parents[1].rglob("*.py")]


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str) -> None:
    code, results = simulate("--seed", "1", "--runs", "8", "--first", "--plant", bug)
    assert code == 1
    assert results[-1]["check"] in PLANTED[bug].checks, results[-1]["failure"]


@pytest.mark.parametrize("check", CHECKS)
def test_each_check_that_finds_one_exists(check: str) -> None:
    function, _, condition = check.partition(": ")
    line = f"assert {condition}," if condition else "raise AssertionError("
    assert any(f"def {function}(" in source and line in source for source in SOURCES)


def test_a_check_is_a_function_and_its_condition() -> None:
    def fail(*, late: bool) -> None:
        assert not late, "a text, for people"
        raise AssertionError("a text")

    for late, check in ((True, "fail: not late"), (False, "fail")):
        with pytest.raises(AssertionError) as failure:
            fail(late=late)
        assert check_of(failure.value) == check
    assert not check_of(None)
