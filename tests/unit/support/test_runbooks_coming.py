"""docs/coming-from.md and the steps that were carried out for it: each has its place there."""

from __future__ import annotations

import re

import pytest

from tests.runbooks.coming import PAGE, STEPS
from tests.runbooks.page import mark

TEXT = PAGE.read_text()


@pytest.mark.parametrize("name", STEPS)
def test_steps_say_what_was_seen(name: str) -> None:
    """There and back, with an account in which nothing is missing."""
    found = re.findall(re.escape(mark(name)) + r"\n```text\n(.*?)```\n", TEXT, re.DOTALL)
    assert len(found) == 1
    lines = found[0].splitlines()
    assert any("THE WAY BACK" in line for line in lines)
    assert re.search(r"ledger: sent \d+, lost 0, early 0, changed 0, repeated 0;", lines[-1])


def test_no_place_without_steps() -> None:
    assert set(re.findall(r"<!-- seen: (\S+) -->", TEXT)) == set(STEPS)
