"""The time of an operator's commands with a full backlog: whole processes, including interpreter startup."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

from bench.figures import median
from bench.run import Bench
from tests.support.daemon import EXECUTABLE

TURNS = 15
LIBRARIES = [sys.executable, "-c", "import click, asyncpg, pydantic_settings"]
"""The floor of a command: it cannot start sooner than the libraries that it uses."""


async def run(bench: Bench) -> None:
    rows = bench.options.backlog
    place = await bench.place(rows)
    listed = json.loads(await place.delayer("list", "--json", "--limit", str(2 * TURNS)))
    ids = [one["id"] for one in listed["messages"]]
    lines: dict[str, list[list[str]]] = {
        "--version": [["--version"]] * TURNS,
        "status": [["status"]] * TURNS,
        "list": [["list"]] * TURNS,
        "show ID@DUE": [["show", one] for one in ids[:TURNS]],
        "show ID": [["show", one.partition("@")[0]] for one in ids[:TURNS]],
        "cancel ID@DUE": [["cancel", one, "--yes"] for one in ids[TURNS:]],
    }
    delayer = [str(EXECUTABLE), "--config", str(place.config)]
    processes = {f"`delayer {name}`": [[*delayer, *line] for line in turns] for name, turns in lines.items()}
    for name, turns in ({"libraries alone": [LIBRARIES] * TURNS} | processes).items():
        bench.say(f"{name}, {rows:,} rows waiting")
        times = [await seconds_of(line) * 1000 for line in turns]
        bench.add(name, median(times), "ms", backlog=rows)
        bench.add(f"{name}, slowest", max(times), "ms", backlog=rows)


async def seconds_of(line: list[str]) -> float:
    """The time this process takes. Raises RuntimeError if it fails."""
    began = time.monotonic()
    done = await asyncio.create_subprocess_exec(*line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, said = await done.communicate()
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)}: exit {done.returncode}\n{said.decode()}")
    return time.monotonic() - began
