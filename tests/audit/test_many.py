"""From end to end: a backlog of a million is audited, compacted, audited, restored and audited, and loses no byte."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import asyncpg
import pytest
from pyspark.sql import SparkSession

from bench.rows import put_backlog
from delayer.audit import compact, restore
from delayer.audit.findings import AuditReport
from delayer.core.units import DAY_MS
from delayer.store import upgrades
from delayer.store.admin import actions, detail
from tests.audit.rows import said
from tests.audit.test_job import audit
from tests.support.store import sql

pytestmark = [pytest.mark.deadline(900), pytest.mark.long]

WEEK_MS = 7 * DAY_MS
COUNT = 1_000_000
BODY = 400
CANCELLED = 100
_CONTENT = (
    "id, due_at, parked_at, checksum, format, route, exchange, routing_key, to_exchange, to_key, properties, body"
)
_SUM = f"""
SELECT count(*), bit_xor(hash_record_extended(({_CONTENT}), 1)), bit_xor(hash_record_extended(({_CONTENT}), 2))
FROM message WHERE NOT id = ANY($1::bigint[])
"""
_SOME_FAR = "SELECT id FROM message WHERE due_at > now() + interval '8 days' ORDER BY due_at DESC, id LIMIT $1"


async def everything(connection: asyncpg.Connection, without: Collection[int] = ()) -> tuple[Any, ...]:
    """A digest of all rows, in any lane and place."""
    return tuple(await connection.fetchrow(_SUM, list(without), timeout=300))


async def audited(spark: SparkSession, url: str) -> AuditReport:
    """Audit the store: nothing is wrong, and conservation holds lane by lane."""
    report = await asyncio.to_thread(audit, spark, url)
    assert said(report) == []
    assert report.totals.expected == report.totals.waiting
    return report


def quiet(*_: object) -> None:
    """Report no progress."""


async def test_from_end_to_end(spark: SparkSession, database: str) -> None:
    """Two minutes alone, and more while other tests run."""
    await upgrades.upgrade(database)
    await put_backlog(database, COUNT, BODY, quiet)
    async with sql(database) as connection:
        gone = [id_ for (id_,) in await connection.fetch(_SOME_FAR, CANCELLED)]
        before = await everything(connection, gone)
        assert (await audited(spark, database)).totals.waiting == COUNT

        planned = await compact.plan(database, WEEK_MS, 10_000)
        packed = await asyncio.to_thread(compact.run, spark, database, planned, 10_000, quiet)
        assert not packed.lost and not packed.broken
        cancelled = await actions.cancel(connection, gone)
        assert set(cancelled.values()) == {detail.FoundIn.SEGMENT}
        report = await audited(spark, database)
        assert packed.totals["messages"] - CANCELLED > report.totals.packed > COUNT // 3, "some segments are rows again"
        assert report.totals.waiting + report.totals.packed == COUNT - CANCELLED

        restored = await restore.run(database, await restore.plan(database, None), quiet)
        assert (restored.messages, restored.lost, restored.broken) == (report.totals.packed, [], [])
        report = await audited(spark, database)
        assert (report.totals.waiting, report.totals.segments) == (COUNT - CANCELLED, 0)
        assert await everything(connection) == before
