"""`check`, `run` and `db upgrade` refuse servers that cannot hold a lane, and databases that are not UTF8, but not
PgBouncer in session mode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from delayer.core.errors import StoreLost
from tests.integration.cli import Run
from tests.support.daemon import DaemonProcess
from tests.support.postgres_kinds import pgbouncer
from tests.support.servers import Postgres, StartFailed
from tests.support.store import Store, opened, owned, parcel, release_all

POOLED = "expected a session for each connection, found a connection pooler"
VERSIONS = {"CockroachDB": "CockroachDB CCL v23.2.1", "YugabyteDB": "PostgreSQL 11.2-YB-2.20.1.0-b0"}


@pytest.fixture
def url(request: pytest.FixtureRequest, postgres: Postgres, database: str) -> Iterator[str]:
    """The URL of a store behind PgBouncer in this mode, with another encoding, or that reports itself as another
    product."""
    name, mode = database.rpartition("/")[2], request.param
    if mode == "LATIN1":
        other = postgres.add_database(template="template0", more="ENCODING LATIN1 LOCALE 'C'")
        yield postgres.url(other)
        postgres.drop_database(other)
        return
    if mode in VERSIONS:
        version = f"CREATE FUNCTION odd.version() RETURNS text LANGUAGE sql AS $$ SELECT '{VERSIONS[mode]}' $$"
        path = f'ALTER DATABASE "{name}" SET search_path = odd, pg_catalog, public'
        postgres.execute(f"CREATE SCHEMA odd; {version}; {path}", database=name)
        yield database
        return
    try:
        with pgbouncer(postgres, mode) as port:
            yield postgres.url(name, port=port)
    except StartFailed as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("transaction", POOLED),
        ("statement", POOLED),
        ("LATIN1", "expected a database with the encoding UTF8, found LATIN1"),
        *((name, f"PostgreSQL, found {name}") for name in VERSIONS),
    ],
    indirect=["url"],
)
async def test_a_server_that_cannot_hold_a_store_is_refused(delayer: Run, vhost: str, url: str, reason: str) -> None:
    rows = json.loads(delayer("check", "--json", expect=1, DELAYER_STORE__URL=url).stdout)["checks"]
    [row] = [row for row in rows if row["what"] == "store"]
    assert (row["result"], reason in row["found"]) == ("off", True), row
    async with DaemonProcess({"BROKER__URL": vhost, "STORE__URL": url}) as daemon:
        event = await daemon.event("start refused")
        assert (event["reason"], event["next_step"]) == (row["found"], row["advice"])
        assert await daemon.wait() == 1
    refused = delayer("db", "upgrade", expect=1, DELAYER_STORE__URL=url)
    assert refused.stderr == f"delayer: {row['found']}. Next: {row['advice']}.\n"


@pytest.mark.parametrize("url", ["session"], indirect=True)
async def test_pgbouncer_in_session_mode_holds_lanes(url: str) -> None:
    async with opened(url, idle_timeout=7.0) as store, owned(store, 2) as [lane, _]:
        await store.park(lane, [parcel(store.now_upper_ms(), key=b"key")], [])
        assert len(await release_all(lane)) == 1
        async with lane.claimers[0].locked_connection("test") as connection:
            assert await connection.fetchval("SHOW idle_session_timeout") == "7s"
        other = await Store.connect(lambda: url)
        assert await other.locks.take(lane.number) is None
        await other.close()


async def test_a_file_that_names_another_server_moves_no_session_there(database: str) -> None:
    """Otherwise messages would enter one store, while the open lanes release from the other."""
    with Postgres() as other:
        urls = [database]
        store = await Store.connect(lambda: urls[0])
        try:
            async with owned(store):
                urls[0] = other.url(await asyncio.to_thread(other.add_store))
                with pytest.raises(StoreLost, match="points to another server") as lane:
                    await store.locks.take(2)
                with pytest.raises(StoreLost, match="points to another server") as park:
                    await asyncio.gather(*(store.read_identity() for _ in range(2)))
                assert "restart the daemon" in lane.value.advice == park.value.advice
                urls[0] = database
                await asyncio.gather(*(store.read_identity() for _ in range(2)))
        finally:
            await store.close()


async def test_a_daemon_goes_past_a_host_that_does_not_answer(postgres: Postgres, database: str) -> None:
    """The first of two hosts accepts connections, and says nothing: its machine hangs."""

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    name = database.rpartition("/")[2]
    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        there = f"127.0.0.1:{postgres.port}"
        url = postgres.url(name).replace(there, f"127.0.0.1:{port},{there}")
        assert url.count(",") == 1, url
        async with opened(f"{url}?target_session_attrs=primary") as store, owned(store) as lanes:
            assert lanes
