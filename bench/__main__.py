"""`make bench`: measure the daemon on this machine, and the ceilings of broker and database in the same run.

The program starts its own servers, measures section by section, writes a JSON file and prints three tables: rates,
lateness, cost. Only the ratios are comparable across machines. The figures are informational and never fail the run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench import (
    burst,
    ceilings,
    churn,
    commands,
    document,
    floods,
    hop,
    hours,
    http,
    keys,
    native,
    pair,
    park,
    peers,
    release,
    report,
    scale,
    schedules,
    sql,
    stalls,
    steady,
)
from bench.figures import Result
from bench.meter import Neighbours
from bench.run import RESULTS, Bench, Options, quick
from bench.servers import running_servers

HERE = Path(__file__).parent
SECTIONS = {
    "ceilings": ceilings, "park": park, "keys": keys, "sql": sql, "release": release, "pair": pair, "steady": steady,
    "burst": burst, "floods": floods, "native": native, "hop": hop, "peers": peers, "commands": commands,
    "churn": churn, "schedules": schedules, "http": http, "scale": scale, "hours": hours, "stalls": stalls,
}  # fmt: skip
NEEDS = {"http": "park", "park": "ceilings", "release": "ceilings", "burst": "ceilings", "peers": "native"}
"""Sections whose ratios need another section of the same run."""
TAKES_MINUTES = {"commands", "churn", "pair", "scale"}
"""Sections that a quick run leaves out: they need more than seconds."""
TAKES_HOURS = {"hours", "stalls"}
"""Sections that run only by name, or in a quick run."""
DISTURBED_CORES = 0.15
"""The run warns when other programs used more than this."""


def whole_number(text: str) -> int:
    """A type for argparse: a whole number of 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, found {text!r}")
    return int(text)


def whole_numbers(text: str) -> tuple[int, ...]:
    """A type for argparse: whole numbers with commas between them."""
    return tuple(whole_number(one) for one in text.split(","))


def section_names(text: str) -> set[str]:
    """A type for argparse: names of sections with commas between them."""
    names = {name.strip() for name in text.split(",") if name.strip()}
    if unknown := names - set(SECTIONS):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(SECTIONS)}; found {', '.join(sorted(unknown))}")
    return names


def arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="two minutes: fewer messages, no commands, no churn")
    parser.add_argument("--only", type=section_names, metavar="NAMES", help=f"some of: {', '.join(SECTIONS)}")
    parser.add_argument("--skip", type=section_names, default=set(), metavar="NAMES", help="all but these sections")
    parser.add_argument("--count", type=whole_number, help="messages of each park and release (default 200,000)")
    parser.add_argument("--sizes", type=whole_numbers, help="bytes of body (default 512,4096)")
    parser.add_argument("--backlog", type=whole_number, help="rows that wait beside the traffic (default 10,000,000)")
    parser.add_argument("--waiting", type=whole_number, help="messages that RabbitMQ 4.4 delays (default 1,000,000)")
    parser.add_argument("--repeats", type=whole_number, help="turns of each measurement; medians are shown (default 3)")
    parser.add_argument("--rates", type=whole_numbers, help="steady messages a second (default 2000,5000)")
    parser.add_argument("--steady-seconds", type=whole_number, help="seconds of each steady rate (default 60)")
    parser.add_argument("--churn-seconds", type=whole_number, help="seconds of churn (default 600)")
    parser.add_argument(
        "--schedules", type=whole_number, help="schedules that fire beside the traffic (default 10,000)"
    )
    parser.add_argument("--schedule-period", type=whole_number, help="seconds between their times (default 60)")
    parser.add_argument("--schedule-seconds", type=whole_number, help="seconds of that traffic (default 600)")
    parser.add_argument("--many-schedules", type=whole_number, help="schedules that wait (default 1,000,000)")
    parser.add_argument("--hours-seconds", type=whole_number, help="seconds of publishing in hours (default 10,800)")
    parser.add_argument("--hours-longest", type=whole_number, help="its longest delay, and warm-up (default 3600)")
    parser.add_argument("--hours-rate", type=whole_number, help="its messages a second (default 1000)")
    parser.add_argument("--hours-step", type=whole_number, help="seconds of each of its lines (default 60)")
    parser.add_argument("--stall-seconds", type=whole_number, help="seconds of each turn of stalls (default 3600)")
    parser.add_argument("--stall-rates", type=whole_numbers, help="its messages a second (default 200,2000)")
    parser.add_argument("--plugin-url", help="amqp:// URL of a broker with the delayed-message plugin, as a peer")
    parser.add_argument("--output", type=Path, help="the JSON file (default bench/results/latest.json or quick.json)")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print a stored result; measure nothing")
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("LINES", "SVG"), help="draw the lines of hours; no run")
    parser.add_argument(
        "--markdown", action="store_true",
        help="write the tables of docs/performance.md from bench/results; with --show, print those of that file",
    )  # fmt: skip
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
        "waiting",
        "plugin_url",
        "schedules",
        "schedule_period",
        "schedule_seconds",
        "many_schedules",
        "hours_seconds",
        "hours_longest",
        "hours_rate",
        "hours_step",
        "stall_seconds",
        "stall_rates",
    )
    return replace(options, **{name: getattr(asked, name) for name in names if getattr(asked, name) is not None})


def chosen(asked: argparse.Namespace) -> list[str]:
    """The names of the sections to run, in their order, with the sections that they need."""
    wanted = asked.only or set(SECTIONS) - (TAKES_MINUTES if asked.quick else TAKES_HOURS)
    wanted = wanted | {NEEDS[name] for name in wanted if name in NEEDS}
    return [name for name in SECTIONS if name in wanted - asked.skip]


def about(options: Options, versions: dict[str, str]) -> dict[str, Any]:
    """The circumstances of a run: instant, command, revision, machine and options."""
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    revision = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    memory_gib = psutil.virtual_memory().total / 2**30
    machine = f"{os.cpu_count()} cores, {memory_gib:.0f} GiB, {platform.system()} {platform.release()}"
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv[1:]),
        "revision": revision,
        "machine": machine,
        "cores": os.cpu_count(),
        "versions": {"Python": platform.python_version(), **versions},
        "options": asdict(options),
        "cores_of_other_programs": {},
        "seconds": {},
    }


@contextmanager
def progress_of(sections: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Two functions: one reports the current measurement, the other the end of a section. Without a terminal, plain
    lines."""
    console = Console(stderr=True)
    if not console.is_terminal:
        began = time.monotonic()
        yield (
            lambda text: print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True),
            lambda: None,
        )
        return
    bar = (SpinnerColumn(), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*bar, console=console, transient=True) as progress:
        task = progress.add_task("starting servers", total=sections)
        yield lambda text: progress.update(task, description=text), lambda: progress.advance(task)


async def attempt(bench: Bench, name: str) -> None:
    """Run a section. A section that breaks fails the run, but only after the other sections had their turn."""
    neighbours, began = Neighbours(), time.monotonic()
    told = bench.result.about
    try:
        await SECTIONS[name].run(bench)
    except Exception as error:  # noqa: BLE001 - the figures of the other sections are worth more than a quick end
        traceback.print_exc()
        bench.note(f"BROKEN: {type(error).__name__}: {error}")
        told.setdefault("broken", []).append(name)
    told["seconds"][name] = round(time.monotonic() - began, 1)
    cores = told["cores_of_other_programs"][name] = round(neighbours.cores(), 2)
    if cores > DISTURBED_CORES:
        bench.note(f"other programs used {cores:.1f} of {os.cpu_count()} cores: do not trust these figures")


async def measure(options: Options, names: list[str], path: Path) -> Result:
    """Run these sections, and write the result to ``path`` after each of them."""
    with progress_of(len(names)) as (say, done):
        say("starting RabbitMQ and Postgres")
        async with running_servers() as servers:
            bench = Bench(options, servers, progress=say, folder=path.parent)
            bench.result.about = about(options, await servers.versions())
            for name in names:
                bench.section = name
                await attempt(bench, name)
                bench.result.save(path)
                done()
    return bench.result


def main() -> int:
    asked = arguments()
    if asked.plot:
        from bench.plot import draw  # noqa: PLC0415 - matplotlib takes a second to load

        draw(*asked.plot)
        return 0
    if asked.markdown and not asked.show:
        document.write()
        return 0
    path = asked.output or RESULTS / ("quick.json" if asked.quick else "latest.json")
    result = Result.load(asked.show) if asked.show else asyncio.run(measure(options_of(asked), chosen(asked), path))
    if asked.markdown:
        print(report.markdown(result))
    else:
        report.show(result, Console(width=None if sys.stdout.isatty() else 140))
    return 1 if result.about.get("broken") else 0


if __name__ == "__main__":
    sys.exit(main())
