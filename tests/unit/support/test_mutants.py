"""The list of mutants matches the program: each text and each test exists. `make mutants` runs them."""

from __future__ import annotations

import pytest

from tests.mutants.__main__ import ROOT
from tests.mutants.listed import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=[one.name for one in MUTANTS])
def test_a_mutant_matches_the_source(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.text) == mutant.times
    assert mutant.replacement != mutant.text
    assert mutant.tests
    for test in mutant.tests:
        assert test.startswith("tests/")
        assert (ROOT / test.partition("::")[0]).exists(), test


def test_mutants_have_unique_names() -> None:
    assert len({one.name for one in MUTANTS}) == len(MUTANTS)
