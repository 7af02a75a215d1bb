"""`python -m bench.page [RESULT]`: put the figures of a run into docs/performance.md, and the run beside it.

The page has a line `<!-- figures: park release -->` (or `<!-- sizing -->`) wherever tables belong, and `<!-- end -->`
behind them; what stands between is written anew. So no figure there was typed by hand, and a test compares page and
run.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from bench import report, sizing, targets
from bench.figures import Figure, Result

ROOT = Path(__file__).parents[1]
PAGE, RUN = ROOT / "docs" / "performance.md", ROOT / "docs" / "performance.json"
_TABLES = re.compile(r"(<!-- figures: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_SIZING = re.compile(r"(<!-- sizing -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str, result: Result) -> str:
    """The page with the tables of this run. Raises ValueError for a section that the run does not have."""

    def tables(found: re.Match[str]) -> str:
        return (
            found[1] + "\n".join(line for name in found[2].split() for line in table(result, name)) + "\n\n" + found[3]
        )

    def sized(found: re.Match[str]) -> str:
        lines = ["", *sizing.fleets(result), "", *sizing.billion(result), ""]
        return found[1] + "\n".join(lines) + "\n" + found[2]

    return _SIZING.sub(sized, _TABLES.sub(tables, page))


def table(result: Result, section: str) -> Iterator[str]:
    """One section in Markdown: its conditions as lines of their own."""
    figures = [figure for figure in result.figures if figure.section == section]
    if not figures:
        raise ValueError(f"the run has no figures of section {section!r}")
    targeted = any(figure.targets for figure in figures)
    yield ""
    yield f"| {section} | | of its ceiling |" + (" target |" if targeted else "")
    yield "|---|---|---|" + ("---|" if targeted else "")
    conditions = ""
    for figure in figures:
        if (said := report.conditions(figure.at)) and said != conditions:
            conditions = said
            yield f"| *{said}* | | |" + (" |" if targeted else "")
        yield row(figure, targeted)


def row(figure: Figure, targeted: bool) -> str:
    ratio = f"{figure.ratio:.2f} ({figure.of})" if figure.ratio is not None else ""
    cells = [figure.what, f"{report.number(figure.value)} {figure.unit}".strip(), ratio]
    if targeted:
        cells.append(", ".join(f"{'✓' if one['met'] else '✗'} {one['text']}" for one in figure.targets))
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "bench" / "results" / "latest.json"
    if given.resolve() != RUN:
        shutil.copyfile(given, RUN)
    result = Result.load(RUN)
    targets.compare(result)
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} has the figures of {report.heading(result)}")


if __name__ == "__main__":
    main()
