"""`make bench`: what the daemon does on this machine, beside what broker and database can do by themselves.

Starts servers of its own and measures section by section; writes bench/results/latest.json (a quick run: quick.json),
charts beside it, and prints a table. The targets are those of the project; a figure that misses one is told, and fails
nothing. Every figure of a run comes from the same servers on the same machine: the ratios are what to keep.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench import (
    adoption,
    bodies,
    burst,
    ceilings,
    churn,
    compaction,
    ending,
    given,
    importing,
    looking,
    mariadb,
    native,
    park,
    peers,
    processes,
    release,
    report,
    start,
    steady,
    targets,
)
from bench.about import about
from bench.figures import Result
from bench.meter import Neighbours, adopt_orphans
from bench.run import Bench, Options, quick
from bench.servers import running_servers
from delayer import telemetry

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PARTIAL = RESULTS / "partial.json"
"""What there is so far, should the machine go down in the last section."""
SECTIONS = {
    "ceilings": ceilings, "park": park, "release": release, "steady": steady, "burst": burst, "native": native,
    "peers": peers, "processes": processes, "adoption": adoption, "bodies": bodies, "start": start,
    "compaction": compaction, "importing": importing, "mariadb": mariadb, "looking": looking,
    "churn": churn,
}  # fmt: skip
DISTURBED = 0.15
"""Cores that other programs may take before it is said."""
NEEDS = {"park": "ceilings", "release": "ceilings", "burst": "ceilings", "peers": "native"}
"""Sections that say little without another one of the same run."""


TAKES_MINUTES = {"adoption", "churn", "compaction", "importing", "looking", "mariadb", "processes"}
"""Say nothing in seconds: a quick run has them only if they are asked for, and ends within two minutes."""


def chosen(only: str, skip: str = "", *, quick: bool = False) -> list[str]:
    """The names of the sections to run, in their order, with those that they need. Raises given.Mistake."""
    every = set(SECTIONS) - (TAKES_MINUTES if quick else set())
    wanted = given.names("--only", only, SECTIONS) or every
    wanted |= {NEEDS[name] for name in wanted if name in NEEDS}
    skipped = given.names("--skip", skip, SECTIONS)
    if not wanted - skipped:
        raise given.Mistake("argument --skip: expected to leave a section; found none left")
    return [name for name in SECTIONS if name in wanted - skipped]


def arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    some = given.at_least(1)
    short = f"all sections in small but {', '.join(sorted(TAKES_MINUTES))}, which say nothing in seconds"
    parser.add_argument("--quick", action="store_true", help=short)
    parser.add_argument("--only", default="", metavar="NAMES", help=f"some of: {', '.join(SECTIONS)}")
    parser.add_argument("--skip", default="", metavar="NAMES", help="all but these, e.g. churn")
    parser.add_argument("--count", type=some, help="messages of each park and release (default 200,000)")
    parser.add_argument("--sizes", type=given.numbers, help="bytes of body (default 512,4096)")
    parser.add_argument("--backlog", type=given.at_least(0), help="rows waiting beside it (default 10,000,000)")
    parser.add_argument("--repeats", type=some, help="turns where medians are told (default 3)")
    parser.add_argument("--rates", type=given.numbers, help="steady messages a second (default 2000,5000,10000)")
    parser.add_argument("--steady-seconds", type=some, help="how long each rate is measured (default 60)")
    parser.add_argument("--churn-seconds", type=some, help="default 600")
    parser.add_argument("--compacted", type=some, help="rows that are compacted (default 5,000,000)")
    parser.add_argument("--restored", type=some, help="rows of these that are restored (default 1,000,000)")
    alone = "compaction without what it does to traffic, which takes half an hour of a full run"
    parser.add_argument("--compaction-alone", action="store_true", default=None, help=alone)
    parser.add_argument("--imported", type=some, help="timeouts that are imported (default 1,000,000)")
    parser.add_argument("--output", type=Path, help="the JSON file (default bench/results/latest.json or quick.json)")
    parser.add_argument("--charts", type=Path, metavar="DIR", help="where charts go (default beside the JSON file)")
    parser.add_argument("--no-charts", action="store_true")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--show", type=Path, metavar="FILE", help="draw a stored result into bench/results, no more")
    return parser.parse_args(line)


def options_of(asked: argparse.Namespace) -> Options:
    options = quick() if asked.quick else Options()
    names = (
        "count",
        "sizes",
        "backlog",
        "repeats",
        "rates",
        "steady_seconds",
        "churn_seconds",
        "compacted",
        "restored",
        "compaction_alone",
        "imported",
    )
    return replace(options, **{name: getattr(asked, name) for name in names if getattr(asked, name) is not None})


@contextmanager
def progress_of(sections: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Two functions: what is being done, and that a section is done. Plain lines where nobody watches a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        began = time.monotonic()

        def line(text: str) -> None:
            print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

        yield line, lambda: None
        return
    bar = (SpinnerColumn(), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*bar, console=console, transient=True) as progress:
        task = progress.add_task("starting servers", total=sections)
        yield lambda text: progress.update(task, description=text), lambda: progress.advance(task)


async def attempt(bench: Bench, name: str) -> None:
    """Run a section. One that breaks ends the run in failure, but not before the others had their turn."""
    neighbours = Neighbours()
    try:
        await SECTIONS[name].run(bench)
    except Exception as error:  # noqa: BLE001 - whatever it was, an hour of other figures is worth more
        traceback.print_exc()
        bench.note(f"BROKEN: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        bench.result.about.setdefault("broken", []).append(name)
    cores = bench.result.about["cores_of_other_programs"][name] = round(neighbours.cores(), 2)
    if cores > DISTURBED:
        bench.note(
            f"other programs kept {cores:.1f} of {os.cpu_count()} cores busy meanwhile: do not trust these figures"
        )


async def measure(options: Options, names: list[str]) -> Result:
    with progress_of(len(names)) as (say, done):
        say("starting RabbitMQ and Postgres")
        async with running_servers() as servers:
            bench = Bench(options, servers, progress=say)
            bench.result.about = about(options, await servers.versions())
            seconds = bench.result.about["seconds"] = {}
            for name in names:
                began = time.monotonic()
                bench.section = name
                await attempt(bench, name)
                seconds[name] = round(time.monotonic() - began, 1)
                bench.result.save(PARTIAL)
                done()
    targets.compare(bench.result)
    return bench.result


def asked_for() -> tuple[argparse.Namespace, list[str], Path, Path]:
    """What was asked for, the sections to run, the JSON file, the directory of the charts. Raises given.Mistake."""
    asked = arguments()
    names = [] if asked.show else chosen(asked.only, asked.skip, quick=asked.quick)
    # What is only shown leaves nothing beside the file: that may be one of docs/.
    path = asked.show or asked.output or RESULTS / ("quick.json" if asked.quick else "latest.json")
    charts = asked.charts or (RESULTS if asked.show else path.parent)
    if not asked.show:
        given.writable("--output", path)
    if not asked.no_charts:
        given.directory("--charts", charts)
    return asked, names, path, charts


def measured(asked: argparse.Namespace, names: list[str], path: Path) -> Result:
    """The result, stored. Raises ending.Ended."""
    adopt_orphans()
    PARTIAL.unlink(missing_ok=True)
    result = ending.run(measure(options_of(asked), names))
    result.save(path)
    PARTIAL.unlink(missing_ok=True)
    return result


def main() -> int:
    telemetry.configure("console", "error")
    try:
        asked, names, path, directory = asked_for()
        if asked.show:
            result = given.result(path)
            targets.compare(result)
        else:
            result = measured(asked, names, path)
    except given.Mistake as mistake:
        print(mistake, file=sys.stderr)
        return given.USAGE
    except ending.Ended as ended:
        kept = f"what was finished is in {_from_here(PARTIAL)}" if PARTIAL.exists() else "nothing was finished"
        print(f"{ended}: ended before all was measured; {kept}", file=sys.stderr)
        return ended.exit_code
    drawn = []
    if not asked.no_charts:
        from bench import charts  # noqa: PLC0415 - matplotlib takes a second, and a table needs none of it

        drawn = charts.draw(result, directory, path.stem)
    if asked.json:
        print(result.as_json())
    else:
        console = Console(width=None if sys.stdout.isatty() else 140)
        report.show(result, console)
        told = f"{len(drawn)} charts {_from_here(directory)}/{path.stem}-*.png" if drawn else "no charts"
        console.print(f"{_from_here(path)}, {told}", style="dim", highlight=False)
    return 1 if result.about.get("broken") else 0


def _from_here(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    sys.exit(main())
