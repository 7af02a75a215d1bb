"""Schema upgrades: repeated, at once, and refused."""

from __future__ import annotations

import asyncio
import re
import sys
from functools import partial

import pytest

from delayer.core.errors import StoreLost
from delayer.core.hold import HoldKind
from delayer.store import schema, upgrades
from delayer.store.admin import setup
from delayer.store.admin.stats import overview
from delayer.store.errors import BadStoreUrl, SchemaUnusable
from delayer.store.postgres import PostgresStore
from delayer.store.rows import partitions
from tests.support.store import sql


async def test_partitions_of_a_day_have_the_storage_options_of_the_default_one(database: str) -> None:
    async with sql(database) as connection:
        await partitions.make(connection, 20_000, 19_999)
        options = {
            tuple(sorted(options))
            for (options,) in await connection.fetch(
                "SELECT reloptions FROM pg_inherits JOIN pg_class ON oid = inhrelid"
                " WHERE inhparent = 'message'::regclass"
            )
        }
    assert options == {tuple(sorted(schema.CHURN_OPTIONS.replace(" ", "").split(",")))}


async def test_the_store_accepts_every_kind_of_hold(database: str) -> None:
    async with sql(database) as connection:
        check = await connection.fetchval(
            "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = 'held_kind'"
        )
    assert set(re.findall(r"'(\w+)'", check)) == {kind.value for kind in HoldKind}


async def test_upgrading_twice_at_once_is_upgrading_once(empty_database: str) -> None:
    code = f"import asyncio; from delayer.store import upgrades; asyncio.run(upgrades.upgrade({empty_database!r}))"
    running = [await asyncio.create_subprocess_exec(sys.executable, "-c", code) for _ in range(3)]
    assert [await process.wait() for process in running] == [0, 0, 0]
    assert await setup.schema_of(empty_database) == schema.HEAD
    await upgrades.upgrade(empty_database)


@pytest.mark.parametrize(
    "url",
    ["postgresql://me:s3cret@host:s3cret/db", "mysql://me:s3cret@host/db", "postgresql://me:s3cret@[host/db", "s3cret"],
)
async def test_a_bad_url_is_not_quoted(url: str) -> None:
    for doing in (PostgresStore.connect(lambda: url), setup.schema_of(url), overview(url), upgrades.upgrade(url)):
        with pytest.raises((BadStoreUrl, StoreLost)) as caught:
            await doing
        error: BaseException | None = caught.value
        while error is not None:
            assert "s3cret" not in str(error)
            error = error.__cause__


async def test_a_store_out_of_reach_is_lost(database: str) -> None:
    for url in ("postgresql://me:s3cret@127.0.0.1:1/db", database + "_is_not_there"):
        connecting = PostgresStore.connect(partial(str, url))
        for doing in (connecting, setup.schema_of(url), upgrades.upgrade(url), overview(url)):
            with pytest.raises(StoreLost) as caught:
                await doing
            assert "s3cret" not in str(caught.value)
            assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("theirs", "found"),
    [
        ("CREATE TABLE message (n integer)", 'relation "message" already exists'),
        ("CREATE VIEW history AS SELECT 1", 'relation "history" already exists'),
        ("CREATE DOMAIN held AS integer", 'type "held" already exists'),
        (
            "CREATE FUNCTION delayer_cancel(text, text) RETURNS integer LANGUAGE sql AS 'SELECT 1'",
            'function "delayer_cancel" already exists with same argument types',
        ),
    ],
)
async def test_a_schema_with_other_objects_of_these_names_is_left_alone(
    empty_database: str, theirs: str, found: str
) -> None:
    async with sql(empty_database) as connection:
        await connection.execute(theirs)
        with pytest.raises(SchemaUnusable) as refused:
            await upgrades.upgrade(empty_database)
        why = f"the schema 'public' is in use: {found}; nothing was changed"
        assert str(refused.value) == why
        assert refused.value.advice == upgrades.OWN_SCHEMA
        assert await setup.schema_of(empty_database) is None
        assert not await connection.fetchval("SELECT to_regclass('counter')")


async def test_a_store_without_its_version_is_not_called_a_stranger_s(database: str) -> None:
    """A new schema next to it would hide its messages."""
    async with sql(database) as connection:
        await connection.execute("DROP TABLE delayer_schema_version")
    with pytest.raises(SchemaUnusable) as refused:
        await upgrades.upgrade(database)
    assert "restore its table delayer_schema_version" in refused.value.advice


async def test_a_search_path_without_a_schema_is_refused_until_there_is_one(empty_database: str) -> None:
    url = f"{empty_database}?options=-csearch_path%3Ddelayer"
    with pytest.raises(SchemaUnusable, match="no schema of the search_path exists") as refused:
        await upgrades.upgrade(url)
    assert "CREATE SCHEMA" in refused.value.advice
    async with sql(empty_database) as connection:
        await connection.execute("CREATE SCHEMA delayer")
    await upgrades.upgrade(url)
    assert await setup.schema_of(url) == schema.HEAD
    assert await setup.schema_of(empty_database) is None
