"""docs/operations.md and the runbooks that it shows: each has its place there, and was carried out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.runbooks.__main__ import PAGE, RUNBOOKS
from tests.runbooks.page import mark, written

TEXT = Path(PAGE).read_text()


@pytest.mark.parametrize("name", RUNBOOKS)
def test_a_runbook_says_what_was_seen(name: str) -> None:
    """And that ends with an account in which nothing is missing."""
    found = re.findall(re.escape(mark(name)) + r"\n```text\n(.*?)```\n", TEXT, re.DOTALL)
    assert len(found) == 1
    account = found[0].splitlines()[-1]
    assert re.search(r"ledger: sent \d+, lost 0, early 0, changed 0, ", account)


def test_no_place_without_a_runbook() -> None:
    assert set(re.findall(r"<!-- seen: (\S+) -->", TEXT)) == set(RUNBOOKS)


def test_what_was_seen_replaces_what_was_seen_before() -> None:
    page = f"# P\n{mark('a')}\n```text\nold\n```\nmore\n{mark('b')}\n```text\nkept\n```\n"
    once = written(page, "a", [r"new \1", "lines"])
    assert once == page.replace("old", "new \\1\nlines")
    assert written(once, "a", ["old"]) == page
    with pytest.raises(ValueError, match="found 0"):
        written(page, "c", [])
