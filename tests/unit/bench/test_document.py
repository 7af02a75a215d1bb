"""The tables of docs/performance.md are what the committed results give, or say that their results are lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.document import PAGE, written
from bench.figures import Figure, Result

LOST = "*No result file of this run is kept: this table cannot be written again.*"
ABOUT = {
    "at": "2026-01-02T03:04:05+00:00", "revision": "abc", "machine": "2 cores", "cores": 2, "versions": {"Python": "3"},
    "command": "-m bench --only park",
}  # fmt: skip
PLACE = "Before.\n\n<!-- bench some.json: Cost -->\nold\n<!-- end -->\n\nAfter.\n"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    figures = [Figure("park", "park", 1000.0, "msg/s"), Figure("park", "memory", 70.0, "MB", {"body": 512})]
    Result(ABOUT, figures, ["park: a note"]).save(tmp_path / "some.json")
    return tmp_path


def test_a_table_is_written_between_its_comments(results: Path) -> None:
    page = written(PLACE, results)
    assert page.startswith("Before.\n\n<!-- bench some.json: Cost -->\n")
    assert page.endswith("<!-- end -->\n\nAfter.\n")
    assert "| park: memory | 512 B | 70.0 MB |" in page
    assert "revision abc, 2 cores; Python 3; `python -m bench --only park`" in page
    assert "- park: a note" in page
    assert "old" not in page
    assert written(page, results) == page


def test_a_table_without_its_result_or_sheet_is_an_error(results: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        written(PLACE, tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="expected some of Rates, Cost; found Lateness"):
        written(PLACE.replace("Cost", "Lateness"), results)


def test_the_page_has_the_tables_that_the_committed_results_give() -> None:
    page = PAGE.read_text()
    assert written(page) == page


def test_every_other_table_of_the_page_says_that_its_result_is_lost() -> None:
    by_hand = re.sub(r"<!-- bench .*?<!-- end -->", "", PAGE.read_text(), flags=re.DOTALL)
    tables = re.findall(r"([^\n]*)\n\n(\|[^\n]*)\n\|---", by_hand)
    assert tables
    assert [head for before, head in tables if before != LOST] == []
    assert len(tables) == len(re.findall(r"^\|---", by_hand, re.MULTILINE))
