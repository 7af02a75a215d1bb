"""`python -m bench.plans`: the store's hot statements over a large backlog, with the plans that Postgres made for them.

    python -m bench.plans --rows 300000 --json

Fills a store of its own with rows that are due over the coming 60 days, held rows, keys, and the lanes of daemons that
have gone. Then each statement is run on the connection that the daemon runs it on, a lane's or one of the pool, under
EXPLAIN (ANALYZE, BUFFERS); what it changes is rolled back. How many rows each must find is stated beside it: one that
misses is an error, not a fast statement. Prints a table and writes the plans to bench/results/plans.txt.
tests/integration/test_store_plan.py fails when one of these leaves its index or reads further partitions; here one sees
what they cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.about import provenance
from delayer import telemetry
from delayer.store import partitions, session, statements, upgrades
from delayer.store.claiming import HORIZON_MS
from delayer.store.outlook import SOON_MS
from delayer.store.partitions import DAY_MS
from delayer.store.postgres import PostgresStore
from delayer.store.session import BEGINNING_MS
from tests.rig.postgres import Postgres

RESULTS = Path(__file__).parent / "results"
SETTINGS = {"shared_buffers": "1GB", "max_wal_size": "8GB", "checkpoint_timeout": "30min"}
DAYS = 60
CHUNK = 500_000
RUNS = 7
HOUR = 3600.0
LANES = 4
OWNED = 2
"""Lanes with a living owner; in the first of them rows are due, in the second nothing is for an hour."""
EMPTIED = 20
"""Lanes of daemons that have gone and left nothing."""
DUE = 20_000
HELD = 20_000
KEYED = 50
"""Of how many waiting messages one has a key. Held ones all have."""
COLUMNS = "due_at, checksum, lane, format, route, exchange, routing_key, to_exchange, to_key, properties, body, key"
CONTENT = """1, 'delayer.in', 'delayer.in', 'orders.eu', 'delayer.out', 'orders.eu', '\\x100002',
       decode(repeat(md5(n::text), 32), 'hex')"""
FILL = f"""
INSERT INTO message ({COLUMNS})
SELECT date_trunc('milliseconds', now() + interval '1 hour' + random() * $2::float8 * interval '1 day'), 0,
       1 + n % $3::int, {CONTENT},
       CASE WHEN n % {KEYED} = 0 THEN 'waiting '::bytea || ($4::int + n)::text::bytea END
FROM generate_series(1, $1::int) AS n
"""
DUE_NOW = f"""
INSERT INTO message ({COLUMNS})
SELECT date_trunc('milliseconds', now()) - n * interval '1 ms', 0, 1, {CONTENT}, NULL
FROM generate_series(1, $1::int) AS n
"""
HELD_ROWS = f"""
INSERT INTO held (id, retry_at, attempts, reason, {COLUMNS})
SELECT nextval('message_id'), now() + (n - $1::int / 4) * interval '100 milliseconds', 1, 'returned: NO_ROUTE',
       now() - interval '1 hour', 0, 1 + n % $2::int, {CONTENT}, 'held '::bytea || n::text::bytea
FROM generate_series(1, $1::int) AS n
"""
BOOKS = f"""
INSERT INTO lane SELECT n, 0, 'gone' FROM generate_series(1, {LANES + EMPTIED}) AS n;
INSERT INTO counter
SELECT n, kind, 1000000 FROM generate_series(1, {LANES + EMPTIED}) AS n, unnest('{{parked,released}}'::text[]) AS kind;
"""
AFTERWARDS = (
    "INSERT INTO message_key SELECT key, lane, due_at, id FROM message WHERE key IS NOT NULL",
    "INSERT INTO message_key SELECT key, lane, due_at, id FROM held",
    "UPDATE counter SET n = n + here.rows FROM (SELECT lane, count(*) AS rows FROM"
    " (SELECT lane FROM message UNION ALL SELECT lane FROM held) AS every GROUP BY lane) AS here"
    " WHERE here.lane = counter.lane AND kind = 'parked'",
    "INSERT INTO counter SELECT lane, 'held', count(*) FROM held GROUP BY lane",
    "VACUUM ANALYZE",
)
CANCEL = "DELETE FROM message WHERE lane = $1 AND due_at = $2 AND id = $3 RETURNING true"
CANCEL_HELD = "DELETE FROM held WHERE id = $1 RETURNING true"
KEY = "SELECT lane, due_at, id FROM message_key WHERE key = ANY($1) ORDER BY lane, due_at, id"

ROUND = (1000, 16 << 20)
"""Rows and bytes that a claim takes."""


class Missed(Exception):
    """A statement did not find what it was meant to find, so its time says nothing."""


class Statement(NamedTuple):
    """One of the daemon's statements, with arguments as it would give them, and how many rows it must find."""

    name: str
    rows: int
    sql: str
    arguments: tuple[object, ...]


class Cost(NamedTuple):
    """The median of some runs; buffers are 8 KB pages, ``touched`` how many partitions were looked into."""

    name: str
    rows: int
    ms: float
    planning_ms: float
    buffers: int
    touched: int


class Filled(NamedTuple):
    """What is in the store, to be found."""

    now_ms: int
    watermark: int
    """When the first row of lane 1 is due."""
    key: bytes
    place: tuple[int, int, int]
    """Lane, due instant and id of the message that ``key`` stands for."""
    held_id: int


def of_lane(filled: Filled) -> list[Statement]:
    """What runs on a lane's connection: lane 1 has rows that are due, lane 2 has none."""
    first, near, horizon = filled.watermark, filled.now_ms - 60_000, filled.now_ms + HORIZON_MS
    count = ROUND[0]
    return [
        Statement("claim of 1,000, at the watermark", count, statements.CLAIM, (1, first, horizon, *ROUND)),
        Statement("claim of 1,000, first after a start", count, statements.CLAIM, (1, BEGINNING_MS, horizon, *ROUND)),
        Statement("claim of nothing", 0, statements.CLAIM, (2, near, horizon, *ROUND)),
        Statement("claim of 100 held", 100, statements.CLAIM_HELD, (1, 100, ROUND[1])),
        Statement("next due, at the watermark", 1, statements.NEXT_DUE, (1, first, horizon)),
        Statement("next due, nothing near", 0, statements.NEXT_DUE, (2, near, horizon)),
        Statement("next retry of held", 1, statements.NEXT_RETRY, (1,)),
    ]


def of_pool(filled: Filled, epoch: int) -> list[Statement]:
    """What runs on connections that are not told which plans to prefer."""
    horizon = filled.now_ms + SOON_MS
    free = LANES + EMPTIED - OWNED
    return [
        Statement("look back: next due, from the beginning", 1, statements.NEXT_DUE, (1, BEGINNING_MS, horizon)),
        Statement("look back: next retry of held", 1, statements.NEXT_RETRY, (1,)),
        Statement("lanes without an owner", free, statements.LANES_FREE, ()),
        Statement("lanes to adopt", LANES - OWNED, statements.LANES_DUE, (horizon, BEGINNING_MS)),
        Statement("cancel: what a key stands for", 1, KEY, ([filled.key],)),
        Statement("cancel of one waiting row", 1, CANCEL, filled.place),
        Statement("cancel of one held row", 1, CANCEL_HELD, (filled.held_id,)),
        Statement("count of one park", 1, statements.COUNT_PARKED, ([1], ["parked"], [1], 1, epoch)),
        Statement("status: lanes and counters", LANES + EMPTIED, statements.OVERVIEW, ()),
    ]


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


async def fill(url: str, rows: int, progress: Progress) -> Filled:
    """``rows`` of 512 bytes over DAYS, in as many lanes as a daemon or two would have; those that are due, and held."""
    connection = await session.connect(url, "bench")
    await connection.execute("SET statement_timeout = 0")
    bar = progress.add_task("rows", total=rows)
    today = await connection.fetchval("SELECT now()") // DAY_MS
    for day in range(today - 1, today + DAYS + 2):
        await partitions.make(connection, day, today)
    await connection.execute(BOOKS)
    for first in range(0, rows, CHUNK):
        count = min(CHUNK, rows - first)
        await connection.execute(FILL, count, float(DAYS), LANES, first, timeout=HOUR)
        progress.update(bar, advance=count)
    await connection.execute(DUE_NOW, DUE)
    await connection.execute(HELD_ROWS, HELD, LANES)
    for statement in AFTERWARDS:
        progress.update(bar, description=statement.split(" FROM ")[0])
        await connection.execute(statement, timeout=HOUR)
    key, *place = await connection.fetchrow(
        "SELECT key, lane, due_at, id FROM message WHERE key IS NOT NULL ORDER BY due_at LIMIT 1"
    )
    filled = Filled(
        now_ms=await connection.fetchval("SELECT now()"),
        watermark=await connection.fetchval("SELECT min(due_at) FROM message WHERE lane = 1"),
        key=key,
        place=tuple(place),
        held_id=await connection.fetchval("SELECT min(id) FROM held"),
    )
    await session.close(connection)
    return filled


async def cost_of(connection: asyncpg.Connection, statement: Statement) -> tuple[Cost, str]:
    """The cost, and the plan as text. Raises Missed."""
    runs = []
    for _ in range(RUNS):
        async with _rolled_back(connection):
            explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement.sql}"
            runs.append(json.loads(await connection.fetchval(explain, *statement.arguments))[0])
    async with _rolled_back(connection):
        lines = await connection.fetch(f"EXPLAIN (ANALYZE, BUFFERS) {statement.sql}", *statement.arguments)
    for found in (run["Plan"]["Actual Rows"] for run in runs):
        if found != statement.rows:
            raise Missed(f"{statement.name}: expected {statement.rows} rows, found {found}")
    run = sorted(runs, key=lambda one: one["Execution Time"])[RUNS // 2]
    plan = run["Plan"]
    seen = {str(node.get("Relation Name", "")) for node in nodes(plan)}
    touched = sum(name.startswith(("message_p", "message_default")) for name in seen)
    buffers = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    cost = Cost(statement.name, statement.rows, run["Execution Time"], run["Planning Time"], buffers, touched)
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
    """Fill a store and run everything in it as a daemon that owns its first lanes. Raises Missed."""
    measured = []
    with Postgres(settings=SETTINGS) as server:
        url = server.url(server.add_database("plans"))
        await upgrades.upgrade(url)
        filled = await fill(url, rows, progress)
        async with AsyncExitStack() as stack:
            store = await PostgresStore.connect(url, idle_timeout=HOUR, transaction_timeout=HOUR)
            stack.push_async_callback(store.close)
            lanes = await store.own_lanes(OWNED)
            for lane in lanes:
                stack.push_async_callback(lane.release)
            async with lanes[0]._link.talking("bench") as connection:
                measured += [await cost_of(connection, statement) for statement in of_lane(filled)]
            async with session.borrowed(store._pool) as connection:
                measured += [await cost_of(connection, statement) for statement in of_pool(filled, lanes[0].epoch)]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "plans.txt").write_text("\n".join(f"## {cost.name}\n\n{plan}\n" for cost, plan in measured))
    return [cost for cost, _ in measured]


def show(costs: list[Cost], rows: int) -> None:
    title = f"{rows:,} rows waiting, {DAYS} days, {LANES} lanes; {HELD:,} held; medians of {RUNS}"
    table = Table(title=title, title_justify="left")
    table.add_column("statement")
    for heading in ("rows", "ms", "planning ms", "pages", "partitions"):
        table.add_column(heading, justify="right")
    for cost in costs:
        figures = (f"{cost.rows:,}", f"{cost.ms:.2f}", f"{cost.planning_ms:.2f}", f"{cost.buffers:,}")
        table.add_row(cost.name, *figures, str(cost.touched or ""))
    Console().print(table)
    print(f"plans: {RESULTS / 'plans.txt'}")


def main() -> None:
    about, example = __doc__.split("\n\n")[:2]
    small = f"Over fewer rows, in half a minute: {example.strip()}"
    parser = argparse.ArgumentParser(prog="python -m bench.plans", description=about, epilog=small)
    parser.add_argument(
        "--rows", type=int, default=10_000_000, help="rows waiting (default 10,000,000; at least 1,000)"
    )
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=RESULTS / "plans.json",
        metavar="FILE",
        help="write the figures as JSON too (default bench/results/plans.json)",
    )
    options = parser.parse_args()
    if options.rows < 1000:
        parser.error(f"--rows {options.rows}: expected at least 1,000, or there is nothing to find")
    telemetry.configure("console", "warning")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        costs = asyncio.run(measure(options.rows, progress))
    show(costs, options.rows)
    if options.json:
        figures = {
            "about": provenance(),
            "rows": options.rows,
            "days": DAYS,
            "lanes": LANES,
            "held": HELD,
            "runs": RUNS,
        }
        figures["statements"] = [cost._asdict() for cost in costs]
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
        print(f"figures: {options.json}")


if __name__ == "__main__":
    main()
