"""The time of an operator's commands beside a full backlog: whole processes, with the interpreter's start."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time

from bench.figures import median
from bench.run import Bench
from tests.support.daemon import EXECUTABLE

TURNS = 15


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
    for name, turns in lines.items():
        bench.say(f"`delayer {name}`, {rows:,} rows waiting")
        times = []
        for line in turns:
            began = time.monotonic()
            done = await asyncio.create_subprocess_exec(
                EXECUTABLE, "--config", place.config, *line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            _, said = await done.communicate()
            times.append((time.monotonic() - began) * 1000)
            if done.returncode:
                raise RuntimeError(f"delayer {' '.join(line)}: exit {done.returncode}\n{said.decode()}")
        bench.add(f"`delayer {name}`", median(times), "ms", backlog=rows)
        bench.add(f"`delayer {name}`, slowest", max(times), "ms", backlog=rows)
