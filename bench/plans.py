"""`python -m bench.plans`: the store's hot statements over a large backlog, with the plans that Postgres made for them.

    python -m bench.plans --rows 10000000

Fills a store of its own with rows that are due over the coming 60 days, then runs each statement as the daemon does, in
a session with the daemon's settings, under EXPLAIN (ANALYZE, BUFFERS); what a statement changes is rolled back. Prints
a table and writes the plans to bench/results/plans.txt. tests/integration/test_store_plan.py fails when one of these
leaves its index or reads further partitions; here one sees what they cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from delayer import telemetry
from delayer.store import partitions, schema, session, statements, upgrades
from delayer.store.partitions import DAY_MS
from tests.rig.postgres import Postgres

PLANS = Path(__file__).parent / "results" / "plans.txt"
SETTINGS = {"shared_buffers": "1GB", "max_wal_size": "8GB", "checkpoint_timeout": "30min"}
DAYS = 60
CHUNK = 500_000
RUNS = 7
HOUR = 3600.0
LANES = 4
INTO = """
INSERT INTO message (due_at, checksum, lane, format, route, exchange, routing_key, to_exchange, to_key,
                     properties, body)
"""
FILL = f"""{INTO}
SELECT now() + interval '1 hour' + random() * $2::float8 * interval '1 day', 0, 1 + n % $3::int, 1,
       'delayer.in', 'delayer.in', 'orders.eu', 'delayer.out', 'orders.eu', '\\x100002',
       decode(repeat(md5(n::text), 32), 'hex')
FROM generate_series(1, $1::int) AS n
"""
DUE_NOW = f"""{INTO}
SELECT now() - n * interval '1 millisecond', 0, 1, 1, 'r', 'e', 'k', 'e', 'k', '\\x100002',
       decode(repeat(md5(n::text), 32), 'hex')
FROM generate_series(1, 20000) AS n
"""


class Statement(NamedTuple):
    """One of the daemon's statements, with arguments as it would give them."""

    name: str
    sql: str
    arguments: tuple[object, ...]


class Cost(NamedTuple):
    """The median of some runs; buffers are 8 KB pages, ``touched`` how many partitions were looked into."""

    name: str
    ms: float
    planning_ms: float
    buffers: int
    touched: int


def hot(now_ms: int) -> list[Statement]:
    """The statements that run all the time, and those of a start."""
    horizon = now_ms + 61_000
    near = now_ms - 60_000
    claim = (1000, 16 << 20)
    return [
        Statement("claim of 1,000, at the watermark", statements.CLAIM, (1, near, horizon, *claim)),
        Statement("claim of 1,000, first after a start", statements.CLAIM, (1, session.BEGINNING_MS, horizon, *claim)),
        Statement("claim of nothing", statements.CLAIM, (2, near, horizon, *claim)),
        Statement("next due, at the watermark", statements.NEXT_DUE, (2, near, horizon)),
        Statement("next due, from the beginning", statements.NEXT_DUE, (2, session.BEGINNING_MS, horizon)),
        Statement("next retry of held", statements.NEXT_RETRY, (1,)),
        Statement("claim of held", statements.CLAIM_HELD, (1, 100, 16 << 20)),
        Statement("lanes without an owner", statements.LANES_FREE, ()),
        Statement("status: lanes and counters", statements.OVERVIEW, ()),
        Statement(
            "cancel of one row",
            "DELETE FROM message WHERE lane = $1 AND due_at = $2 AND id = $3 RETURNING true",
            (1, now_ms - 5, 1),
        ),
    ]


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


async def fill(connection: asyncpg.Connection, rows: int, progress: Progress) -> None:
    """``rows`` of 512 bytes over DAYS, in as many lanes as a daemon or two would have; and 20,000 that are due."""
    bar = progress.add_task("rows", total=rows)
    today = int(time.time() * 1000) // DAY_MS
    for day in range(today - 1, today + DAYS + 2):
        await partitions.make(connection, day, today)
    for first in range(0, rows, CHUNK):
        count = min(CHUNK, rows - first)
        await connection.execute(FILL, count, float(DAYS), LANES, timeout=HOUR)
        progress.update(bar, advance=count)
    await connection.execute(DUE_NOW)
    progress.update(bar, description="ANALYZE, VACUUM")
    await connection.execute("VACUUM ANALYZE message", timeout=HOUR)


async def cost_of(connection: asyncpg.Connection, statement: Statement) -> tuple[Cost, str]:
    """The cost, and the plan as text."""
    runs = []
    for _ in range(RUNS):
        async with _rolled_back(connection):
            explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement.sql}"
            runs.append(json.loads(await connection.fetchval(explain, *statement.arguments))[0])
    async with _rolled_back(connection):
        lines = await connection.fetch(f"EXPLAIN (ANALYZE, BUFFERS) {statement.sql}", *statement.arguments)
    run = sorted(runs, key=lambda one: one["Execution Time"])[RUNS // 2]
    plan = run["Plan"]
    seen = {node["Relation Name"] for node in nodes(plan) if str(node.get("Relation Name", "")).startswith("message_")}
    buffers = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    cost = Cost(statement.name, run["Execution Time"], run["Planning Time"], buffers, len(seen))
    return cost, "\n".join(line[0] for line in lines)


@asynccontextmanager
async def _rolled_back(connection: asyncpg.Connection) -> AsyncIterator[None]:
    """A transaction that leaves no trace but dead tuples."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield
    finally:
        await transaction.rollback()


async def measure(rows: int, progress: Progress) -> list[Cost]:
    with Postgres(settings=SETTINGS) as server:
        url = server.url(server.add_database("plans"))
        await upgrades.upgrade(url)
        assert await schema.current(url) == schema.HEAD
        connection = await session.connect(url, "bench")
        await connection.execute("SET statement_timeout = 0")
        await fill(connection, rows, progress)
        costs, plans = [], []
        for statement in hot(int(time.time() * 1000)):
            cost, plan = await cost_of(connection, statement)
            costs.append(cost)
            plans.append(f"## {statement.name}\n\n{plan}\n")
        await session.close(connection)
    PLANS.parent.mkdir(exist_ok=True)
    PLANS.write_text("\n".join(plans))
    return costs


def show(costs: list[Cost], rows: int) -> None:
    table = Table(title=f"{rows:,} rows waiting, {DAYS} days, {LANES} lanes", title_justify="left")
    table.add_column("statement")
    for heading in ("ms", "planning ms", "pages", "partitions"):
        table.add_column(heading, justify="right")
    for cost in costs:
        touched = str(cost.touched) if cost.touched else ""
        table.add_row(cost.name, f"{cost.ms:.2f}", f"{cost.planning_ms:.2f}", f"{cost.buffers:,}", touched)
    Console().print(table)
    Console().print(f"plans: {PLANS.relative_to(Path.cwd()) if PLANS.is_relative_to(Path.cwd()) else PLANS}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.plans", description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows waiting (default 10,000,000)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of a table")
    options = parser.parse_args()
    telemetry.configure("console", "warning")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        costs = asyncio.run(measure(options.rows, progress))
    if options.json:
        print(json.dumps([cost._asdict() for cost in costs], indent=2))
    else:
        show(costs, options.rows)


if __name__ == "__main__":
    main()
