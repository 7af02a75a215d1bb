"""The store's sessions: their settings, the types resolved without a query, and a custom plan for every run of a
statement.

A generic plan cannot skip a partition. The server builds one after five runs of a prepared statement, if it expects a
gain; EXPLAIN with arguments never shows it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

import asyncpg
import pytest

from delayer.core.errors import StoreLost
from delayer.core.units import DAY_MS
from delayer.store import pool, statements
from delayer.store.lanes.lane import PostgresLane
from delayer.store.rows.places import DELETE_ROWS
from tests.integration.test_store_plan import FEW, fill
from tests.support.fakes import WHY
from tests.support.store import ROOM, Store, opened, owned, parcel, sql

TIMES = 15
CANCEL = DELETE_ROWS
CANCEL_HELD = "DELETE FROM held WHERE id IN"
# A statement without arguments has no custom plan: it counts as generic.
_PREPARED = "SELECT statement, generic_plans, custom_plans FROM pg_prepared_statements WHERE statement LIKE $1"

PROMISED = {
    "plan_cache_mode": "force_custom_plan",
    "jit": "off",
    "synchronous_commit": "on",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "TimeZone": "UTC",
    "statement_timeout": "30s",
}
CONTRARY = {
    "plan_cache_mode": "force_generic_plan",
    "jit": "on",
    "synchronous_commit": "off",
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "TimeZone": "Asia/Tokyo",
    "statement_timeout": "1h",
}
STEERED = ("enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "enable_mergejoin")


@asynccontextmanager
async def sessions(store: Store, lane: PostgresLane) -> AsyncIterator[dict[str, asyncpg.Connection]]:
    """The connection of the lane, and the only one of a pool with one parker."""
    async with lane.claimers[0].locked_connection("test") as of_lane, pool.borrow(store.pool) as of_pool:
        yield {"lane": of_lane, "pool": of_pool}


async def work(store: Store, lane: PostgresLane) -> None:
    """Do everything that a daemon does with messages, TIMES times."""
    for n in range(1, TIMES + 1):
        cancels = [b"far %d" % (20 * n), b"held %d" % (20 * n), b"beyond %d" % (20 * n)]
        await store.park(lane, [parcel(store.now_upper_ms() + n * DAY_MS, key=b"new %d" % n)], cancels)
        await store.park(lane, [parcel(store.now_upper_ms() + n * DAY_MS)], [])
        for size in (3, 30):
            rows = await lane.claimers[0].claim(30, ROOM)
            assert len(rows) == size and all((due.attempts > 0) == (size == 3) for due in rows)
            await lane.claimers[0].settle(rows[1:-1], [(rows[0], WHY), (rows[-1], WHY)])
        await lane.scan()
    while lane.sleep_hint() == 0.0:
        await lane.claimers[0].settle(await lane.claimers[0].claim(1000, ROOM), [])
    for _ in range(TIMES):
        assert await lane.claimers[0].claim(1000, ROOM) == []


async def plans_made(url: str) -> dict[str, dict[str, tuple[int, int]]]:
    """After some work: by session, the statements with arguments, each with its generic and its custom plans."""
    await fill(url, FEW)
    async with opened(url, parkers=1) as store, owned(store) as [lane]:
        await work(store, lane)
        async with sessions(store, lane) as ours:
            return {
                name: {
                    row[0]: (row[1], row[2]) for row in await connection.fetch(_PREPARED, "%$1%") if row[0] != _PREPARED
                }
                for name, connection in ours.items()
            }


def custom(of_session: Mapping[str, tuple[int, int]], beginning: str) -> int:
    return sum(custom for text, (_, custom) in of_session.items() if text.startswith(beginning))


async def test_no_statement_is_planned_for_any_arguments(database: str) -> None:
    made = await plans_made(database)
    for of_session in made.values():
        assert {text: plans for text, plans in of_session.items() if plans[0]} == {}
    in_lane = (statements.CLAIM, statements.CLAIM_HELD, statements.NEXT_DUE, statements.NEXT_RETRY)
    for statement in (*in_lane, "DELETE FROM held WHERE id = ANY", statements.HOLD_AGAIN, statements.COUNT):
        assert custom(made["lane"], statement) >= TIMES, statement
    in_pool = (statements.NEXT_DUE, statements.NEXT_RETRY, CANCEL, CANCEL_HELD, statements.COUNT_PARKED)
    for statement in in_pool:
        assert custom(made["pool"], statement) >= TIMES, statement


async def shown(connection: asyncpg.Connection, *names: str) -> dict[str, str]:
    return {name: await connection.fetchval("SELECT current_setting($1)", name) for name in names}


async def test_sessions_override_the_settings_of_the_database(database: str) -> None:
    async with sql(database) as admin:
        name = await admin.fetchval("SELECT current_database()")
        for setting, value in CONTRARY.items():
            await admin.execute(f"ALTER DATABASE \"{name}\" SET {setting} = '{value}'")
    timeouts = {"idle_timeout": 7.0, "transaction_timeout": 9.0}
    async with (
        opened(database, parkers=1, **timeouts) as store,
        owned(store) as [lane],
        sessions(store, lane) as ours,
        sql(database) as other,
    ):
        plain = await pool.connect(database, "test", plain=True)
        for connection in (*ours.values(), other):
            assert await shown(connection, *PROMISED) == PROMISED
        assert await shown(plain, *PROMISED) == {**PROMISED, "statement_timeout": "0"}
        await pool.close(plain)
        assert await shown(ours["lane"], *STEERED) == dict.fromkeys(STEERED, "off")
        assert await shown(ours["pool"], *STEERED) == dict.fromkeys(STEERED, "on")
        names = ("idle_session_timeout", "idle_in_transaction_session_timeout")
        assert list((await shown(ours["lane"], *names)).values()) == ["7s", "7s"]
        assert list((await shown(ours["pool"], *names)).values()) == ["0", "9s"]


VALUES = {
    "text[]": ["a"],
    "date[]": [],
    "bytea[]": [b"a", None, b"\x00"],
    "smallint[]": [1, -2, None],
    "int[]": [1, -(1 << 31)],
    "bigint[]": [[1, 2], [3, 1 << 62]],
    "timestamptz[]": [1_795_434_299_758, None, pool.BEGINNING_MS],
}


async def test_values_survive_a_round_trip(database: str) -> None:
    async with sql(database) as connection:
        for name, value in VALUES.items():
            assert await connection.fetchval(f"SELECT $1::{name}", value) == value


async def test_a_commit_that_the_server_turns_into_a_rollback_fails(database: str) -> None:
    """Otherwise a batch would be acknowledged that nobody stored."""
    async with sql(database) as connection:
        with pytest.raises(StoreLost, match="COMMIT with ROLLBACK"):
            async with pool.transaction(connection):
                with suppress(asyncpg.DivisionByZeroError):
                    await connection.execute("SELECT 1 / 0")
        assert not connection.is_in_transaction()


async def test_a_connection_whose_transaction_stays_open_leaves_the_pool(database: str) -> None:
    """The server had ended its session, so not even its rollback was sent."""
    async with opened(database, parkers=1) as store:
        with pytest.raises(asyncpg.InterfaceError, match="its rollback"):
            async with pool.borrow(store.pool) as connection:
                first = connection.get_server_pid()
                await connection.execute("BEGIN")
                raise asyncpg.InterfaceError("its rollback failed")
        async with pool.borrow(store.pool) as connection:
            assert connection.get_server_pid() != first


async def test_an_error_after_a_cut_connection_stays_what_it_is(database: str) -> None:
    """The connection has left its pool by then."""
    async with opened(database, parkers=1) as store:
        with pytest.raises(StoreLost, match="no answer"):
            async with pool.borrow(store.pool) as connection:
                with suppress(TimeoutError):
                    async with pool.transaction(connection):
                        raise TimeoutError
                raise StoreLost("no answer")


async def test_an_inner_transaction_is_undone_alone(database: str) -> None:
    async with sql(database) as connection:
        async with pool.transaction(connection):
            await connection.execute("CREATE TABLE kept (n integer)")
            with suppress(asyncpg.DivisionByZeroError):
                async with pool.transaction(connection):
                    await connection.execute("INSERT INTO kept VALUES (1)")
                    await connection.execute("SELECT 1 / 0")
            async with pool.transaction(connection):
                await connection.execute("INSERT INTO kept VALUES (2)")
        assert await connection.fetchval("SELECT array_agg(n) FROM kept") == [2]
