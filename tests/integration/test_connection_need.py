"""Connections of the store: what the daemons need, and what commands say when Postgres has none left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import asyncpg
import pytest

from delayer.cli.check_store import CheckReport, _connections
from delayer.core.errors import StoreLost
from delayer.store.admin.needs import ConnectionNeed, connection_need
from delayer.store.postgres import PostgresStore
from delayer.store.requests import MOST_ATTEMPTS
from tests.integration.lanes_shared import migrated, running
from tests.support.postgres import Postgres
from tests.support.store import sql

FEW = 20


@pytest.fixture
def crowded() -> Iterator[Postgres]:
    with Postgres(settings={"max_connections": FEW, "superuser_reserved_connections": 1}) as server:
        yield server


async def test_what_the_daemons_need_is_what_they_open(database: str) -> None:
    await migrated(database)
    async with running(database, rates={b"slow": 10.0}) as process, sql(database) as admin:
        async with asyncio.timeout(60):
            while len(process.backlog.numbers) < 5:  # noqa: ASYNC110 - the backlog has no event for it
                await asyncio.sleep(0.05)
        need = await connection_need(admin)
        opened: int = await admin.fetchval(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name ~ '^delayer (lane|park|presence)'"
        )
    assert (need.lanes, need.limited, need.daemons, need.needed) == (4, 1, 1, 16)
    assert need.needed - 3 <= opened <= need.needed, "the pool opens its connections when it needs them"


def test_requests_with_an_idempotency_key_have_connections_too() -> None:
    base = ConnectionNeed(100, "", 4, 0, 3)
    assert base._replace(tokens=True).needed - base.needed == 3 * MOST_ATTEMPTS == 12


@pytest.mark.parametrize(("lanes", "limited", "daemons", "needed"), [(4, 0, 0, 13), (4, 500, 1, 16), (8, 3, 3, 38)])
def test_check_names_max_connections_with_the_number(lanes: int, limited: int, daemons: int, needed: int) -> None:
    report = CheckReport()
    _connections(report, ConnectionNeed(needed, "", lanes, limited, daemons))
    _connections(report, ConnectionNeed(needed - 1, "", lanes, limited, daemons))
    enough, few = report
    assert (enough.result, few.result) == ("ok", "off")
    assert str(needed) in few.found
    assert f"max_connections = {needed + 20}" in few.advice


async def test_the_least_limit_counts(database: str, postgres: Postgres) -> None:
    """For the limits of database and role, the message names the statement that raises them."""
    await migrated(database)
    name = database.rpartition("/")[2].partition("?")[0]
    role = f"limited_{name}"
    async with sql(database) as admin:
        whole = await connection_need(admin)
        await admin.execute(f'ALTER DATABASE "{name}" CONNECTION LIMIT 7')
        less = await connection_need(admin)
        await admin.execute(f'CREATE ROLE "{role}" LOGIN CONNECTION LIMIT 5')
        await admin.execute(f'GRANT pg_read_all_data TO "{role}"')
        async with sql(postgres.url(name, user=role)) as other:
            least = await connection_need(other)
            await admin.execute(f'ALTER ROLE "{role}" CONNECTION LIMIT 30')
            again = await connection_need(other)
    postgres.execute(f'DROP ROLE "{role}"')
    assert (whole.allowed > 30, whole.command) == (True, "")
    assert [(one.allowed, one.command.split(" ")[1]) for one in (less, least, again)] == [
        (7, "DATABASE"),
        (5, "ROLE"),
        (7, "DATABASE"),
    ]
    report = CheckReport()
    _connections(report, less)
    assert report[0].result == "off"
    assert report[0].advice == f"ALTER DATABASE {name} CONNECTION LIMIT {less.needed + 20}"


async def test_a_server_without_connections_names_the_limit(crowded: Postgres) -> None:
    url = crowded.url("postgres")
    async with AsyncExitStack() as stack:
        with pytest.raises(asyncpg.TooManyConnectionsError):
            while True:
                connection = await asyncpg.connect(url)
                stack.push_async_callback(connection.close)
        with pytest.raises(StoreLost) as lost:
            await PostgresStore.connect(lambda: url)
        assert "raise max_connections" in lost.value.advice
