"""The examples in docstrings work."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import delayer

HOME = Path(delayer.__file__).parent
MODULES = sorted(
    ".".join(("delayer", *path.relative_to(HOME).with_suffix("").parts)).removesuffix(".__init__")
    for path in HOME.rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.words
@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_a_module_work(module: str) -> None:
    assert doctest.testmod(import_module(module)).failed == 0
