"""Locks of the store that a role without any right on its tables has taken: they are named, and can be ruled out."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from delayer.core.errors import StoreLost
from delayer.core.filters import EARLIEST_MS, LAST_MS
from delayer.http.health import not_ready
from delayer.store import foreign_locks, upgrades
from delayer.store.admin import needs, stats
from delayer.store.identity import read_identity
from delayer.store.lanes.notify import channel
from delayer.store.schedules import reading
from tests.integration.cli import Run
from tests.integration.lanes_shared import migrated, running
from tests.integration.rights import statements_of
from tests.support.place import eventually
from tests.support.postgres import Postgres
from tests.support.store import blocked, opened, owned, parcel, sql
from tests.unit.http.states import state

LOCK = "SELECT pg_advisory_lock('{}'::regclass::oid::int, {})"
ONE_NUMBER = "SELECT pg_advisory_lock(('lane'::regclass::oid::bigint << 32) + 1)"
ROLE = "stranger"


@pytest.fixture
def role(postgres: Postgres) -> Iterator[str]:
    postgres.execute(f"CREATE ROLE {ROLE} LOGIN")
    yield ROLE
    postgres.execute(f"DROP ROLE {ROLE}")


@asynccontextmanager
async def stranger(postgres: Postgres, database: str, name: str = "psql") -> AsyncIterator[asyncpg.Connection]:
    """A session of a role without any right, with the name of its choice."""
    url = postgres.url(database.rpartition("/")[2].partition("?")[0], user=ROLE)
    connection = await asyncpg.connect(url, server_settings={"application_name": name})
    try:
        yield connection
    finally:
        await connection.close()


def test_every_table_of_a_lock_is_known() -> None:
    sources = [one.read_text() for folder in ("delayer", "migrations") for one in Path(folder).rglob("*.py")]
    used = {name for one in sources for name in re.findall(r"'(\w+)'(?:::regclass|\))::oid::int", one)}
    assert used == set(foreign_locks.LOCKED)


async def test_the_lock_of_a_free_lane_is_named_and_the_daemon_is_not_ready(
    database: str, postgres: Postgres, role: str, delayer: Run
) -> None:
    await migrated(database)
    async with stranger(postgres, database, "delayer lane 1") as other:
        await other.execute(LOCK.format("lane", 1))
        pid = other.get_server_pid()
        async with running(database) as process:
            await eventually(lambda: asyncio.sleep(0, process.backlog.numbers), lambda found: len(found) == 3)
            assert f"session {pid} of role '{role}' (delayer lane 1)" in process.backlog.reason
            seen = await stats.overview(database)
            assert [lane.alive for lane in seen.lanes] == [False, True, True, True]
            [reason] = not_ready(state(), "delays", seen, "")
            assert reason.startswith(f"session {pid} of role '{role}'")
            assert f"LOCKED: session {pid} of role" in delayer("status").stdout
            rows = json.loads(delayer("check", "--json", expect=1).stdout)["checks"]
            assert [row["result"] for row in rows if row["what"] == "locks" and row["found"] == reason] == ["off"]
            await other.execute("SELECT pg_advisory_unlock_all()")
            await eventually(lambda: asyncio.sleep(0, process.backlog.numbers), lambda found: len(found) == 4)
            assert not process.backlog.reason
    assert not (await stats.overview(database)).foreign


async def test_what_an_upgrade_waits_for_is_named(database: str, postgres: Postgres, role: str) -> None:
    await migrated(database)
    async with stranger(postgres, database) as other, sql(database) as admin:
        await other.execute(LOCK.format("delayer_schema_version", 0))
        upgrading = asyncio.create_task(upgrades.upgrade(database))
        await blocked(admin, "%pg_advisory_xact_lock%")
        assert [one.pid for one in await foreign_locks.find(admin)] == [other.get_server_pid()]
        await other.execute("SELECT pg_advisory_unlock_all()")
        await upgrading


async def test_a_session_that_only_waits_is_named_too(database: str, postgres: Postgres, role: str) -> None:
    async with opened(database) as store, owned(store, 1) as [lane], stranger(postgres, database) as other:
        waiting = asyncio.create_task(other.execute(LOCK.format("lane", lane.number)))
        async with sql(database) as admin:
            mine = [other.get_server_pid()]
            await eventually(lambda: foreign_locks.find(admin), lambda found: [one.pid for one in found] == mine)
            assert (await stats.overview(database)).lanes[0].alive, "the lane still has its owner"
        waiting.cancel()


async def test_the_lock_of_a_prepared_transaction_is_named() -> None:
    server = Postgres(settings={"max_prepared_transactions": "5"})
    try:
        name = await asyncio.to_thread(lambda: server.start().add_store())
        async with sql(server.url(name)) as admin:
            lock = "SELECT pg_advisory_xact_lock('lane'::regclass::oid::int, 1)"
            await admin.execute(f"BEGIN; {lock}; PREPARE TRANSACTION 'two'")
            [found] = await foreign_locks.find(admin)
            assert str(found).startswith("a prepared transaction (pg_prepared_xacts) has locks of the store")
            await admin.execute("ROLLBACK PREPARED 'two'")
            assert not await foreign_locks.find(admin)
    finally:
        await asyncio.to_thread(server.close)


@pytest.mark.parametrize(
    ("table", "number"), [("message_key", 7), ("message", 1), ("delayer_inbox", 0), ("delayer_schema_version", 0)]
)
async def test_every_lock_counts(database: str, postgres: Postgres, role: str, table: str, number: int) -> None:
    await migrated(database)
    async with stranger(postgres, database, "delayer inbox") as other, sql(database) as admin:
        await other.execute(LOCK.format(table, number))
        [found] = (await stats.overview(database)).foreign
        assert (found.role, found.tables) == (role, [table])
        counted = await stats.count_inbox(admin)
        assert counted is not None
        assert not counted.read, "the name of a session proves nothing"


async def test_locks_of_others_that_are_not_the_store_s_do_not_count(
    database: str, postgres: Postgres, role: str
) -> None:
    await migrated(database)
    async with stranger(postgres, database) as other:
        await other.execute("SELECT pg_advisory_lock(1, 1)")
        await other.execute(ONE_NUMBER)
        assert not (await stats.overview(database)).foreign
        async with opened(database) as store, owned(store, 1) as [lane]:
            assert lane.number == 1


async def test_a_forged_presence_takes_no_share_of_the_lanes(database: str, postgres: Postgres, role: str) -> None:
    await migrated(database)
    async with stranger(postgres, database, "delayer presence 1970a nobody") as other, sql(database) as admin:
        await other.execute("SELECT pg_advisory_lock_shared('lane'::regclass::oid::int, 0)")
        async with opened(database) as store:
            table = await store.locks.look()
            assert (table.live, table.rank) == (1, 0)
            assert len(table.foreign) == 1
            assert (await needs.connection_need(admin)).daemons == 1
            assert "1970a" not in await reading.zone_versions(admin)
            assert (await read_identity(admin, store.locks.presence)).daemons == 0
            assert not [one for one in await needs.missing_rights(admin, history=False) if one.role == role]


async def test_a_role_that_has_the_rights_by_set_role_is_trusted(database: str, postgres: Postgres, role: str) -> None:
    """Such as the role of one lease, whose tables belong to the role that it is a member of."""
    await migrated(database)
    postgres.execute("CREATE ROLE work NOLOGIN")
    postgres.execute(f"ALTER ROLE {role} NOINHERIT; GRANT work TO {role}")
    async with stranger(postgres, database, "delayer presence 2025b other") as other, sql(database) as admin:
        await other.execute("SELECT pg_advisory_lock_shared('lane'::regclass::oid::int, 0)")
        assert len(await foreign_locks.find(admin)) == 1
        await admin.execute("GRANT UPDATE ON lane TO work")
        assert not await foreign_locks.find(admin)
        async with opened(database) as store:
            assert (await store.locks.look()).live == 2
        await admin.execute("DROP OWNED BY work; DROP ROLE work")


async def test_a_member_that_may_not_set_the_role_is_a_stranger(database: str, postgres: Postgres, role: str) -> None:
    """From Postgres 16 on, a membership may give nothing but its name."""
    await migrated(database)
    async with stranger(postgres, database) as other, sql(database) as admin:
        if admin.get_server_version().major < 16:
            pytest.skip("every member may set the role before Postgres 16")
        await admin.execute(f"CREATE ROLE work; GRANT work TO {role} WITH INHERIT FALSE, SET FALSE")
        await admin.execute("GRANT UPDATE ON lane TO work")
        await other.execute(LOCK.format("lane", 1))
        assert len(await foreign_locks.find(admin)) == 1
        await admin.execute(f"GRANT work TO {role} WITH SET TRUE")
        assert not await foreign_locks.find(admin)
        await admin.execute("DROP OWNED BY work; DROP ROLE work")


@pytest.mark.parametrize("at_ms", [EARLIEST_MS, LAST_MS, -(10**25), -(10**400)], ids=["first", "last", "int", "float"])
async def test_a_notification_of_a_stranger_disturbs_no_lane(
    database: str, postgres: Postgres, role: str, at_ms: int
) -> None:
    """No right is needed to notify, and none can be taken away."""
    await migrated(database)
    epochs = "SELECT number, epoch FROM lane ORDER BY number"
    async with running(database) as process, stranger(postgres, database) as other, sql(database) as admin:
        await eventually(lambda: asyncio.sleep(0, process.backlog.numbers), lambda found: len(found) == 4)
        before = await admin.fetch(epochs)
        for number in process.backlog.numbers:
            for kind in ("waiting", "held"):
                await other.execute(f"NOTIFY {channel(number)}, '{kind} {at_ms}'")
        await process.backlog.apply([parcel(process.now_upper_ms() + 1_500)])
        await eventually(lambda: asyncio.sleep(0, process.publisher.published))
        assert await admin.fetch(epochs) == before


async def test_a_daemon_that_cannot_be_present_says_who_prevents_it(
    database: str, postgres: Postgres, role: str
) -> None:
    await migrated(database)
    async with stranger(postgres, database) as other:
        await other.execute(LOCK.format("lane", 0))
        async with opened(database) as store:
            with pytest.raises(StoreLost, match=f"session {other.get_server_pid()} of role '{role}'") as lost:
                await store.locks.look()
            assert "revoke the lock functions" in lost.value.advice
            await other.execute("SELECT pg_advisory_unlock_all()")
            assert (await store.locks.look()).live == 1


async def test_a_role_without_the_right_to_lock_cannot_disturb(database: str, postgres: Postgres, role: str) -> None:
    """By the statements of docs/security.md. The locks of one number, which applications use, stay free for all."""
    await migrated(database)
    name = database.rpartition("/")[2].partition("?")[0]
    for right in ("delayer", "delayer_owner"):
        postgres.execute(f"CREATE ROLE {right}")
    try:
        for statement in statements_of(5):
            postgres.execute(statement, database=name)
        async with stranger(postgres, database) as other, sql(database) as admin:
            may = "SELECT has_function_privilege('delayer', 'pg_try_advisory_lock(int, int)', 'EXECUTE')"
            assert await admin.fetchval(may)
            functions = await admin.fetch(
                "SELECT oid::regprocedure::text FROM pg_proc WHERE proname LIKE 'pg%advisory%lock%'"
                " AND proname NOT LIKE '%unlock%' AND pronargs = 2"
            )
            assert len(functions) == 8
            for (function,) in functions:
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await other.execute(f"SELECT {function.partition('(')[0]}('lane'::regclass::oid::int, 1)")
            await other.execute(ONE_NUMBER)
            async with opened(database) as store, owned(store, 4) as lanes:
                assert len(lanes) == 4
    finally:
        for right in ("delayer", "delayer_owner"):
            postgres.execute(f"DROP OWNED BY {right}", database=name)
            postgres.execute(f"DROP ROLE {right}")
