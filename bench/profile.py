"""`python -m bench.profile`: what a daemon's own CPU goes into, by py-spy, while it parks in bulk, while it releases in
bulk, and in traffic at a steady rate.

A sample is what the main thread does at one moment in which it is not idle; it counts for the innermost function that
belongs to one of PARTS. Writes bench/results/profile.json, and prints a table.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from bench import given, park, rows, single
from bench.about import about
from bench.figures import Figure, Result
from bench.run import Options, rounded
from bench.servers import POSTGRES, Place, running_servers
from bench.steady import under_load
from bench.watch import Counters

COUNT: Final = 600_000
"""Messages of a bulk: a dozen seconds or two of them."""
SIZE: Final = 512
BULK_SECONDS: Final = 6
RATE: Final = 250
"""Samples a second; each stops nobody (--nonblocking)."""
DELAYS_MS = (1000, 15_000, 1)
PARTS: Final = (
    ("messages to and from bytes", r"delayer/wire/(address|fields|numbers|properties|serialize|methods|framing)"),
    ("connections to the broker", r"delayer/(wire|broker)/"),
    (
        "reading delays, choosing, editing",
        r"delayer/(core/|services/(reading|dispatch|edits|envelopes|sorting|asking))",
    ),
    ("releasing", r"delayer/services/release"),
    ("intake, and carrying out", r"delayer/services/"),
    ("rows and statements", r"delayer/store/"),
    ("asyncpg", r"asyncpg/"),
    ("asyncio", r"asyncio/"),
)
"""What a function belongs to, by its file; the first that fits."""
REST: Final = "event loop (C), and the rest"
_FILE = re.compile(r"\(([^()]*?):\d+\)$")


def part_of(stack: str) -> str:
    """What a folded stack (``outer;inner``) counts for."""
    for frame in reversed(stack.split(";")):
        found = _FILE.search(frame)
        for name, pattern in PARTS:
            if found is not None and re.search(pattern, found[1]):
                return name
    return REST


def shares(folded: Iterable[str]) -> dict[str, float]:
    """Percent of the samples for each part, the largest first, from lines of ``stack count``. Raises ValueError for no
    samples."""
    counts: Counter[str] = Counter()
    for line in folded:
        stack, _, count = line.rpartition(" ")
        counts[part_of(stack)] += int(count)
    total = counts.total()
    if not total:
        raise ValueError("py-spy saw nothing")
    return {name: 100 * count / total for name, count in counts.most_common()}


async def sampled(pid: int, seconds: int) -> list[str]:
    """Folded stacks of a process. Raises given.Mistake without py-spy, RuntimeError with what it says."""
    program = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
    if program is None:
        raise given.Mistake("expected py-spy beside Python; found none. Next: pip install py-spy")
    with tempfile.NamedTemporaryFile(prefix="delayer-profile-", suffix=".txt") as file:
        spy = await asyncio.create_subprocess_exec(
            program, "record", "--nonblocking", "--format", "raw",
            "--rate", str(RATE), "--duration", str(seconds), "--output", file.name, "--pid", str(pid),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        said, _ = await spy.communicate()
        lines = file.read().decode("utf-8").splitlines()
    if spy.returncode or not lines:
        raise RuntimeError(f"py-spy (root may sample others' processes): {said.decode(errors='replace').strip()}")
    return lines


async def parking(place: Place) -> list[str]:
    await asyncio.to_thread(park.fill, place, COUNT, SIZE)
    async with await Counters.open(place) as counters, place.daemon() as daemon:
        stacks = await _in_the_middle(counters, "parked", daemon.pid)
        await counters.follow("parked", COUNT, daemon)
        await daemon.stop()
    return stacks


async def releasing(place: Place) -> list[str]:
    await asyncio.to_thread(place.fresh_inbox)
    async with await Counters.open(place) as counters:
        await rows.put_due(counters.connection, COUNT, SIZE)
        await asyncio.sleep(rows.ALL_DUE_SECONDS)
        async with place.daemon() as daemon:
            stacks = await _in_the_middle(counters, "released", daemon.pid)
            await counters.follow("released", COUNT, daemon)
            await daemon.stop()
    return stacks


async def _in_the_middle(counters: Counters, kind: str, pid: int) -> list[str]:
    while await counters.since(kind) < COUNT / 20:
        await asyncio.sleep(0.05)
    return await sampled(pid, BULK_SECONDS)


async def passing(place: Place, rate: int, seconds: int) -> list[str]:
    async with place.daemon() as daemon:
        await daemon.ready()
        after = DELAYS_MS[1] // 1000 + 1
        looking = asyncio.create_task(_after(after, daemon.pid, max(1, seconds - after - 1)))
        await under_load(place, daemon.pid, rate, seconds, DELAYS_MS)
        stacks = await looking
        await daemon.stop()
    return stacks


async def _after(seconds: float, pid: int, lasting: int) -> list[str]:
    await asyncio.sleep(seconds)
    return await sampled(pid, lasting)


async def measure(rate: int, seconds: int) -> Result:
    async with running_servers(POSTGRES) as servers:
        result = Result(about(Options(rates=(rate,), steady_seconds=seconds), await servers.versions()))
        for section, at, look in (
            ("parking", {"body": SIZE}, parking),
            ("releasing", {"body": SIZE}, releasing),
            ("passing", {"rate": rate}, lambda place: passing(place, rate, seconds)),
        ):
            found = shares(await look(await servers.place()))
            result.figures += [Figure(section, name, rounded(share), "%", at) for name, share in found.items()]
    return result


if __name__ == "__main__":
    single.main("profile", __doc__, measure, 40)
