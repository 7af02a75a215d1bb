"""The command of the simulation: which cases it runs, and the shortest that still fails."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from tests.simulation.command import case_of, cases_of, line_of, parsed, shrunk, words_of
from tests.simulation.run import Case, Result
from tests.simulation.test_native import simulate

FAILED = Result(1, "lost", "", "", {}, 0, ["cut", "alarm", "cut", "kill", "alarm"], 10.0, 1.0, 1, 1, 1, 1, "")


@pytest.mark.parametrize("needed", [set(), {0}, {1, 3}, {0, 1, 2, 3, 4}])
def test_the_shortest_case_has_only_the_faults_that_the_failure_needs(needed: set[int]) -> None:
    def run(case: Case) -> Result:
        fails = needed <= set(case.keep or ()) and case.seconds >= 70
        return FAILED if fails else replace(FAILED, failure="")

    shortest = shrunk(Case("store", 1, 600.0, 5), FAILED, run)
    assert shortest == Case("store", 1, 75.0, 5, keep=tuple(sorted(needed)))


@pytest.mark.parametrize(
    "case",
    [
        Case("keys", 7, 600.0, 5),
        Case("store", 1, 75.0, 20, ("store cut", "cut"), (0, 3)),
        Case("sql", 2, 1.5, 1, keep=()),
    ],
)
def test_its_words_repeat_a_case(case: Case) -> None:
    assert [*cases_of(parsed(shlex.split(words_of(case))))] == [case]


def test_a_line_of_the_known_cases_is_read() -> None:
    line = {"mode": "store", "seed": 5, "seconds": 600.0, "rate": 5, "kinds": ["cut"], "reason": "a lane was lost"}
    assert case_of(line) == Case("store", 5, 600.0, 5, ("cut",))


@pytest.mark.parametrize("case", [Case("store", 5, 600.0, 5), Case("store", 5, 600.0, 5, ("cut",))])
def test_a_line_of_the_results_repeats_its_case(case: Case) -> None:
    assert case_of(json.loads(line_of(case, FAILED, 1.0, "abc"))) == case


@pytest.mark.long
def test_the_cases_that_failed_once_pass() -> None:
    code, results = simulate("--known")
    assert results
    assert [one["failure"] for one in results if one["failure"]] == []
    assert code == 0
