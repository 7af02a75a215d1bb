"""The schema upgrades add up to the models."""

from __future__ import annotations

import asyncio
import sys

import asyncpg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from delayer.core.errors import StoreLost
from delayer.store import pool, schema, upgrades
from delayer.store.admin.stats import overview
from delayer.store.errors import BadStoreUrl, SchemaOutdated
from delayer.store.postgres import PostgresStore
from tests.integration.test_store_lane import sql

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
        return await pool.connect_plain(url, "test")

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
        return compare_metadata(MigrationContext.configure(connection, opts=options), upgrades.metadata)

    await on_engine(database, upgrades.metadata.create_all)
    created = await catalog(database)
    await on_engine(database, upgrades.metadata.drop_all)
    await upgrades.upgrade(database)
    assert await on_engine(database, differences) == []
    upgraded = await catalog(database)
    for name, rows in upgraded.items():
        assert created[name] == rows, name
        assert rows, name


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
