"""Postgres in trouble of its own: a standby that is not promoted yet, and settings of somebody else."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import asyncpg

from delayer.store import pool
from tests.faults.place import Place, eventually
from tests.faults.scenes import add_template
from tests.support.postgres_kinds import Standby
from tests.support.proxy import Proxy
from tests.support.servers import Postgres, RabbitMQ

SEED = 9_000
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
        place.store = standby.url("store")
        await place.ended(ledger, repeats=True)


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
        ended = await end_connections(store)
        assert ended > place.lanes, "every lane has a session, and the parks have some"
        assert await refusals(store) == {asyncpg.ReadOnlySQLTransactionError, asyncpg.QueryCanceledError}
        await ledger.publish(3_000, longest_ms=2_000)
        await ledger.all_back()
        assert await daemon.stop() == 0, daemon.tail()
        await asyncio.to_thread(postgres.execute, f'ALTER DATABASE "{database}" RESET ALL')
        await place.ended(ledger, repeats=True)


async def end_connections(store: str) -> int:
    """End the server's processes behind our connections; how many there were."""
    connection = await pool.connect(store, "test")
    try:
        ended: int = await connection.fetchval(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
            " WHERE application_name LIKE 'delayer%' AND datname = current_database()"
        )
        return ended
    finally:
        await pool.close(connection)


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
