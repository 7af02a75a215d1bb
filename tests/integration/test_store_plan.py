"""The plans of the hot statements: index ranges in one or two partitions, whatever the planner thinks of the rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from delayer.store import partitions, session, statements
from delayer.store.partitions import DAY_MS
from tests.conformance.store_contract import owned
from tests.integration.test_store_lane import opened, sql

FILL = """
INSERT INTO message (due_at, checksum, lane, format, route, exchange, routing_key, to_exchange, to_key,
                     properties, body)
SELECT now() + $2::float8 * interval '1 day' * random() - interval '1 hour', 0, 1 + n % 2, 1,
       'r', 'e', 'k', 'e', 'k', 'p', decode(repeat(md5(n::text), 16), 'hex')
FROM generate_series(1, $1::int) AS n
"""


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def check(plan: dict[str, Any], places: int) -> None:
    seen = [node for node in nodes(plan) if "Relation Name" in node and node["Node Type"] != "ModifyTable"]
    assert {node["Node Type"] for node in seen} <= {"Index Scan", "Index Only Scan", "Tid Scan"}
    assert not any(node["Node Type"] in ("Hash Join", "Merge Join", "Sort") for node in nodes(plan))
    assert len({node["Relation Name"] for node in seen}) <= places, sorted({node["Relation Name"] for node in seen})


@pytest.mark.parametrize("analyzed", [True, False])
async def test_hot_statements_use_the_index_of_few_partitions(database: str, analyzed: bool) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        now = store.now_ms()
        for day in range(-1, 40):
            await partitions.make(admin, now // DAY_MS + day, now // DAY_MS)
        await admin.execute(FILL, 20_000, 38.0)
        await admin.execute(
            "INSERT INTO held SELECT id, due_at, now(), now(), now(), 0, 1, lane, 1,"
            " '', '', '', '', '', '', '', NULL, '' FROM message LIMIT 5000"
        )
        if analyzed:
            await admin.execute("ANALYZE message")
            await admin.execute("ANALYZE held")
        connection = lane._link.connection

        async def plan(statement: str, *arguments: object, places: int) -> None:
            rows = await connection.fetchval(f"EXPLAIN (FORMAT JSON) {statement}", *arguments)
            check(json.loads(rows)[0]["Plan"], places)

        horizon = now + 60_000
        await plan(statements.CLAIM, lane.number, now - 3_600_000, horizon, 1000, 1 << 30, places=2)
        await plan(statements.CLAIM, lane.number, session.BEGINNING_MS, horizon, 1000, 1 << 30, places=4)
        await plan(statements.NEXT_DUE, lane.number, now - 3_600_000, horizon, places=2)
        await plan(statements.NEXT_DUE, lane.number, session.BEGINNING_MS, horizon, places=4)
        await plan(statements.NEXT_RETRY, lane.number, places=1)
