"""Minutes of traffic with a large backlog: claims should stay fast, and tables small."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

import asyncpg

from bench.figures import median
from bench.run import Bench
from bench.servers import Place
from bench.steady import once, report
from delayer.core.units import DAY_MS
from delayer.store.rows import partitions

LOOKS = 60
"""The number of samples over the whole time."""
# The text of sql/claim.sql in pg_stat_statements.
_CLAIMS = """
SELECT coalesce(sum(calls), 0)::bigint AS calls, coalesce(sum(total_exec_time), 0)::float8 AS ms,
       coalesce(sum(rows), 0)::bigint AS rows
FROM pg_stat_statements
WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND query LIKE '%DELETE FROM message AS m%'
"""
# Only today's partition: growth would not be visible next to the backlog's gigabytes in the rest.
_SIZE = """
SELECT pg_total_relation_size(to_regclass($1)) AS bytes, pg_stat_get_dead_tuples(to_regclass($1)) AS dead,
       (SELECT sum(pg_total_relation_size(other)) FROM unnest($2::regclass[]) AS other)::bigint AS others
"""
OTHERS = ("counter", "lane", "held", "message_default")
"""Tables updated in place, or that should stay empty."""
SETTLED = 0.3
"""The share of the time after which autovacuum, which runs once a minute, has had its turn."""


class Look(NamedTuple):
    """The state of the store at one moment; claims are counted since the look before."""

    at: float
    claim_ms: float
    row_us: float
    mb: float
    others_mb: float
    dead: int


async def watch(place: Place, every: float, looks: list[Look]) -> None:
    """Until cancelled."""
    connection = await asyncpg.connect(place.store_url)
    try:
        began, before = time.monotonic(), await connection.fetchrow(_CLAIMS)
        today = partitions.name_of(int(time.time() * 1000) // DAY_MS)
        while True:
            await asyncio.sleep(every)
            claims, size = await connection.fetchrow(_CLAIMS), await connection.fetchrow(_SIZE, today, OTHERS)
            calls, ms, rows = (claims[name] - before[name] for name in ("calls", "ms", "rows"))
            at = time.monotonic() - began
            claim_ms, row_us = ms / max(calls, 1), ms * 1000 / max(rows, 1)
            looks.append(Look(at, claim_ms, row_us, size["bytes"] / 1e6, size["others"] / 1e6, size["dead"]))
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
        await asyncio.wait([watching])
    if not watching.cancelled():
        watching.result()  # it ended by a failure, which must not look like a table that does not grow
    report(bench, [steady], **at)
    # The first rows are out after the longest delay, and the last arrive one such delay before the end.
    warm = options.longest_delay + 3
    looks = [look for look in looks if warm <= look.at <= options.churn_seconds + warm]
    settled = [look for look in looks if look.at >= warm + options.churn_seconds * SETTLED] or looks
    tenth = max(len(looks) // 10, 1)
    for name, unit, field, since in (
        ("claim", "ms", "claim_ms", looks),
        ("claim, a row", "µs", "row_us", looks),
        ("partition", "MB", "mb", settled),
        ("other tables", "MB", "others_mb", settled),
    ):
        values = [getattr(look, field) for look in looks]
        if not values:
            continue
        bench.add(name, median(values), unit, **at)
        compared = [getattr(look, field) for look in since]
        first, last = median(compared[:tenth]), median(compared[-tenth:])
        if first:
            bench.add(f"{name}, at the end over before", last / first, "", **at)
        else:
            bench.note(f"{name}: no value at the beginning, so its growth is unknown")
