"""A store restored from an older copy never reuses a number after `delayer db skip-ids`."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from delayer.core.errors import StoreLost
from delayer.store.admin.setup import FAR, skip_ids
from tests.integration.cli import Run
from tests.support.place import eventually
from tests.support.store import opened, owned, parcel, sql

WAITS = """
    SELECT EXISTS (
        SELECT FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'delayer skip-ids' AND wait_event_type = 'Lock'
    )"""


async def ids(database: str) -> set[int]:
    async with sql(database) as connection:
        return {row["id"] for row in await connection.fetch("SELECT id FROM message")}


async def park(database: str, count: int) -> set[int]:
    """Park this many messages, and return the new ids."""
    before = await ids(database)
    async with opened(database) as store, owned(store) as [lane]:
        await store.park(lane, [parcel(store.now_upper_ms() + 600_000, b"%d" % n) for n in range(count)], [])
    return await ids(database) - before


async def test_an_older_copy_issues_ids_again(delayer: Run, database: str) -> None:
    """A copy made before 50 messages serves as a backup; without the command it would reuse their numbers."""
    await park(database, 10)
    async with sql(database) as connection:
        then = await connection.fetchval("SELECT last_value FROM message_id")
    given = await park(database, 50)
    async with sql(database) as connection:  # the copy does not have these messages
        await connection.execute("DELETE FROM message WHERE id = ANY($1)", given)
        await connection.execute("SELECT setval('message_id', $1)", then)
    assert await park(database, 50) == given, "the reason for the command"
    said = delayer("db", "skip-ids").stdout
    again = await park(database, 50)
    assert not again & given
    assert min(again) > then + FAR
    assert f"an id of {then + 50 + FAR + 2:,} or more" in said
    assert min(await park(database, 1)) < then + 2 * FAR
    delayer("db", "skip-ids", "--by", "1000000000000000")
    assert min(await park(database, 1)) > 1_000_000_000_000_000


async def test_a_skip_while_daemons_run_never_goes_back(delayer: Run, database: str) -> None:
    """Even with the smallest skip, no number is reused, and none is below a reported number."""
    given: Counter[int] = Counter()
    over = asyncio.Event()

    async def park_on() -> None:
        async with sql(database) as connection:
            while not over.is_set():
                some = await connection.fetch("SELECT nextval('message_id') AS id FROM generate_series(1, 500)")
                given.update(row["id"] for row in some)

    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(park_on())
        firsts = [await skip_ids(database, 1) for _ in range(60)]
        over.set()
    assert given and max(given.values()) == 1
    assert firsts == sorted(set(firsts))


async def test_other_sessions_get_ids_during_a_long_transaction(database: str) -> None:
    async with sql(database) as long, sql(database) as other, sql(database) as admin:
        async with long.transaction():
            before = await long.fetchval("SELECT nextval('message_id')")
            skips = asyncio.create_task(skip_ids(database, 1000))
            await eventually(lambda: admin.fetchval(WAITS))
            await other.fetchval("SELECT nextval('message_id')", timeout=5.0)
            with pytest.raises(StoreLost) as in_vain:
                await skips
        assert await skip_ids(database, 1000) > before + 1000
    assert "nothing is changed" in in_vain.value.advice and "run this again" in in_vain.value.advice


async def test_missing_rights_are_reported(delayer: Run, empty_database: str) -> None:
    refused = delayer("db", "skip-ids", expect=1, DELAYER_STORE__URL=empty_database)
    assert "delayer db upgrade" in refused.stderr
    delayer("db", "skip-ids", "--by", "0", expect=2)
