"""Minutes of traffic beside a large backlog: whether claims stay as quick and the tables as small as they were."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

import asyncpg

from bench.figures import median
from bench.run import Bench
from bench.servers import Place
from bench.steady import once, report
from delayer.store import partitions

LOOKS = 60
"""Over the whole time."""
# What pg_stat_statements keeps of sql/claim.sql.
_CLAIMS = """
SELECT coalesce(sum(calls), 0)::bigint AS calls, coalesce(sum(total_exec_time), 0)::float8 AS ms,
       coalesce(sum(rows), 0)::bigint AS rows
FROM pg_stat_statements
WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND query LIKE '%DELETE FROM message AS m%'
"""
# Of today's partition: beside the backlog's gigabytes in the others nothing would be seen to grow.
_SIZE = """
SELECT pg_total_relation_size(to_regclass($1)) AS bytes, pg_stat_get_dead_tuples(to_regclass($1)) AS dead
"""
SETTLED = 0.3
"""Of the time: by then autovacuum, which looks once a minute, has come round."""


class Look(NamedTuple):
    """How the store stood at one moment; claims are counted since the look before."""

    at: float
    claim_ms: float
    row_us: float
    mb: float
    dead: int


async def watch(place: Place, every: float, looks: list[Look]) -> None:
    """Until cancelled."""
    connection = await asyncpg.connect(place.store_url)
    try:
        began, before = time.monotonic(), await connection.fetchrow(_CLAIMS)
        today = partitions.name_of(int(time.time() * 1000) // partitions.DAY_MS)
        while True:
            await asyncio.sleep(every)
            claims, size = await connection.fetchrow(_CLAIMS), await connection.fetchrow(_SIZE, today)
            calls, ms, rows = (claims[name] - before[name] for name in ("calls", "ms", "rows"))
            at = time.monotonic() - began
            looks.append(Look(at, ms / max(calls, 1), ms * 1000 / max(rows, 1), size["bytes"] / 1e6, size["dead"]))
            before = claims
    finally:
        await connection.close()


async def run(bench: Bench) -> None:
    options = bench.options
    place = await bench.place(options.backlog)
    at = {"rate": options.churn_rate, "backlog": options.backlog}
    bench.say(f"{options.churn_rate:,} messages a second for {options.churn_seconds} s")
    looks: list[Look] = []
    watching = asyncio.create_task(watch(place, options.churn_seconds / LOOKS, looks))
    try:
        steady = await once(place, options.churn_rate, options.churn_seconds, (1000, options.longest_delay * 1000, 1))
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    report(bench, steady, **at)
    # The first rows are out after the longest delay, the last come in that much before the end.
    warm = options.longest_delay + 3
    looks = [look for look in looks if warm <= look.at <= options.churn_seconds + warm]
    settled = [look for look in looks if look.at >= warm + options.churn_seconds * SETTLED] or looks
    tenth = max(len(looks) // 10, 1)
    for name, unit, field, since in (
        ("claim", "ms", "claim_ms", looks),
        ("claim, a row", "µs", "row_us", looks),
        ("partition", "MB", "mb", settled),
    ):
        values = [getattr(look, field) for look in looks]
        bench.draw(f"{name}, {unit}", [look.at for look in looks], values, **at)
        if not values:
            continue
        bench.add(name, median(values), unit, **at)
        compared = [getattr(look, field) for look in since]
        first, last = median(compared[:tenth]), median(compared[-tenth:])
        bench.add(f"{name}, at the end over before", last / first if first else 0.0, "", **at)
    bench.draw("dead rows", [look.at for look in looks], [float(look.dead) for look in looks], **at)
