"""The tables of docs/performance.md, written from committed results. The prose around them is written by hand.

A table stands between two comments. The first names its file in bench/results and its sheets:

    <!-- bench sql-http.json: Rates, Cost -->
    <!-- end -->
"""

from __future__ import annotations

import re
from pathlib import Path

from bench import report
from bench.figures import Result
from bench.run import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
_TABLES = re.compile(r"(<!-- bench ([\w.-]+): ([\w, ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def written(page: str, results: Path = RESULTS) -> str:
    """The page with each of its tables as its result gives it. Raises FileNotFoundError for a result that is not there,
    and ValueError for a sheet that the result does not have."""

    def table(found: re.Match[str]) -> str:
        begin, name, sheets, end = found.groups()
        return f"{begin}{tables(Result.load(results / name), sheets.split(', '))}\n{end}"

    return _TABLES.sub(table, page)


def tables(result: Result, titles: list[str]) -> str:
    """These sheets of a result, with its circumstances before and its notes after them."""
    by_title = {sheet.title: sheet for sheet in report.sheets(result)}
    if unknown := set(titles) - set(by_title):
        raise ValueError(f"expected some of {', '.join(by_title)}; found {', '.join(sorted(unknown))}")
    lines = ["", f"*{report.heading(result)}; `python {result.about['command']}`*", ""]
    for title in titles:
        lines += [*report.markdown_table(by_title[title]), ""]
    if result.notes:
        lines += [*(f"- {note}" for note in result.notes), ""]
    return "\n".join(lines)


def write() -> None:
    """Write the page's tables."""
    PAGE.write_text(written(PAGE.read_text()))
