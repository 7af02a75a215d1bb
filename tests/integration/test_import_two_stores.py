"""Two imports into two stores that begin on the same tables at the same moment: each timeout is in one store."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from tests.faults.place import eventually
from tests.integration.test_import_jsonl import other_store
from tests.integration.test_import_sql import NOON, Source, mariadb, source_of
from tests.integration.test_store_lane import sql
from tests.support.daemon import EXECUTABLE
from tests.support.rows import conserved
from tests.support.servers import Postgres

__all__ = ["mariadb"]

TABLES = ("A_TimeoutData", "B_TimeoutData")
COUNT = 60
# What lets everybody read the tables, and nobody take from them, for as long as it is held; and who waits for that.
HOLD = {
    "postgresql": 'LOCK TABLE "A_TimeoutData", "B_TimeoutData" IN EXCLUSIVE MODE',
    "mysql": "LOCK TABLES A_TimeoutData READ, B_TimeoutData READ",
}
WAITING = {
    "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'INSERT INTO%'"
    " AND datname = current_database()",
    "mysql": "SELECT count(*) FROM information_schema.processlist WHERE db = database() AND info LIKE 'INSERT INTO%'",
}


@pytest.fixture(params=["postgresql", "mysql"])
def source(request: pytest.FixtureRequest, postgres: Postgres) -> Iterator[Source]:
    yield from source_of(request.param, request, postgres)


async def import_into(store: str, source: Source) -> tuple[int, dict[str, Any], str]:
    process = await asyncio.create_subprocess_exec(
        EXECUTABLE, "import", "nservicebus-sql", "run", "--unverified", "--yes", "--json",
        env={
            "PATH": os.environ["PATH"], "DELAYER_CONFIG": os.devnull, "DELAYER_STORE__URL": store,
            "DELAYER_IMPORT_URL": source.url,
        },
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, json.loads(out or "{}"), said.decode()


async def test_each_timeout_is_in_one_store(source: Source, postgres: Postgres) -> None:
    """Both have looked, and made their tables beside the others, before either of them takes anything."""
    rows = [source.timeout(n, NOON + timedelta(seconds=n)) for n in range(COUNT)]
    for name, some in zip(TABLES, (rows[::2], rows[1::2]), strict=True):
        await source.create(name)
        await source.put(name, some)
    async with other_store(postgres) as one, other_store(postgres) as other:
        async with source.connected() as holder:
            await holder.execute(text(HOLD[source.kind]))

            async def waiting() -> int:
                async with source.connected() as watcher:
                    count: int = (await watcher.execute(text(WAITING[source.kind]))).scalar_one()
                return count

            both = asyncio.gather(import_into(one, source), import_into(other, source))
            await eventually(waiting, lambda count: count == 2)
            if source.kind == "mysql":
                await holder.execute(text("UNLOCK TABLES"))
        ended = await both
        assert [code for code, _, _ in ended] == [0, 0], ended
        brought = []
        for store, (_, report, _) in zip((one, other), ended, strict=True):
            async with sql(store) as admin:
                bodies = [body for (body,) in await admin.fetch("SELECT body FROM message")]
                assert len(bodies) == report["parked"] == report["staged"] == (await conserved(admin))["parked"]
                brought += bodies
        assert sorted(brought) == sorted(row["State"] for row in rows)
    assert [await source.rows(name) for name in TABLES] == [[], []]
    assert await source.tables() == list(TABLES)


@pytest.mark.parametrize("source", ["postgresql", pytest.param("mysql", marks=pytest.mark.long)], indirect=True)
async def test_one_that_begins_later_is_refused(source: Source, postgres: Postgres) -> None:
    """Rows that are staged by somebody else are told, and not taken; what came since is not either, for now."""
    await source.create(TABLES[0])
    await source.put(TABLES[0], [source.timeout(n, NOON) for n in range(3)])
    async with source.connected() as connection:
        quote = '"' if source.kind == "postgresql" else "`"
        like = "(LIKE {0}{1}{0})" if source.kind == "postgresql" else "LIKE {0}{1}{0}"
        staged = f"{TABLES[0]}_delayer_0123456789ab"
        await connection.execute(text(f"CREATE TABLE {quote}{staged}{quote} {like.format(quote, TABLES[0])}"))
        await connection.execute(text(f"INSERT INTO {quote}{staged}{quote} SELECT * FROM {quote}{TABLES[0]}{quote}"))
        await connection.execute(text(f"DELETE FROM {quote}{TABLES[0]}{quote}"))
    await source.put(TABLES[0], [source.timeout(9, NOON)])
    async with other_store(postgres) as store:
        code, _, told = await import_into(store, source)
        assert code == 1
        assert f"table {staged} holds timeouts of another store's import" in told
    assert (len(await source.rows(TABLES[0])), len(await source.rows(staged))) == (1, 3)
