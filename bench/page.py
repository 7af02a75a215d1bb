"""`python -m bench.page`: put the figures of the last runs into docs/performance.md, and the runs beside it.

Tables stand on the page between a mark and `<!-- end -->`, and are written anew:

    <!-- figures: park release -->    sections of `make bench`
    <!-- later: churn -->             sections of `make bench BENCH_ARGS="--only … --output bench/results/later.json"`
    <!-- where: turn database -->     sections of `python -m bench.where`
    <!-- plans -->                    `python -m bench.plans --json`
    <!-- sizing -->                   what follows from the first of them (bench/sizing.py)

So no figure in them was typed by hand; a test compares the page with the runs.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench import report, sizing, targets
from bench.figures import Figure, Result

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "bench" / "results"
PAGE = DOCS / "performance.md"
TAKEN = {
    "latest.json": "performance.json",
    "later.json": "performance-later.json",
    "where.json": "performance-where.json",
    "plans.json": "performance-plans.json",
}
"""Results, and the names that they have beside the page."""
_MARK = re.compile(r"(<!-- (figures|later|where|plans|sizing)(?:: ([a-z ]+))? -->\n).*?(<!-- end -->)", re.DOTALL)


class Runs(NamedTuple):
    """What the page is made of: results of the benchmark, of bench.where, and the JSON of bench.plans.

    ``later`` is another run of the benchmark, for sections that are repeated or take too long for one sitting.
    """

    full: Result
    later: Result
    where: Result
    plans: dict[str, Any]

    @classmethod
    def load(cls, directory: Path = DOCS) -> Runs:
        full, later, where, plans = (directory / name for name in TAKEN.values())
        runs = cls(Result.load(full), Result.load(later), Result.load(where), json.loads(plans.read_text()))
        for run in (runs.full, runs.later):
            targets.compare(run)
        return runs


def filled(page: str, runs: Runs) -> str:
    """The page with the tables of these runs. Raises ValueError for a section that a run does not have."""

    def instead(found: re.Match[str]) -> str:
        mark, kind, names, end = found.groups()
        lines: Iterable[str]
        match kind:
            case "figures":
                lines = [line for name in names.split() for line in table(runs.full, name)]
            case "later":
                lines = [line for name in names.split() for line in table(runs.later, name)]
            case "where":
                lines = [line for name in names.split() for line in table(runs.where, name)]
            case "plans":
                lines = plans(runs.plans)
            case _:
                lines = ["", *sizing.fleets(runs.full), "", *sizing.billion(runs.full)]
        return mark + "\n".join([*lines, "", end])

    return _MARK.sub(instead, page)


def table(result: Result, section: str) -> Iterator[str]:
    """One section in Markdown: its conditions as lines of their own."""
    figures = [figure for figure in result.figures if figure.section == section]
    if not figures:
        raise ValueError(f"the run has no figures of section {section!r}")
    columns = ["", ""]
    columns += ["of its ceiling"] if any(figure.ratio is not None for figure in figures) else []
    columns += ["target"] if any(figure.targets for figure in figures) else []
    yield ""
    yield line([f"**{section}**", *columns[1:]])
    yield "|---" * len(columns) + "|"
    conditions = ""
    for figure in figures:
        if (said := report.conditions(figure.at)) and said != conditions:
            conditions = said
            yield line([f"*{said}*", *[""] * (len(columns) - 1)])
        yield line(cells(figure, columns))
    for note in result.notes:
        of, _, said = note.partition(": ")
        if of == section:
            yield ""
            yield f"*The run's own note on {section}:* {said}."


def cells(figure: Figure, columns: list[str]) -> Iterator[str]:
    yield figure.what
    yield f"{report.number(figure.value)} {figure.unit}".strip()
    if "of its ceiling" in columns:
        yield f"{figure.ratio:.2f} ({figure.of})" if figure.ratio is not None else ""
    if "target" in columns:
        yield ", ".join(f"{'✓' if one['met'] else '✗'} {one['text']}" for one in figure.targets)


def plans(found: dict[str, Any]) -> Iterator[str]:
    """The statements by themselves."""
    yield ""
    yield line([f"**{found['rows']:,} rows, {found['lanes']} lanes, {found['held']:,} held**", *_PLANS.values()])
    yield "|---" * (1 + len(_PLANS)) + "|"
    for one in found["statements"]:
        yield line([one["name"], *(_of_plan(one[name]) for name in _PLANS)])


def _of_plan(value: float | None) -> str:
    return f"{value:,}" if isinstance(value, int) else "" if value is None else report.number(value)


_PLANS = {"rows": "rows", "ms": "ms", "planning_ms": "planning, ms", "buffers": "pages", "touched": "partitions"}


def line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.page", description=__doc__.split("\n\n")[0])
    parser.add_argument("--again", action="store_true", help="from the runs beside the page, without newer results")
    if not parser.parse_args().again:
        for result, name in TAKEN.items():
            if (RESULTS / result).exists():
                shutil.copyfile(RESULTS / result, DOCS / name)
    runs = Runs.load()
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), runs), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} has the figures of {report.heading(runs.full)}")


if __name__ == "__main__":
    main()
