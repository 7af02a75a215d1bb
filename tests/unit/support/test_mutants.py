"""The list of mutants fits the program: each text is found, each test is there. `make mutants` runs them."""

from __future__ import annotations

import pytest

from tests.mutants.__main__ import ROOT
from tests.mutants.listed import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=[one.name for one in MUTANTS])
def test_a_mutant_can_be_made(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.text) == mutant.times
    assert mutant.replacement != mutant.text
    assert mutant.tests
    for test in mutant.tests:
        assert test.startswith("tests/")
        assert (ROOT / test.partition("::")[0]).exists(), test


def test_names_are_told_apart() -> None:
    assert len({one.name for one in MUTANTS}) == len(MUTANTS)
