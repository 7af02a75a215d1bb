"""Rows like those parked by the daemon, generated inside Postgres: a backlog of millions, and due rows.

They go into lanes without an owner; the daemon takes these at its start, as after a crash. Counters are updated with
them, so that `delayer status` stays correct.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import asyncpg

from bench.plain import number, properties
from bench.servers import IN, OUT
from delayer.core.message import Parcel, Target
from delayer.core.units import DAY_MS
from delayer.format.rows import StoredRow, stored_row
from delayer.store import pool
from delayer.store.rows import partitions

CHUNK = 250_000
WRITERS = 2
BACKLOG_DAYS = 60
BACKLOG_FIRST_HOURS = 12
"""The time until the first of the backlog is due: after the end of every run."""
ALL_DUE_SECONDS = 0.5
"""After :func:`put_due`."""
KEY = "orders.reminder"

NEW_LANES = (
    "INSERT INTO lane (number, epoch, owner) SELECT n, 0, 'bench' FROM generate_series(1, $1::int) AS n"
    " ON CONFLICT DO NOTHING"
)
COUNT_PARKED = (
    "INSERT INTO counter AS c (lane, kind, n) VALUES ($1, 'parked', $2)"
    " ON CONFLICT (lane, kind) DO UPDATE SET n = c.n + excluded.n"
)
# Turns of a thousand, like parks: neighbouring rows of the table belong to one lane.
_ROWS = """
WITH made AS (
    INSERT INTO message (due_at, checksum, lane, format, route, exchange, routing_key, to_exchange, to_key,
                         properties, body)
    SELECT {due}, $2, 1 + (n / 1000) % $3::int, $4, $5, $6, $7, $8, $9, $10, $11
    FROM generate_series(1, $1::int) AS n
    RETURNING lane
)
SELECT lane, count(*) FROM made GROUP BY lane ORDER BY lane
"""
_FAR = f"now() + interval '{BACKLOG_FIRST_HOURS} hours' + random() * interval '{BACKLOG_DAYS} days'"
_SOON = "date_trunc('milliseconds', now()) + (n % 400) * interval '1 ms'"


def sample_row(size: int) -> StoredRow:
    """The row that the daemon would write for a message of ``size`` bytes."""
    parcel = Parcel(
        due_ms=0,
        route=IN.encode(),
        exchange=IN.encode(),
        routing_key=KEY.encode(),
        target=Target(OUT.encode(), KEY.encode()),
        properties=properties(number("x-delay", 3_600_000)),
        body=b"x" * size,
    )
    return stored_row(parcel, 1)


async def _insert(connection: asyncpg.Connection, due: str, count: int, size: int, lanes: int) -> None:
    _, checksum, _, *rest, _ = sample_row(size)
    async with connection.transaction():
        made = await connection.fetch(_ROWS.format(due=due), count, checksum, lanes, *rest, timeout=None)
        for lane, rows in made:
            await connection.execute(COUNT_PARKED, lane, rows)


async def put_due(connection: asyncpg.Connection, count: int, size: int, lanes: int = 2) -> None:
    """Insert ``count`` rows due within ALL_DUE_SECONDS. Start the daemon afterwards."""
    await connection.execute(NEW_LANES, lanes)
    await _insert(connection, _SOON, count, size, lanes)
    await connection.execute("ANALYZE message")
    await connection.execute("CHECKPOINT")


async def put_backlog(url: str, rows: int, size: int, say: Callable[[str], None], lanes: int = 2) -> None:
    """Insert ``rows`` that are due over the coming BACKLOG_DAYS; then do the work of autovacuum."""
    # Without limits on the time of a statement, on either side: some statements take minutes.
    more = {"statement_timeout": "0"}
    writers = [await pool.connect(url, "bench", more, plain=True) for _ in range(WRITERS)]
    try:
        first, *_ = writers
        today = int(time.time() * 1000) // DAY_MS
        for day in range(today - 1, today + BACKLOG_DAYS + 3):
            await partitions.make(first, day, today)
        await first.execute(NEW_LANES, lanes)
        chunks = [min(CHUNK, rows - start) for start in range(0, rows, CHUNK)]

        async def write(connection: asyncpg.Connection) -> None:
            while chunks:
                say(f"a backlog of {rows:,} rows: {sum(chunks):,} to go")
                await _insert(connection, _FAR, chunks.pop(), size, lanes)

        await asyncio.gather(*map(write, writers))
        say(f"a backlog of {rows:,} rows: VACUUM, ANALYZE, CHECKPOINT")
        await first.execute("VACUUM (ANALYZE) message")
        await first.execute("CHECKPOINT")
    finally:
        for connection in writers:
            await pool.close(connection)
