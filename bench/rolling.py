"""`python -m bench.rolling`: how late messages are when the broker begins a new file of its log.

All quorum queues of a broker write one log, in files of `raft.wal_max_size_bytes`, 512 MB unless somebody sets it. With
each new file there is a pause in which nothing is confirmed. The same traffic, for each size, through the daemon and
through the relay without a store (bench/rivals.py), which shows what of it is the broker's alone.

Writes bench/results/rolling.json, and prints a table.
"""

from __future__ import annotations

import sys

from bench import single
from bench.about import about
from bench.figures import Figure, Result
from bench.run import Options, rounded
from bench.servers import running_servers
from bench.steady import Steady, in_memory, once

SIZES_MB = (512, 64, 16)
DELAYS_MS = (1000, 2000, 1)
SHARES = (("p50", "0.5"), ("p99", "0.99"), ("p99.9", "0.999"), ("max", "1.0"))
PAUSED_MS = 60.0
"""A second whose p99 is above this had a pause in it."""


def figures(who: str, log_mb: int, rate: int, seen: Steady) -> list[Figure]:
    """What one turn showed. A second of which many are late is one in which, or after which, nothing was confirmed."""
    at = {"rate": rate, "log": log_mb}
    found = [
        Figure("rolling", f"{who}, lateness {name}", rounded(seen.seen["late"][share]), "ms", at)
        for name, share in SHARES
    ]
    seconds = [p99 for _, p99, *_ in seen.seen["by_second"]]
    paused = sum(p99 > PAUSED_MS for p99 in seconds)
    found.append(
        Figure("rolling", f"{who}, seconds with a p99 above {PAUSED_MS:.0f} ms", paused, f"of {len(seconds)}", at)
    )
    found.append(Figure("rolling", f"{who}, missing", seen.missing, "msg", at))
    found.append(Figure("rolling", f"{who}, early", seen.seen["early"], "msg", at))
    return found


async def measure(rate: int, seconds: int) -> Result:
    result: Result | None = None
    for log_mb in SIZES_MB:
        async with running_servers(broker_settings={"raft.wal_max_size_bytes": log_mb << 20}) as servers:
            if result is None:
                result = Result(about(Options(rates=(rate,), steady_seconds=seconds), await servers.versions()))
            for who, turn in (("relay without a store", in_memory), ("daemon", once)):
                print(f"a log of {log_mb} MB: {who}, {seconds} s", file=sys.stderr)
                result.figures += figures(
                    who, log_mb, rate, await turn(await servers.place(), rate, seconds, DELAYS_MS)
                )
    assert result is not None
    return result


if __name__ == "__main__":
    single.main("rolling", __doc__, measure, 75)
