"""`python -m bench.where`: where the time goes at a steady rate. Three looks at the same seconds: the parts of a lane's
turn (bench/timed.py), the statements inside the database, and the disk's syncs (by perf, where that is installed).

Writes bench/results/where.json, and prints a table.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import asyncpg

from bench import single
from bench.about import about
from bench.figures import Figure, Result, percentile
from bench.run import Options, rounded
from bench.servers import POSTGRES, Place, running_servers
from bench.steady import Steady, under_load
from tests.rig.daemon import DaemonProcess

TIMED = Path(__file__).with_name("timed.py")
SHARES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
DELAYS_MS = (1000, 15_000, 1)
STATEMENTS = {"claims": "%DELETE FROM message AS m%", "COPY": "COPY%", "counters": "%INSERT INTO counter%"}
_SPENT = """
SELECT sum(calls)::bigint AS calls, sum(total_exec_time)::float8 AS exec_ms, sum(total_plan_time)::float8 AS plan_ms
FROM pg_stat_statements
WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database()) AND query LIKE $1
"""
_SYNC = re.compile(r"\(\s*([\d.]+) ms\): (\S+?)/\d+ f(?:data)?sync\(")
_LONGEST_MS = 60_000.0
"""perf now and then shows a sync without its beginning, centuries long."""


async def turns(place: Place, rate: int, seconds: int) -> tuple[Steady, list[Figure]]:
    """One steady run, and how long the parts of a lane's turn took in it."""
    with tempfile.TemporaryDirectory(prefix="delayer-where-") as directory:
        file = Path(directory) / "times.json"
        program = (sys.executable, str(TIMED), str(file))
        async with DaemonProcess({"HTTP__LISTEN": ""}, config=place.config, program=program) as daemon:
            await daemon.ready()
            steady = await under_load(place, daemon.pid, rate, seconds, DELAYS_MS)
            await daemon.stop()
        times: dict[str, list[tuple[float, float]]] = json.loads(file.read_text())
    figures = []
    end = max(began for began, _ in times["claim"]) - DELAYS_MS[1] / 1000  # what follows is the draining
    for name, all_of_it in times.items():
        took = sorted(lasted * 1000 for began, lasted in all_of_it if end - seconds <= began <= end)
        figures += [Figure("turn", f"{name}, {at}", rounded(percentile(took, share)), "ms") for at, share in SHARES]
    return steady, figures


async def statements(place: Place, messages: int) -> list[Figure]:
    """What the database's statements took for each message, from the daemon's start to its end."""
    connection = await asyncpg.connect(place.store_url)
    try:
        figures = []
        for name, pattern in STATEMENTS.items():
            spent = await connection.fetchrow(_SPENT, pattern)
            figures.append(Figure("database", f"{name}: calls", spent["calls"] / messages, "a message"))
            for what, ms in (("executing", spent["exec_ms"]), ("planning", spent["plan_ms"])):
                figures.append(Figure("database", f"{name}: {what}", rounded(ms * 1000 / messages), "µs/msg"))
        return figures
    finally:
        await connection.close()


class Syncs:
    """perf, listening for every fsync of the machine for some seconds."""

    def __init__(self, seconds: int) -> None:
        command = ["perf", "trace", "-a", "-e", "fsync,fdatasync", "--", "sleep", str(seconds)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def figures(self) -> list[Figure]:
        took: dict[str, list[float]] = defaultdict(list)
        for ms, who in _SYNC.findall(self._process.communicate()[1]):
            if float(ms) < _LONGEST_MS:
                took["database" if who.startswith("postgres") else "broker"].append(float(ms))
        return [
            Figure("disk", f"sync of the {who}, {at}", rounded(percentile(sorted(all_of_it), share)), "ms")
            for who, all_of_it in sorted(took.items())
            if len(all_of_it) > 100
            for at, share in SHARES
        ]


async def measure(rate: int, seconds: int) -> Result:
    async with running_servers({**POSTGRES, "pg_stat_statements.track_planning": "on"}) as servers:
        result = Result(about(Options(rates=(rate,), steady_seconds=seconds), await servers.versions()))
        place = await servers.place()
        listening = asyncio.create_task(_listen(DELAYS_MS[1] // 1000 + 5, seconds))
        steady, figures = await turns(place, rate, seconds)
        result.figures += figures
        result.figures += await statements(place, steady.sent)
        result.figures += await listening
    for name, share in (("p50", "0.5"), ("p99", "0.99")):
        result.figures.insert(
            0, Figure("turn", f"lateness of messages, {name}", rounded(steady.seen["late"][share]), "ms")
        )
    for figure in result.figures:
        figure.at["rate"] = rate
    return result


async def _listen(after: float, seconds: int) -> list[Figure]:
    if shutil.which("perf") is None:
        return []
    await asyncio.sleep(after)
    return await asyncio.to_thread(Syncs(seconds).figures)


if __name__ == "__main__":
    single.main("where", __doc__, measure, 20)
