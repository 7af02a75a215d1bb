"""`python -m bench.backlog_page`: put the figures of compaction, restoring and Spark's reading into docs/backlog.md,
and the runs beside it.

    --whole FILE     `make bench BENCH_ARGS="--only compaction --output FILE"`, traffic beside it too
    --alone FILE     the same with `--compaction-alone`, of a million rows or more
    --reading FILE   `python -m bench.backlog --output FILE`, ten million rows
    --orders FILE    `python -m bench.backlog --orders --rows 200000 --output FILE`: how large an extract is

Without one of them the run that lies beside the page stays; ``alone`` may be missing there. Tables stand on the page
between a mark (`<!-- runs -->`, `<!-- reading -->`, `<!-- compaction -->`, `<!-- billion -->`, `<!-- missed -->`) and
`<!-- end -->`, and are written anew: so no figure in them was typed by hand; a test compares the page with the runs. A
target that was missed needs a word in backlog_words.LIMITS of what stops it. Nothing is written where that, or a
figure, is missing.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench import about, given, page, report, targets
from bench.backlog_words import LIMITS, OWN_ROWS, ROWS
from bench.figures import Figure, Result

PAGE: Final = page.DOCS / "backlog.md"
KEPT: Final = {
    "whole": "backlog-compaction.json",
    "alone": "backlog-alone.json",
    "reading": "backlog-reading.json",
    "orders": "backlog-orders.json",
}
BILLION: Final = 1_000_000_000
CORES: Final = 16
"""Of a small cluster, for what is reckoned."""
ENOUGH: Final = 500_000
"""Messages that say how fast restoring is; of fewer it is how fast Spark starts."""
FULL_READ: Final = 200_000
"""Rows a second of the full read, the target."""
PASSING: Final = 5_000
"""Messages a second that are released while an audit reads, for what is reckoned."""
_MARK: Final = re.compile(r"(<!-- (runs|reading|compaction|billion|missed) -->\n).*?(<!-- end -->)", re.DOTALL)

READ: Final = (
    ("every column, bodies too", "full_read"),
    ("an audit's extract: read, checked, written", "extract"),
    ("an audit as a whole", "audit"),
)


class Runs(NamedTuple):
    """What the page is made of: one or two of the benchmark, two of bench.backlog."""

    whole: Result
    alone: Result | None
    reading: dict[str, Any]
    orders: dict[str, Any]

    @classmethod
    def load(cls, taken: dict[str, Path] | None = None) -> Runs:
        """From beside the page; ``taken`` stand in for some of them. Raises given.Mistake."""
        paths = {name: page.DOCS / kept for name, kept in KEPT.items()} | (taken or {})
        alone = paths["alone"] if "alone" in (taken or {}) or paths["alone"].exists() else None
        found = cls(
            given.result(paths["whole"]),
            given.result(alone) if alone else None,
            read(paths["reading"]),
            read(paths["orders"]),
        )
        for run in found.compactions.values():
            targets.compare(run)
        return found

    @property
    def compactions(self) -> dict[str, Result]:
        """Those of the benchmark, by name."""
        return ({"alone": self.alone} if self.alone else {}) | {"whole": self.whole}

    @property
    def best(self) -> Result:
        """The one to reckon with: the larger it is, the less it says of the start of Spark."""
        return self.alone or self.whole


def read(path: Path) -> dict[str, Any]:
    """What bench.backlog wrote. Raises given.Mistake."""
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
        if all("rows_per_second" in found[name] for _, name in READ):
            return found
    except OSError as error:
        raise given.Mistake(f"{path}: expected what bench.backlog writes; found {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        pass
    raise given.Mistake(f"{path}: expected what bench.backlog writes; found something else")


def filled(text: str, runs: Runs) -> str:
    """The page with the tables of these runs. Raises ValueError for a figure, or a word in LIMITS, that is missing."""
    made = {"runs": provenance, "reading": reading, "compaction": compaction, "billion": billion, "missed": missed}

    def instead(found: re.Match[str]) -> str:
        mark, name, end = found.groups()
        return mark + "\n".join(["", *made[name](runs), "", end])

    return _MARK.sub(instead, text)


def provenance(runs: Runs) -> Iterator[str]:
    """Every run: when, of which revision, of what, and who else was there."""
    yield page.line(["", "begun", "revision", "of", "cores that other programs used"])
    yield "|---" * 5 + "|"
    for name, run in runs.compactions.items():
        some = run.about.get("options", {})
        of = f"{some.get('compacted', 0):,} orders"
        yield _run(name, run.about, of, about.disturbance(run.about))
    for name, told in (("reading", runs.reading), ("orders", runs.orders)):
        of = "orders" if told.get("orders") else f"bodies of {told['size']:,} B"
        others = max(told[one].get("cores_of_others", 0.0) for _, one in READ)
        yield _run(name, told.get("about", {}), f"{told['rows']:,} rows, {of}", f"{others:.2f} at most")


def _run(name: str, told: dict[str, Any], of: str, others: str) -> str:
    kept = KEPT[name]
    return page.line([f"[{kept}]({kept})", about.when(told), str(told.get("revision", "not said")), of, others])


def compaction(runs: Runs) -> Iterator[str]:
    """Both runs side by side, with what was judged."""
    every = list(runs.compactions.values())
    yield page.line(["", *(f"{_rows(run):,} orders" for run in every), "target"])
    yield "|---" + "|---:" * len(every) + "|---|"
    for title, what in ROWS:
        found = [run.find("compaction", what) for run in every]
        if found[-1] is None:
            raise ValueError(f"the run has no figure {what!r} in section 'compaction'")
        texts = dict.fromkeys(target["text"] for one in found if one for target in one.targets)
        yield page.line([title, *map(_told, found), ", ".join(texts)])
        if what == "compact, giving room back":
            yield page.line(["rows/s with that", *(f"{report.number(with_room(run))} msg/s" for run in every), ""])
    for name, run in runs.compactions.items():
        for note in run.notes:
            yield ""
            yield f"*The run's own note in {KEPT[name]}:* {report.note(note.removeprefix('compaction: '))}."


def with_room(run: Result) -> float:
    """Rows a second of compacting and giving the room back together."""
    return _rows(run) / (_value(run, "compact, seconds") + _value(run, "compact, giving room back"))


def _rows(run: Result) -> int:
    figure = run.find("compaction", "compact, rate")
    if figure is None:
        raise ValueError("the run has no figure 'compact, rate' in section 'compaction'")
    return figure.at["rows"]


def _told(figure: Figure | None) -> str:
    if figure is None:
        return ""
    of = f" ({figure.at['rows']:,} messages)" if figure.what in OWN_ROWS else ""
    mark = "".join("✓ " if target["met"] else "✗ " for target in figure.targets)
    return f"{mark}{report.number(figure.value)} {figure.unit}".strip() + of


def reading(runs: Runs) -> Iterator[str]:
    """Of ten million rows, and what follows for a billion of them."""
    run = runs.reading
    yield page.line(["", f"{run['rows']:,} rows", "CPU a row", "a billion", f"{CORES} cores, if the disks keep up"])
    yield "|---" * 5 + "|"
    for title, name in READ:
        told = run[name]
        cpu = told["cpu_us_per_row"]
        database = f"{sum(cpu.values()):.1f} µs, {cpu['database']:.1f} of them the database's"
        rate = f"{told['rows_per_second']:,} rows/s ({report.number(told['seconds'])} s)"
        mark = ("✓ " if told["rows_per_second"] >= FULL_READ else "✗ ") if name == "full_read" else ""
        seconds = told["seconds"] / run["rows"] * BILLION
        yield page.line([title, mark + rate, database, _long(seconds), _long(seconds * run["cores"] / CORES)])
    yield page.line(["*target of the first*", f"≥ {FULL_READ:,} rows/s", "", "", ""])
    peaks = {kind: max(run[name]["peak_mb"].get(kind, 0) for _, name in READ) for kind in ("python worker", "jvm")}
    said = f"{peaks['python worker']:,} MB for a Python process, {peaks['jvm']:,} MB for the JVM"
    yield page.line(["memory, at most", said, "", "the same for each executor", ""])


def billion(runs: Runs) -> Iterator[str]:
    """Disk and hours of a billion orders, on paper."""
    best, extract, orders = runs.best, runs.reading["extract"], runs.orders
    before, after = (_value(best, f"bytes a message {one}") for one in ("before", "after"))
    size, disk = orders["extract"]["found"] / orders["rows"], orders["audit"]["peak_disk_bytes"] / orders["rows"]
    held = extract["seconds"] / runs.reading["rows"] * BILLION
    yield page.line(["", "a message", "a billion orders"])
    yield "|---" * 3 + "|"
    yield page.line(["the store, not compacted", f"{before:,.0f} bytes", _large(before * BILLION)])
    yield page.line(["the store, compacted", f"{after:,.0f} bytes", _large(after * BILLION)])
    yield page.line(["an audit's extract, below `--work`", f"{size:,.0f} bytes", _large(size * BILLION)])
    shuffled = "the most that lies there while it is judged: the extract, and what Spark shuffles"
    yield page.line([shuffled, f"{disk:,.0f} bytes", _large(disk * BILLION)])
    rate = with_room(best)
    yield page.line(["compacting and giving room back, on this machine", f"{rate:,.0f}/s", _long(BILLION / rate)])
    if _restored(runs) >= ENOUGH:
        rate = _value(best, "restore, rate")
        yield page.line(["restoring in bulk, on this machine", f"{rate:,.0f}/s", _long(BILLION / rate)])
    kept = f"{PASSING:,} messages a second that are released meanwhile"
    yield page.line(
        [f"rows that an audit's snapshot keeps from being cleaned up: {kept}", f"{before:,.0f} bytes",
         f"{_large(PASSING * held * before)} in the {_long(held)} of the reading"]
    )  # fmt: skip


def missed(runs: Runs) -> Iterator[str]:
    """Every target that was missed, and what stops it. Raises ValueError where nobody said that."""
    found: dict[str, list[str]] = {}
    for name, run in runs.compactions.items():
        kept = KEPT[name]
        for figure in run.figures:
            for target in figure.targets:
                if not target["met"]:
                    said = f"{report.judged(figure, target)} in [{kept}]({kept}), wanted {target['text']}"
                    found.setdefault(figure.what, []).append(said)
    rate = runs.reading["full_read"]["rows_per_second"]
    if rate < FULL_READ:
        kept = KEPT["reading"]
        found["full read"] = [f"{rate:,} rows/s in [{kept}]({kept}), wanted ≥ {FULL_READ:,}"]
    if not found:
        yield "None."
    if _restored(runs) < ENOUGH:
        yield (
            f"- **restoring a million**: not judged. These runs restored {_restored(runs):,} messages in bulk, and of "
            "so few most of the time is the start of Python processes."
        )
    for what, said in found.items():
        if what not in LIMITS:
            raise ValueError(f"missed: {what!r}, and bench/backlog_words.py does not say what stops it")
        yield f"- **{what}**: {'; '.join(said)}. What stops it: {LIMITS[what]}"


def _restored(runs: Runs) -> int:
    """Messages that the largest run restored in bulk, by itself."""
    figures = (run.find("compaction", "restore, rate") for run in runs.compactions.values())
    return max(figure.at["rows"] for figure in figures if figure is not None)


def _value(run: Result, what: str) -> float:
    figure = run.find("compaction", what)
    if figure is None or not figure.value:
        raise ValueError(f"the run has no figure {what!r} in section 'compaction'")
    return figure.value


def _long(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def _large(size: float) -> str:
    return f"{size / 1e12:.2f} TB" if size >= 1e12 else f"{size / 1e9:.0f} GB"


def unfit(name: str, path: Path) -> str | None:
    """Why a run is not to stand in for the one beside the page; None: it may. Raises given.Mistake."""
    kept = page.DOCS / KEPT[name]
    if name in ("whole", "alone"):
        return page.unfit(path, kept) if kept.exists() else None
    new = read(path)
    if (name == "orders") != bool(new.get("orders")):
        return "it is of other bodies"
    if kept.exists() and name == "reading" and new["rows"] < (there := read(kept))["rows"]:
        return f"it is of {new['rows']:,} rows, the page's of {there['rows']:,}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.backlog_page", description=__doc__.split("\n\n")[0])
    for name, kept in KEPT.items():
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"a run to become docs/{kept}")
    asked = vars(parser.parse_args())
    taken = {name: path for name, path in asked.items() if path is not None}
    try:
        for name, path in taken.items():
            if why := unfit(name, path):
                raise given.Mistake(f"{path} is not taken: {why}")
        text = filled(PAGE.read_text(encoding="utf-8"), Runs.load(taken))
    except ValueError as mistake:  # given.Mistake, or what is not there: nothing is written
        print(f"nothing is changed: {mistake}", file=sys.stderr)
        return given.USAGE
    for name, path in taken.items():
        shutil.copyfile(path, page.DOCS / KEPT[name])
    PAGE.write_text(text, encoding="utf-8")
    print(
        f"{PAGE.name} has the figures of {', '.join(KEPT[name] for name in KEPT if (page.DOCS / KEPT[name]).exists())}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
