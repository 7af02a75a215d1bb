"""Postgres in trouble of its own: a standby that is not promoted yet, a disk that is full, and settings of somebody
else."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import asyncpg

from tests.faults.injections.store import limit_files
from tests.faults.place import Place, eventually
from tests.faults.scenes import add_template
from tests.faults.test_lane_faults import end_connections
from tests.support.postgres_kinds import SmallFiles, Standby
from tests.support.proxy import Proxy
from tests.support.servers import Postgres, RabbitMQ

SEED = 9_000
LIMIT = (1 << 20) + 8192
"""A little more than a file of its WAL has."""
CONTRARY = {
    "default_transaction_read_only": "on",
    "statement_timeout": "1ms",
    "synchronous_commit": "off",
    "default_transaction_isolation": "serializable",
    "idle_in_transaction_session_timeout": "200ms",
    "idle_session_timeout": "400ms",
    "lock_timeout": "100ms",
    "bytea_output": "escape",
    "DateStyle": "German",
    "TimeZone": "Australia/Lord_Howe",
}
"""What an operator may have set for a database, for whatever reason of his own."""


async def test_a_read_only_standby_until_it_is_promoted(rabbitmq: RabbitMQ, vhost: str) -> None:
    """The address leads to the standby before it may be written: nothing is parked, nothing released, nothing lost."""
    async with AsyncExitStack() as stack:
        primary = Postgres()
        stack.callback(primary.close)
        await asyncio.to_thread(primary.start)
        await asyncio.to_thread(add_template, primary, "store")
        standby = Standby(primary)
        stack.callback(standby.close)
        await asyncio.to_thread(standby.start)
        proxy = await stack.enter_async_context(Proxy(primary.port))
        place = await Place(
            "store", vhost, primary.url("store"), via_store=primary.url("store", port=proxy.port)
        ).declare()
        ledger = await stack.enter_async_context(place.ledger(SEED))
        daemon = await stack.enter_async_context(place.daemon())
        await daemon.ready()
        await ledger.publish(2_000, delay_ms=4_000)
        await eventually(place.rows, lambda rows: rows == 2_000)
        await place.ready(0)
        await proxy.refuse()

        async def follows() -> bool:
            return await asyncio.to_thread(standby.follows)

        await eventually(follows, bool)
        await asyncio.to_thread(primary.kill)
        proxy.lead_to(standby.port)
        await proxy.accept()
        await ledger.publish(500, delay_ms=500)
        await daemon.event("store unreachable", where=lambda one: "ReadOnly" in one["reason"])
        await eventually(lambda: place.depth("delays"), lambda depth: depth == 500)
        assert ledger.total() == 0
        await asyncio.to_thread(standby.promote)
        await ledger.all_back()
        place.store = standby.url("store")
        assert await daemon.stop() == 0
        verdict = await place.settle_accounts(ledger)
        counters = await place.conserved()
    print(verdict, counters)
    verdict.assert_kept(repeats=True)
    assert counters["parked"] == counters["released"]


async def test_a_full_disk(rabbitmq: RabbitMQ, vhost: str) -> None:
    """No table can grow: parking fails and the deliveries are given back, releasing goes on, which needs no room; and
    when there is room again, all of it."""
    async with AsyncExitStack() as stack:
        postgres = SmallFiles()
        stack.callback(postgres.close)
        await asyncio.to_thread(postgres.start)
        await asyncio.to_thread(add_template, postgres, "store")
        place = await Place("store", vhost, postgres.url("store")).declare()
        ledger = await stack.enter_async_context(place.ledger(SEED + 1))
        daemon = await stack.enter_async_context(place.daemon())
        await daemon.ready()
        await ledger.publish(6_000, delay_ms=6_000)
        await eventually(place.rows, lambda rows: rows == 6_000)
        await asyncio.to_thread(limit_files, postgres, LIMIT)
        await ledger.publish(2_000, delay_ms=6_000)
        interrupted = await daemon.event("consuming interrupted")
        assert "File too large" in interrupted["reason"]
        await ledger.until(lambda: ledger.total() >= 6_000)
        await asyncio.to_thread(limit_files, postgres, None)
        await ledger.all_back()
        assert await daemon.stop() == 0
        verdict = await place.settle_accounts(ledger)
        counters = await place.conserved()
    print(verdict, counters)
    verdict.assert_kept(repeats=True)
    assert counters["parked"] == counters["released"]


async def test_settings_of_the_database_have_no_effect(
    rabbitmq: RabbitMQ, vhost: str, postgres: Postgres, store: str
) -> None:
    """It is set while messages pass, and every session begins again: they pass as before. Somebody else, who says
    nothing of it, may only read now, and is cancelled after a millisecond."""
    place = await Place("store", vhost, store).declare()
    database = urlsplit(store).path.lstrip("/")
    async with place.ledger(SEED + 2) as ledger, place.daemon() as daemon:
        await daemon.ready()
        await ledger.publish(1_000, longest_ms=3_000)
        for name, value in CONTRARY.items():
            await asyncio.to_thread(postgres.execute, f"ALTER DATABASE \"{database}\" SET {name} = '{value}'")
        ended = await end_connections(store, "delayer%")
        assert ended > place.lanes, "every lane has a session, and the parks have some"
        assert await refusals(store) == {asyncpg.ReadOnlySQLTransactionError, asyncpg.QueryCanceledError}
        await ledger.publish(3_000, longest_ms=2_000)
        await ledger.all_back()
        assert await daemon.stop() == 0, daemon.tail()
        await asyncio.to_thread(postgres.execute, f'ALTER DATABASE "{database}" RESET ALL')
        verdict = await place.settle_accounts(ledger)
        counters = await place.conserved()
    print(verdict, counters)
    verdict.assert_kept(repeats=True)
    assert counters["parked"] == counters["released"]


async def refusals(store: str) -> set[type[Exception]]:
    """How the server answers somebody else who wants to write, and who takes his time."""
    answers: set[type[Exception]] = set()
    for statement, own in (("UPDATE lane SET epoch = epoch", {"statement_timeout": "0"}), ("SELECT pg_sleep(1)", {})):
        connection = await asyncpg.connect(store, server_settings=own)
        try:
            await connection.execute(statement)
        except asyncpg.PostgresError as refused:
            answers.add(type(refused))
        finally:
            await connection.close()
    return answers
