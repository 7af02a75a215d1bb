"""The schema upgrades add up to the models, and go down again."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import asyncpg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from delayer.commands.errors import Unreached, failure
from delayer.core.errors import StoreLost
from delayer.store import brief_locks, schema, segments, session, tables, upgrades
from delayer.store.errors import BadStoreUrl, SchemaOutdated
from delayer.store.postgres import PostgresStore
from delayer.store.status import overview
from tests.conformance.store_contract import owned, parcel
from tests.faults.place import eventually
from tests.integration.test_store_lane import opened, sql
from tests.rig.rows import compact, conserved, everything, put, row, waiting

CATALOG = {
    "columns": """
        SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attstorage,
               pg_get_expr(d.adbin, d.adrelid)
        FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
        WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'p')""",
    "constraints": """
        SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid)
        FROM pg_constraint WHERE connamespace = current_schema()::regnamespace""",
    "indexes": "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = current_schema()",
    "relations": """
        SELECT relname, relkind, reloptions, pg_get_partkeydef(oid), pg_get_expr(relpartbound, oid)
        FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relkind <> 't'""",
    "sequences": "SELECT sequencename, data_type::text, increment_by, cache_size FROM pg_sequences",
}
WAITS = """
    SELECT EXISTS (
        SELECT FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'delayer schema' AND wait_event_type = 'Lock'
    )"""


async def catalog(url: str) -> dict[str, list[tuple[object, ...]]]:
    """Everything that the schema consists of, but the version table."""
    async with sql(url) as connection:
        found = {}
        for name, query in CATALOG.items():
            rows = [tuple(row) for row in await connection.fetch(query)]
            found[name] = sorted((r for r in rows if not str(r[0]).startswith(schema.VERSION_TABLE)), key=repr)
        return found


async def on_engine(url: str, work: object) -> object:
    async def connect() -> asyncpg.Connection:
        return await session.connect_plain(url, "test")

    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect, poolclass=NullPool)
    try:
        async with engine.begin() as connection:
            return await connection.run_sync(work)  # type: ignore[arg-type]
    finally:
        await engine.dispose()


async def test_models_equal_the_sum_of_the_upgrades(database: str) -> None:
    def partition_or_version(_: object, name: str | None, kind: str, __: bool, ___: object) -> bool:
        return not (kind == "table" and name in ("message_default", schema.VERSION_TABLE))

    def differences(connection: Connection) -> list[object]:
        options = {"include_object": partition_or_version, "compare_type": True}
        return compare_metadata(MigrationContext.configure(connection, opts=options), tables.metadata)

    await upgrades.upgrade(database)
    assert await on_engine(database, differences) == []
    upgraded = await catalog(database)
    await upgrades.downgrade(database, "base")
    await on_engine(database, tables.metadata.create_all)
    created = await catalog(database)
    for name, rows in upgraded.items():
        assert created[name] == rows, name
        assert rows, name


async def test_every_upgrade_goes_down(database: str) -> None:
    revisions = upgrades.revisions()
    assert tuple(revisions) == schema.REVISIONS
    before = await catalog(database)
    seen = [before]
    for revision in revisions:
        await upgrades.upgrade(database, revision)
        seen.append(await catalog(database))
    assert revisions[-1] == await schema.current(database) == schema.HEAD
    store = await PostgresStore.connect(database)
    await store.maintain()
    await store.close()
    for revision, expected in zip([*reversed(revisions[:-1]), "base"], reversed(seen[:-1]), strict=True):
        await upgrades.downgrade(database, revision)
        left = await catalog(database)
        for name, rows in expected.items():
            assert [one for one in left[name] if "message_p2" not in repr(one)] == rows, name  # but days' partitions
    assert await schema.current(database) is None


async def test_upgrading_twice_at_once_is_upgrading_once(database: str) -> None:
    code = f"import asyncio; from delayer.store import upgrades; asyncio.run(upgrades.upgrade({database!r}))"
    running = [await asyncio.create_subprocess_exec(sys.executable, "-c", code) for _ in range(3)]
    assert [await process.wait() for process in running] == [0, 0, 0]
    assert await schema.current(database) == schema.HEAD
    await upgrades.upgrade(database)


async def test_an_outdated_store_is_refused_and_says_what_to_do(database: str) -> None:
    with pytest.raises(SchemaOutdated, match=r"missing, expected .*: run `delayer db upgrade`") as caught:
        await PostgresStore.connect(database)
    assert (caught.value.found, caught.value.expected) == (None, schema.HEAD)
    seen = await overview(database)
    assert (seen.upgrade_pending, seen.lanes, seen.waiting, seen.next_due_ms) == (True, (), 0, None)
    await upgrades.upgrade(database)
    async with sql(database) as admin:
        await admin.execute(f"UPDATE {schema.VERSION_TABLE} SET version_num = '9999'")
    with pytest.raises(SchemaOutdated, match=r"9999.*newer delayer"):
        await PostgresStore.connect(database)


async def test_an_unknown_revision_is_a_plain_error(database: str) -> None:
    with pytest.raises(ValueError, match="no-such"):
        await upgrades.upgrade(database, "no-such")
    assert await schema.current(database) is None


async def test_the_shipped_upgrades_are_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "with %percent" / "delayer" / "store"
    shutil.copytree(Path(upgrades.__file__).parents[2] / "migrations", package / "migrations")
    monkeypatch.setattr(upgrades, "__file__", str(package / "upgrades.py"))
    assert upgrades._config().get_main_option("script_location") == str(package / "migrations")


@pytest.mark.parametrize(
    "url",
    ["postgresql://me:s3cret@host:s3cret/db", "mysql://me:s3cret@host/db", "postgresql://me:s3cret@[host/db", "s3cret"],
)
async def test_a_bad_url_is_not_quoted(url: str) -> None:
    for doing in (PostgresStore.connect(url), schema.current(url), overview(url), upgrades.upgrade(url)):
        with pytest.raises((BadStoreUrl, StoreLost)) as caught:
            await doing
        error: BaseException | None = caught.value
        while error is not None:
            assert "s3cret" not in str(error)
            error = error.__cause__


async def test_a_store_out_of_reach_is_lost(database: str) -> None:
    for url in ("postgresql://me:s3cret@127.0.0.1:1/db", database + "_is_not_there"):
        for doing in (PostgresStore.connect(url), schema.current(url), upgrades.upgrade(url), overview(url)):
            with pytest.raises(StoreLost) as caught:
                await doing
            assert "s3cret" not in str(caught.value)
            assert caught.value.__cause__ is not None


async def test_a_store_of_the_first_schema_is_upgraded_with_its_messages(database: str) -> None:
    """By `delayer db upgrade`, as a user does it; and its daemon then goes on."""
    await upgrades.upgrade(database, "0001")
    async with sql(database) as admin:
        await put(admin, [row(n, 1_900_000_000_000 + n, key=b"%d" % n if n % 3 == 0 else None) for n in range(30)])
        before = await waiting(admin)
    with pytest.raises(SchemaOutdated, match=r"0001, expected .*: run `delayer db upgrade`"):
        await PostgresStore.connect(database)
    upgrading = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from delayer.cli import main; main()", "db", "upgrade",
        env={**os.environ, "DELAYER_CONFIG": os.devnull, "DELAYER_STORE__URL": database},
    )  # fmt: skip
    assert await upgrading.wait() == 0
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        assert await waiting(admin) == before
        assert (lane.number, (await overview(database)).waiting) == (1, 30)
        assert sum(one.messages for one in await compact(admin)) == 20
        await conserved(admin)


async def test_going_down_keeps_every_message_or_refuses(database: str) -> None:
    await upgrades.upgrade(database)
    async with sql(database) as admin:
        await put(admin, [row(n, 1_900_000_000_000 + n) for n in range(30)])
        before = await waiting(admin)
        await compact(admin, rows=10)
        await admin.execute("UPDATE segment SET broken_at = now(), broken = 'why' WHERE id = 1")
        with pytest.raises(StoreLost, match=r"30 messages stand in 3 segments.*`delayer restore` first"):
            await upgrades.downgrade(database, "0001")
        assert await schema.current(database) == schema.HEAD
        assert len(await everything(admin)) == 30
        for segment in await segments.listed(admin):
            await segments.restore(admin, segments.Fence(1, 0), segment.id)
        await upgrades.downgrade(database, "0001")
        assert await schema.current(database) == "0001"
        assert await waiting(admin) == before
        # What was compacted and restored is in the counters, and the first schema's law holds with it.
        counters = dict(await admin.fetch("SELECT kind, n FROM counter"))
        assert counters == {"parked": 30, "compacted": 30, "restored": 30}
    await upgrades.upgrade(database)
    async with sql(database) as admin:
        assert await waiting(admin) == before


async def test_an_upgrade_that_has_to_wait_lets_others_pass(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside pg_dump, or anybody who read `held` and goes on: until that ends, others wait for a moment only."""
    monkeypatch.setattr(upgrades, "LOCK_SECONDS", 0.5)
    monkeypatch.setattr(brief_locks, "PAUSE_SECONDS", 0.3)
    monkeypatch.setattr(brief_locks, "TRIES", 100)
    await upgrades.upgrade(database, "0004")
    async with sql(database) as dump, sql(database) as daemon, sql(database) as admin:
        async with dump.transaction():
            await dump.execute("SELECT FROM held")
            upgrading = asyncio.create_task(upgrades.upgrade(database))
            for _ in range(2):
                await eventually(lambda: admin.fetchval(WAITS), bool)
                await daemon.execute("UPDATE held SET attempts = attempts", timeout=5.0)
            assert not upgrading.done()
        await upgrading
    assert await schema.current(database) == schema.HEAD


async def test_an_upgrade_that_waited_in_vain_says_for_whom(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrades, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr(brief_locks, "PAUSE_SECONDS", 0.0)
    await upgrades.upgrade(database, "0004")
    dump = await session.connect(database, "pg_dump")
    async with dump.transaction():
        await dump.execute("SELECT FROM held")
        with pytest.raises(StoreLost, match="lock timeout") as caught:
            await upgrades.upgrade(database)
        assert f"pg_dump (process {dump.get_server_pid()})" in caught.value.advice
        assert isinstance(failure(caught.value), Unreached)
        assert await schema.current(database) == "0004"
    await session.close(dump)
    await upgrades.upgrade(database)


async def test_going_down_refuses_where_a_held_message_keeps_an_id(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane]:
        held = parcel(store.now_ms(), b"held")._replace(token=b"0123456789abcdef0123456789abcdef")
        await store.hold(lane, [(held, "no confirm"), (parcel(store.now_ms(), b"never published"), "why")])
    with pytest.raises(StoreLost, match=r"1 held messages keep an x-delayer-id.*retry or drop them"):
        await upgrades.downgrade(database, "0004")
    assert await schema.current(database) == schema.HEAD
    async with sql(database) as admin:
        await admin.execute("UPDATE held SET token = NULL")
    await upgrades.downgrade(database, "0004")
    async with sql(database) as admin:
        assert await admin.fetchval("SELECT count(*) FROM held") == 2
