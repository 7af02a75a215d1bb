"""Least privilege: the store works with the rights that docs/security.md grants, and fails without any of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial

import asyncpg
import pytest

from delayer.audit import compact as compaction
from delayer.core.errors import StoreLost
from delayer.core.filters import Filter, Token
from delayer.core.message import KeyMode
from delayer.core.operations import Cancel, Term, fold
from delayer.core.segment import Broken, Restored
from delayer.core.units import DAY_MS
from delayer.release.ports import Lane
from delayer.store import upgrades
from delayer.store.admin import actions, audit_log
from delayer.store.admin.actions import NewDue
from delayer.store.admin.detail import FoundIn
from delayer.store.admin.needs import MissingRight, missing_rights
from delayer.store.admin.stats import overview
from delayer.store.errors import SchemaOutdated
from delayer.store.lanes.lane import PostgresLane
from delayer.store.requests import Requests
from delayer.store.rows import partitions
from delayer.store.schedules import changes
from delayer.store.statements import READ_INBOX
from tests.integration.rights import (
    DAEMON,
    DATABASE,
    OWNER,
    PAGE,
    Right,
    as_owner,
    clear,
    granted,
    page,
    statements_of,
    store,
)
from tests.support.fakes import WHY
from tests.support.logged import capture_logs
from tests.support.rows import compact, put, row
from tests.support.schedules import HOUR_MS, check_waiting, rewind, schedule
from tests.support.servers import Postgres
from tests.support.store import Store, claim_when_due, opened, owned, parcel, release_all, sql

__all__ = ["page", "store"]


def rights() -> list[Right]:
    """Every privilege of the daemon's role, one by one."""
    owner = Right(f"ALTER TABLE message OWNER TO {OWNER}", f"ALTER TABLE message OWNER TO {DAEMON}")
    return [owner, *granted([*statements_of(1), *statements_of(2)])]


async def test_an_upgrade_as_the_daemon_can_be_undone(store: str, postgres: Postgres) -> None:
    """The role may create tables, so the upgrade succeeds. The page's other statements succeed too, without effect."""
    del store  # the fixture creates the roles
    name = "upgraded_by_mistake"
    postgres.execute(f"CREATE DATABASE {name} OWNER {OWNER}")
    try:
        for statement in statements_of(1):
            postgres.execute(statement.replace(f"DATABASE {DATABASE}", f"DATABASE {name}"), database=name)
        daemon, owner = postgres.url(name, user=DAEMON), postgres.url(name, user=OWNER)
        await upgrades.upgrade(daemon)
        await as_owner(owner, statements_of(2))
        reassign, list_them = re.findall(r"`(REASSIGN .*?;)` then `(.*?) \\gexec`", " ".join(PAGE.split()))[0]
        await as_owner(owner, [reassign])
        async with sql(owner) as connection:
            await as_owner(owner, [alter for (alter,) in await connection.fetch(list_them)])
            assert await connection.fetchval("SELECT tableowner FROM pg_tables WHERE tablename = 'message'") == DAEMON
        await as_owner(owner, statements_of(2))
    finally:
        postgres.drop_database(name)


async def retry(url: str, lane: Lane) -> None:
    """Let the lane retry its held messages now."""
    async with sql(url) as connection:
        await connection.execute("UPDATE held SET retry_at = now()")
    await lane.scan()


async def work(url: str) -> None:
    """Do everything that a daemon does with its store. Fails without a right for it."""
    store = await Store.connect(lambda: url)
    try:
        async with owned(store, 2) as lanes:
            assert len(lanes) == 2
            lane = lanes[0]
            now = store.now_upper_ms()
            await upkeep(url, store, now // DAY_MS)
            await store.park(lane, [parcel(now - 1), parcel(now + 3 * DAY_MS), parcel(now + 401 * DAY_MS)], [])
            await store.park(lane, [parcel(now + 500, key=b"k"), parcel(now - 1, key=b"released")], [])
            await store.park(lane, [parcel(now + 600, key=b"k")], [])
            await store.park(lane, [parcel(now + 600, key=b"k", mode=KeyMode(keep=True))], [])
            await store.park(lane, [], [b"k"])
            term = Term((await store.locks.look()).intake)
            for _ in range(2):  # The first batch of a term raises its epoch; later batches keep it.
                await store.apply(lane, fold([Cancel(b"k")]), lane.number, term)
            await empty_inbox(store, lane)
            await store.hold(lane, [(parcel(now), WHY)])
            await retry(url, lane)
            first, *rest = await claim_when_due(lane)
            await lane.claimers[0].settle(rest, [(first, WHY)])
            await retry(url, lane)
            again = await claim_when_due(lane)
            await lane.claimers[0].settle([], [(due, WHY) for due in again])
            await retry(url, lane)
            await claim_when_due(lane)
            await lane.claimers[0].give_up()
            for one in lanes:
                await release_all(one)
            assert isinstance(await store.restore(now + 2 * DAY_MS), Broken)
            assert isinstance(await store.restore(now + 2 * DAY_MS), Restored)
            assert await store.restore(now + 2 * DAY_MS) is None
            await store.locks.add_routes([b"limited"])
    finally:
        await store.close()
    with closing(Requests(lambda: url, 10.0)) as kept:
        for before in (None, "sent"):  # The second attempt changes the answer of the first.
            async with kept.attempt(b"k" * 32, b"c" * 32) as attempt:
                assert attempt.before == before
                attempt.answer = "sent"
    async with sql(url) as connection:
        assert (await check_waiting(connection)).made == 1
    await overview(url)


async def empty_inbox(store: Store, lane: PostgresLane) -> None:
    """Read the message that was sent by SQL, and move it."""
    session = await store.locks.take_inbox(lambda: None)
    assert session is not None
    try:
        [found] = await session.connection.fetch(READ_INBOX, [0], [1 << 62], 10, 1 << 20)
    finally:
        await session.close()
    await store.apply(lane, fold([parcel(store.now_upper_ms() + 3 * DAY_MS)]), lane.number, None, [found["id"]])


async def upkeep(url: str, store: Store, today: int) -> None:
    """Create and drop partitions. A failure there is only a warning, so check the catalog."""
    async with sql(url) as connection:
        await partitions.make(connection, today - 5, today - 10)
        assert today - 5 in await partitions.read_days(connection)
        await store.maintain()
        assert await partitions.read_days(connection) >= set(range(today, today + 8))
        assert today - 5 not in await partitions.read_days(connection)
        await connection.execute(f"INSERT INTO message {_ROW}", today * DAY_MS + 401 * DAY_MS)
        assert await partitions.make(connection, today + 401, today) is partitions.PartitionResult.DONE


_ROW = (
    "(due_at, checksum, lane, format, route, exchange, routing_key, to_exchange, to_key, properties, body)"
    " VALUES ($1, 0, 99, 1, '', '', '', '', '', '', '')"
)


async def prepare(postgres: Postgres) -> None:
    """A store without partitions, and with two segments like those of the jobs: one is broken."""
    await asyncio.to_thread(clear, postgres)
    async with sql(postgres.url(DATABASE, user=OWNER)) as owner:
        now_ms = await owner.fetchval("SELECT now()")
        for number in range(2):
            await put(owner, [row(2 * number + n, now_ms + DAY_MS + number) for n in (1, 2)])
            assert await compact(owner)
        await owner.execute("SELECT delayer_send('k', 'x')")
        await changes.add(owner, schedule(), who="test")
        await rewind(owner, HOUR_MS)
        await owner.execute("UPDATE segment SET packed = '' WHERE id = (SELECT min(id) FROM segment)")


async def test_the_store_works_with_these_rights(store: str, postgres: Postgres) -> None:
    await prepare(postgres)
    await work(store)


HISTORY = [right for right in granted(statements_of(4)) if "history" in str(right)]


async def missing(url: str, *, history: bool) -> list[MissingRight]:
    async with sql(url) as connection:
        return await missing_rights(connection, history=history)


@pytest.mark.parametrize("right", [*rights(), *HISTORY, "history"], ids=str)
async def test_check_names_each_right_that_is_missing(store: str, postgres: Postgres, right: Right | str) -> None:
    owner = postgres.url(DATABASE, user=OWNER)
    await as_owner(owner, statements_of(4))
    if isinstance(right, Right) and ("DATABASE" in right.take or "USAGE ON SCHEMA" in right.take):
        return  # Without them this role sees nothing at all.
    if isinstance(right, str):
        right = Right(f"ALTER TABLE {right} OWNER TO {OWNER}", f"ALTER TABLE {right} OWNER TO {DAEMON}")
    assert await missing(store, history=True) == []
    postgres.execute(right.take, database=DATABASE)
    try:
        found = await missing(store, history=True)
        assert [one.advice for one in found] == [right.give]
    finally:
        postgres.execute(right.give, database=DATABASE)


@asynccontextmanager
async def named(url: str, application: str) -> AsyncIterator[None]:
    """A session with this name."""
    connection = await asyncpg.connect(url, server_settings={"application_name": application})
    try:
        yield
    finally:
        await connection.close()


async def test_the_advice_quotes_the_role_and_names_the_schema(postgres: Postgres) -> None:
    """The store in a schema of its own, whose daemon lacks all rights but one."""
    database = postgres.add_database()
    url = postgres.url(database) + '?options=-csearch_path%3D"My-store"'
    postgres.execute('CREATE SCHEMA "My-store"', database=database)
    postgres.execute('CREATE ROLE "Shop-1" LOGIN')
    try:
        await upgrades.upgrade(url)
        postgres.execute('GRANT INSERT ON "My-store".lane TO "Shop-1"', database=database)
        async with named(postgres.url(database, user="Shop-1"), "delayer presence x"):
            advice = {one.advice for one in await missing(url, history=False) if one.role == "Shop-1"}
        assert 'ALTER TABLE message OWNER TO "Shop-1"' in advice
        assert 'GRANT CREATE ON SCHEMA "My-store" TO "Shop-1"' in advice
        for statement in advice:
            async with sql(url) as connection:
                await connection.execute(statement)
    finally:
        postgres.drop_database(database)
        postgres.execute('DROP ROLE "Shop-1"')


async def test_a_role_that_only_reads_is_no_daemon_s(store: str, postgres: Postgres) -> None:
    postgres.execute("CREATE ROLE reader LOGIN")
    postgres.execute("GRANT CONNECT ON DATABASE delayer TO reader; GRANT pg_read_all_data TO reader")
    try:
        reader = postgres.url(DATABASE, user="reader")
        assert await missing(reader, history=False) == []
        async with opened(store) as process, owned(process), named(reader, "delayer presence x"):
            assert await missing(reader, history=False) == [], "it may read, so it is no daemon, whatever its name"
            postgres.execute("REVOKE UPDATE ON lane FROM delayer", database=DATABASE)
            [one] = await missing(reader, history=False)
            assert (one.role, one.advice) == (DAEMON, "GRANT UPDATE ON lane TO delayer")
    finally:
        postgres.execute("GRANT UPDATE ON lane TO delayer", database=DATABASE)
        postgres.execute("DROP OWNED BY reader; DROP ROLE reader", database=DATABASE)


@pytest.mark.parametrize("right", rights(), ids=str)
async def test_the_store_needs_each_of_them(store: str, postgres: Postgres, right: Right) -> None:
    await prepare(postgres)
    await asyncio.to_thread(postgres.execute, right.take, database=DATABASE)
    try:
        with pytest.raises((StoreLost, SchemaOutdated, asyncpg.PostgresError, AssertionError)):
            await work(store)
    finally:
        await asyncio.to_thread(postgres.execute, right.give, database=DATABASE)


async def press(url: str) -> None:
    """Do everything that the page's buttons do. Fails without a right for it."""
    store = await Store.connect(lambda: url)
    try:
        async with owned(store) as [lane]:
            due_ms = store.now_upper_ms() + 3 * DAY_MS
            await store.park(lane, [parcel(due_ms, key=b"k"), parcel(due_ms), parcel(due_ms)], [])
            await store.hold(lane, [(parcel(store.now_upper_ms()), WHY) for _ in range(3)])
    finally:
        await store.close()
    async with actions.change_connection(url, "test") as connection:
        waiting = [
            Token(id_) for (id_,) in await connection.fetch("SELECT id FROM message WHERE route <> '' ORDER BY id")
        ]
        segment = [Token(3)]  # see prepare()
        first, second, third = [number for (number,) in await connection.fetch("SELECT id FROM held ORDER BY id")]
        await changes.pause(connection, "tick", who="ada")
        await changes.resume(connection, "tick", who="ada")
        await changes.run_now(connection, "tick", who="ada")
        await changes.pause(connection, "tick", who="ada")
        act = await audit_log.begin(connection, "ada", "cancel", {})
        move = partial(actions.reschedule, when=NewDue(None, DAY_MS))
        assert await actions.apply_to_ids(connection, move, waiting, act) == {
            one.id: FoundIn.WAITING for one in waiting
        }
        assert await actions.apply_to_ids(connection, actions.cancel, segment, act) == {3: FoundIn.SEGMENT}
        pages = actions.waiting_pages(connection, Filter())
        done = await actions.apply_to_matching(connection, actions.cancel, pages, log_id=act, say=lambda _: None)
        assert done[FoundIn.WAITING] == 5, "and those out of the segment, and that of the schedule"
        assert await actions.apply_to_ids(connection, move, [Token(first)], act) == {first: FoundIn.HELD}
        assert await actions.retry_held(connection, [second], {}, act) == {second: FoundIn.HELD}
        assert await actions.cancel(connection, [third], log_id=act) == {third: FoundIn.HELD}
        written, *_ = await audit_log.list_entries(connection, 10)
        assert (written.who, written.messages) == ("ada", 3 + 1 + 5 + 1 + 1 + 1)
        await changes.remove(connection, "tick", who="ada")


async def test_the_page_s_buttons_work_with_its_rights(page: str, postgres: Postgres) -> None:
    await prepare(postgres)
    await press(page)


@pytest.mark.parametrize("right", granted(statements_of(3)), ids=str)
async def test_the_page_s_buttons_need_each_of_them(page: str, postgres: Postgres, right: Right) -> None:
    await prepare(postgres)
    await asyncio.to_thread(postgres.execute, right.take, database=DATABASE)
    with pytest.raises((StoreLost, asyncpg.PostgresError, AssertionError)):
        await press(page)


@pytest.mark.parametrize(
    "statement", ["UPDATE audit_log SET who = 'eve'", "DELETE FROM audit_log", "TRUNCATE audit_log"]
)
async def test_the_page_s_rights_allow_adding_to_the_audit_log_and_no_more(page: str, statement: str) -> None:
    async with sql(page) as connection:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute(statement)


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE held", "ALTER TABLE lane ADD COLUMN mine int",
        "UPDATE delayer_schema_version SET version_num = '9'", "CREATE SCHEMA mine", "TRUNCATE counter",
        "DELETE FROM lane",
    ],
)  # fmt: skip
async def test_limits_of_the_daemon_s_role(store: str, statement: str) -> None:
    async with sql(store) as connection:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute(statement)


async def test_the_owner_can_still_upgrade_when_the_daemon_owns_partitions(store: str, postgres: Postgres) -> None:
    """A later upgrade may need the right to alter the daemon's partitions."""
    await asyncio.to_thread(clear, postgres)
    daemon = await Store.connect(lambda: store)
    try:
        await daemon.maintain()
    finally:
        await daemon.close()
    async with sql(postgres.url(DATABASE, user=OWNER)) as connection:
        await connection.execute("ALTER TABLE message ADD COLUMN later int")
        await connection.execute("ALTER TABLE message DROP COLUMN later")


async def test_the_daemon_looks_after_days_that_its_owner_made(store: str, postgres: Postgres) -> None:
    """An import or a bulk restore parks as the owner of the schema."""
    await asyncio.to_thread(clear, postgres)
    owner = await Store.connect(lambda: postgres.url(DATABASE, user=OWNER))
    try:
        today = owner.now_upper_ms() // DAY_MS
        async with owned(owner) as [lane]:
            await owner.park(lane, [parcel((today + 20) * DAY_MS)], [])
    finally:
        await owner.close()
    async with sql(store) as connection:
        assert await partitions.drop_passed(connection, today + 30) == [], "it has a row"
        await connection.execute("DELETE FROM message")
        assert await partitions.drop_passed(connection, today + 30) == [partitions.name_of(today + 20)]


async def test_a_partition_of_another_owner_does_not_block_other_drops(store: str, postgres: Postgres) -> None:
    await asyncio.to_thread(clear, postgres)
    async with sql(store) as connection:
        for day in (100, 101, 102):
            await partitions.make(connection, day, 0)
        theirs = partitions.name_of(101)
        await asyncio.to_thread(postgres.execute, f"ALTER TABLE {theirs} OWNER TO postgres", database=DATABASE)
        with capture_logs() as logged:
            dropped = await partitions.drop_passed(connection, 200)
        assert dropped == [partitions.name_of(100), partitions.name_of(102)]
        assert [entry["partition"] for entry in logged if entry["event"] == "partition not dropped"] == [theirs]


async def test_compaction_without_the_right_says_so_before_the_work(store: str) -> None:
    with pytest.raises(StoreLost, match="the role delayer may not write segments") as refused:
        await compaction.plan(store, 7 * DAY_MS, 10_000)
    assert "owns the schema" in refused.value.advice
