"""`python -m bench.page`: put the figures of the last runs into docs/performance.md, and the runs and charts beside it.

Tables stand on the page between a mark and `<!-- end -->`, and are written anew:

    <!-- runs -->                     the runs beside the page: when, of which revision, with which options
    <!-- compared -->                 some figures of all runs of the benchmark, side by side
    <!-- missed -->                   every target that was missed, in any of these
    <!-- figures: park release -->    sections of `make bench`
    <!-- later: steady churn -->      sections of `make bench BENCH_ARGS="--only … --output bench/results/later.json"`
    <!-- where: turn database -->     sections of `python -m bench.where`
    <!-- profile: parking passing --> sections of `python -m bench.profile`
    <!-- rolling: rolling -->         the one of `python -m bench.rolling`
    <!-- looking: looking -->         `make bench BENCH_ARGS="--only looking --output bench/results/looking.json"`
    <!-- plans -->                    `python -m bench.plans --json`
    <!-- sizing: fleets memory -->    what follows from the first of them (bench/sizing.py)

So no figure in them was typed by hand; a test compares the page with the runs. All tables are made before anything is
written, and a result that says less than the one that is there already is not taken.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench import about, ceilings, given, report, sizing, targets
from bench.figures import Figure, Result

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "bench" / "results"
PAGE = DOCS / "performance.md"
CHARTS = DOCS / "img"
TAKEN = {
    "latest.json": "performance.json",
    "later.json": "performance-later.json",
    "where.json": "performance-where.json",
    "profile.json": "performance-profile.json",
    "rolling.json": "performance-rolling.json",
    "looking.json": "performance-looking.json",
    "plans.json": "performance-plans.json",
}
"""Results, and the names that they have beside the page."""
KEPT = ("performance-earlier.json", "performance-park.json")
"""Runs that the page compares with, and that nothing replaces by itself."""
BENCHMARK = ("performance-earlier.json", "performance.json", "performance-later.json", "performance-park.json")
"""The runs of the benchmark proper, in the order of their time."""
_MARK = re.compile(
    r"(<!-- (runs|compared|missed|figures|later|where|profile|rolling|looking|plans|sizing)(?:: ([a-z ]+))? -->\n)"
    r".*?(<!-- end -->)",
    re.DOTALL,
)
_CHART = re.compile(r"\]\(img/(performance(?:-later)?)-(\w+)\.png\)")


class Runs(NamedTuple):
    """What the page is made of, by the names of the files beside it; plans are the JSON of bench.plans.

    ``later`` is another run of the benchmark, for sections that are repeated or take too long for one sitting.
    """

    results: dict[str, Result]
    plans: dict[str, Any]

    @property
    def full(self) -> Result:
        return self.results["performance.json"]

    @property
    def later(self) -> Result:
        return self.results["performance-later.json"]

    @classmethod
    def load(cls, taken: dict[str, Path] | None = None) -> Runs:
        """From beside the page; ``taken`` stand in for some of them. Raises given.Mistake."""
        taken = taken or {}
        paths = {name: taken.get(name, DOCS / name) for name in (*TAKEN.values(), *KEPT)}
        plans = _plans(paths.pop("performance-plans.json"))
        results = {name: given.result(path) for name, path in paths.items()}
        for name in (*BENCHMARK, "performance-looking.json"):
            targets.compare(results[name])
        return cls(results, plans)


def _plans(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return dict(found) if found["statements"] else {}
    except OSError as error:
        raise given.Mistake(f"{path}: expected what bench.plans writes; found {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise given.Mistake(f"{path}: expected what bench.plans writes; found something else") from None


def filled(page: str, runs: Runs) -> str:
    """The page with the tables of these runs. Raises ValueError for a section that a run does not have."""

    def instead(found: re.Match[str]) -> str:
        mark, kind, names, end = found.groups()
        return mark + "\n".join([*lines(kind, (names or "").split(), runs), "", end])

    return _MARK.sub(instead, page)


def lines(kind: str, names: list[str], runs: Runs) -> Iterator[str]:
    sections = {"figures": runs.full, "later": runs.later}
    sections |= {kind: runs.results[f"performance-{kind}.json"] for kind in ("where", "profile", "rolling", "looking")}
    match kind:
        case "runs":
            yield from provenance(runs)
        case "compared":
            yield from compared(runs)
        case "missed":
            yield from missed(runs)
        case "plans":
            yield from plans(runs.plans)
        case "sizing":
            for name in names:
                yield ""
                yield from _sizing(name, runs)
        case _:
            for name in names:
                yield from table(sections[kind], name)


def _sizing(name: str, runs: Runs) -> Iterator[str]:
    match name:
        case "limits":
            return sizing.limits(runs.full)
        case "fleets":
            return sizing.fleets(runs.full)
        case "native":
            return sizing.native(runs.full)
        case "memory":
            return sizing.memory(runs.full)
        case "waiting":
            return sizing.waiting(runs.full)
        case "billion":
            return sizing.billion(runs.full)
    raise ValueError(f"there is no sizing of {name!r}")


def provenance(runs: Runs) -> Iterator[str]:
    """Every file: when and of which revision it is, and what was not as a full run has it."""
    yield ""
    yield line(["", "begun", "revision", "options (those of a full run)", "took", "cores that other programs used"])
    yield "|---" * 6 + "|"
    for name, run in sorted(runs.results.items(), key=lambda item: str(item[1].about.get("at", ""))):
        told = run.about
        facts = (told.get("revision", ""), about.changed(told), about.minutes(told), about.disturbance(told))
        yield line([f"[{name}]({name})", about.when(told), *facts])
    told, name = runs.plans.get("about", {}), "performance-plans.json"
    options = f"{runs.plans['rows']:,} rows, medians of {runs.plans['runs']}"
    yield line([f"[{name}]({name})", about.when(told), told.get("revision", "not said in the file"), options, "", ""])


_SMALL, _EMPTY, _FULL = {"body": 512}, {"rate": 5000, "backlog": 0}, {"rate": 5000, "backlog": targets.TEN_MILLION}
COMPARED: tuple[tuple[str, str, str, dict[str, int]], ...] = (
    ("broker publish, confirmed, 512 B", "ceilings", ceilings.PUBLISH, _SMALL),
    ("broker consume, 512 B", "ceilings", ceilings.CONSUME, _SMALL),
    ("store copy, 512 B", "ceilings", ceilings.COPY, _SMALL),
    ("park, 512 B, 0 waiting", "park", "park", _SMALL | {"backlog": 0}),
    ("park, 512 B, 10,000,000 waiting", "park", "park", _SMALL | {"backlog": targets.TEN_MILLION}),
    ("release, 512 B, 0 waiting", "release", "release", _SMALL | {"backlog": 0}),
    ("release, 512 B, 10,000,000 waiting", "release", "release", _SMALL | {"backlog": targets.TEN_MILLION}),
    ("5,000/s, broker alone, p50", "steady", "broker alone, lateness p50", _EMPTY),
    ("5,000/s, broker alone, p99", "steady", "broker alone, lateness p99", _EMPTY),
    ("5,000/s, without a store, p50", "steady", "without a store, lateness p50", _EMPTY),
    ("5,000/s, without a store, p99", "steady", "without a store, lateness p99", _EMPTY),
    ("5,000/s, 0 waiting, p50", "steady", "lateness p50", _EMPTY),
    ("5,000/s, 0 waiting, p99", "steady", "lateness p99", _EMPTY),
    ("5,000/s, 10,000,000 waiting, p50", "steady", "lateness p50", _FULL),
    ("5,000/s, 10,000,000 waiting, p99", "steady", "lateness p99", _FULL),
    ("5,000/s, 0 waiting, CPU of daemon", "steady", "CPU of daemon", _EMPTY),
    ("5,000/s, 0 waiting, CPU of database", "steady", "CPU of database", _EMPTY),
    ("burst of 100,000, drained", "burst", "drained, from the first due instant", {"count": 100_000}),
)


def compared(runs: Runs) -> Iterator[str]:
    """The same figures of every run of the benchmark."""
    found = [runs.results[name] for name in BENCHMARK]
    yield ""
    yield line(["", *(f"{about.when(run.about)}" for run in found)])
    yield "|---" * (1 + len(found)) + "|"
    for title, section, what, at in COMPARED:
        figures = [run.find(section, what, **at) for run in found]
        yield line([title, *(f"{report.number(one.value)} {one.unit}" if one else "" for one in figures)])


def missed(runs: Runs) -> Iterator[str]:
    """The targets that a run missed, so that none is forgotten where the reasons are told."""
    every = [runs.results[name] for name in BENCHMARK]
    yield ""
    yield line(["missed", "conditions", "target", *(about.when(run.about) for run in every)])
    yield "|---" * (3 + len(every)) + "|"
    found: dict[tuple[str, str, str], list[str]] = {}
    for column, run in enumerate(every):
        for figure in run.figures:
            for target in figure.targets:
                key = (f"{figure.section}: {figure.what}", report.conditions(figure.at), target["text"])
                verdicts = found.setdefault(key, [""] * len(every))
                verdicts[column] = f"{'✓' if target['met'] else '✗'} {report.judged(figure, target)}"
    for key, verdicts in found.items():
        if any(one.startswith("✗") for one in verdicts):
            yield line([*key, *verdicts])


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
    for figure in report.grouped(figures):
        if (said := report.conditions(figure.at)) and said != conditions:
            conditions = said
            yield line([f"*{said}*", *[""] * (len(columns) - 1)])
        yield line(cells(figure, columns))
    for note in result.notes:
        of, _, said = note.partition(": ")
        if of == section:
            yield ""
            yield f"*The run's own note on {section}:* {report.note(said)}."


def cells(figure: Figure, columns: list[str]) -> Iterator[str]:
    yield figure.what
    yield f"{report.number(figure.value)} {figure.unit}".strip()
    if "of its ceiling" in columns:
        yield f"{report.share(figure.ratio)} ({figure.of})" if figure.ratio is not None else ""
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


def unfit(new: Path, old: Path) -> str | None:
    """Why a result is not to stand in for the one beside the page; None: it may. Raises given.Mistake."""
    if new.name == "plans.json":
        told, there = _plans(new), _plans(old)
        if told["rows"] < there["rows"]:
            return f"it is of {told['rows']:,} rows, the page's of {there['rows']:,}"
        of, than = told.get("about", {}), there.get("about", {})
    else:
        of, than = given.result(new).about, given.result(old).about
    if of.get("kind") == "quick":
        return "it is a quick run"
    if of.get("broken"):
        return f"sections of it broke: {', '.join(of['broken'])}"
    if not of.get("at") or of["at"] < than.get("at", ""):
        return f"it is of {about.when(of)}, the page's of {about.when(than)}"
    return None


def newer() -> dict[str, Path]:
    """Results to take, by the names that they get; of others it is told why not."""
    taken = {}
    for result, name in TAKEN.items():
        path = RESULTS / result
        if not path.exists():
            continue
        if (DOCS / name).exists() and (why := unfit(path, DOCS / name)):
            print(f"{path.relative_to(ROOT)} is not taken: {why}", file=sys.stderr)
        else:
            taken[name] = path
    return taken


def draw(page: str, runs: Runs) -> None:
    """The charts that the page shows."""
    shown = sorted({stem for stem, _ in _CHART.findall(page)})
    if shown:
        from bench import charts  # noqa: PLC0415 - matplotlib takes a second, and is not there without the extra
    for stem in shown:
        names = {name for of, name in _CHART.findall(page) if of == stem}
        charts.draw(runs.results[f"{stem}.json"], CHARTS, stem, names)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.page", description=__doc__.split("\n\n")[0])
    parser.add_argument("--again", action="store_true", help="from the runs beside the page, without newer results")
    again = parser.parse_args().again
    try:
        taken = {} if again else newer()
        runs = Runs.load(taken)
        text = filled(PAGE.read_text(encoding="utf-8"), runs)
    except ValueError as mistake:  # given.Mistake, or a section that is not there: nothing is written
        print(f"nothing is changed: {mistake}", file=sys.stderr)
        return given.USAGE
    for name, path in taken.items():
        shutil.copyfile(path, DOCS / name)
    PAGE.write_text(text, encoding="utf-8")
    draw(text, runs)
    print(f"{PAGE.relative_to(ROOT)} has the figures of {report.heading(runs.full)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
