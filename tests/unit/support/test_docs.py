"""Tests and pages that the documentation names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / ".github").glob("*.md"), ROOT / "README.md"], key=str)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_every_test_named_on_a_page_exists(page: Path) -> None:
    for name, test in re.findall(r"`(tests/[\w/.]*)(?:::(\w+))?`", page.read_text()):
        assert (ROOT / name).exists(), name
        if test:
            assert f"def {test}(" in (ROOT / name).read_text(), test


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_every_linked_page_exists(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
