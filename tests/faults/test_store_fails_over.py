"""Problems of Postgres itself: a standby that is not promoted yet, and a full disk."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress

import asyncpg
import pytest

from delayer.core.errors import StoreLost
from delayer.store import servers
from tests.support.flow import flowing
from tests.support.ledger import Ledger
from tests.support.place import Place, eventually
from tests.support.postgres_kinds import SmallDisk, Standby
from tests.support.proxy import Proxy
from tests.support.servers import Postgres, RabbitMQ, StartFailed
from tests.support.sql_ledger import SqlLedger
from tests.support.verdict import Window

SEED = 9_000
MEGABYTES = 200
A_SECOND = 500
LONGEST_MS = 6_000
SOMEBODY_ELSE = "SELECT pg_logical_emit_message(false, 'somebody', repeat('x', 200000))"
NO_ROOM_FOR_A_TABLE = r"ERROR:  could not extend file .*: No space left on device"
NO_ROOM_FOR_THE_WAL = r"PANIC:  could not write to file \"pg_wal/.*: No space left on device"


@pytest.mark.parametrize("kind", [Ledger, SqlLedger])
async def test_a_read_only_standby_until_it_is_promoted(rabbitmq: RabbitMQ, vhost: str, kind: type[Ledger]) -> None:
    """The address points to the standby while it is read-only: nothing is parked, released or lost. Publishers by SQL
    meet the same server, and some of their messages are still in the inbox when the primary fails."""
    async with AsyncExitStack() as stack:
        primary = Postgres()
        stack.callback(primary.close)
        await asyncio.to_thread(primary.start)
        name = await asyncio.to_thread(primary.add_store)
        standby = Standby(primary)
        stack.callback(standby.close)
        await asyncio.to_thread(standby.start)
        proxy = await stack.enter_async_context(Proxy(primary.port))
        place = await Place("store", vhost, primary.url(name), via_store=primary.url(name, port=proxy.port)).declare()
        ledger = await stack.enter_async_context(place.ledger(SEED, kind=kind))
        daemon = await stack.enter_async_context(place.working())
        await ledger.publish(2_000, delay_ms=4_000)
        await eventually(place.rows, lambda rows: rows == 2_000)
        await place.ready(0)
        await proxy.refuse()
        if isinstance(ledger, SqlLedger):
            await ledger.publish(300, delay_ms=1_000)
            assert await place.inbox() == 300

        async def follows() -> bool:
            return await asyncio.to_thread(standby.follows)

        await eventually(follows)
        await asyncio.to_thread(primary.kill)
        proxy.lead_to(standby.port)
        await proxy.accept()
        if isinstance(ledger, SqlLedger):
            ledger.store = standby.url(name)
        publishing = asyncio.create_task(ledger.publish(500, delay_ms=500))
        await daemon.event("store unreachable", where=lambda one: "during recovery" in one["reason"])
        if kind is Ledger:
            await publishing
            await eventually(lambda: place.depth("delays"), lambda depth: depth == 500)
        assert ledger.total() == 0
        with pytest.raises(StoreLost, match="expected a primary, found a standby"):  # the error of a new daemon
            await servers.check(standby.url(name))
        await asyncio.to_thread(standby.promote)
        place.store = standby.url(name)
        await publishing
        await place.ended(ledger, repeats=True)


@pytest.fixture(params=["table", "wal"])
def postgres_on_a_small_disk(request: pytest.FixtureRequest) -> Iterator[SmallDisk]:
    try:
        server = SmallDisk(MEGABYTES, scarce=request.param == "wal")
    except StartFailed as failed:
        pytest.skip(str(failed))
    try:
        yield server.start()
    finally:
        server.close()


@pytest.mark.deadline(150)
async def test_a_disk_without_room(postgres_on_a_small_disk: SmallDisk, vhost: str) -> None:
    """Parking fails, and resumes when there is room again. Without room for the WAL, Postgres stops, and stays down
    until an operator makes room and starts it. The daemon waits, and resumes by itself."""
    postgres = postgres_on_a_small_disk
    name = await asyncio.to_thread(postgres.add_store)
    place = await Place("store", vhost, postgres.url(name)).declare()
    async with place.ledger(SEED + 1) as ledger, place.daemon() as daemon:
        ledger.account.windows = []
        await daemon.ready()
        async with flowing(ledger, A_SECOND, longest_ms=LONGEST_MS):
            await ledger.until(lambda: ledger.total() > 2 * A_SECOND)
            begin_ms = time.time() * 1000
            await asyncio.to_thread(postgres.fill)
            await daemon.event("consuming interrupted")
            if postgres.scarce:
                await ended(postgres)
                assert re.search(NO_ROOM_FOR_THE_WAL, postgres.log())
                with pytest.raises(StartFailed, match="No space left on device"):
                    await asyncio.to_thread(postgres.start)
            await eventually(lambda: place.depth("delays"), lambda depth: depth > 2 * A_SECOND)
            await asyncio.to_thread(postgres.free)
            if postgres.scarce:
                await asyncio.to_thread(postgres.start)
            assert re.search(NO_ROOM_FOR_A_TABLE, postgres.log()) or postgres.scarce
            back = ledger.total()
            await ledger.until(lambda: ledger.total() > back + 4 * A_SECOND)
            ledger.account.windows.append(Window(begin_ms, time.time() * 1000))
        await place.ended(ledger, repeats=True)
        released = (await place.conserved())["released"]
        assert released == ledger.account.rows_back, "a row had two names"


async def ended(postgres: SmallDisk) -> None:
    """Wait until there is no room for the WAL. Other sessions write to it too, and store nothing."""

    async def has_ended() -> bool:
        if not postgres.ended():
            with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):  # as it ends
                await asyncio.to_thread(postgres.execute, SOMEBODY_ELSE)
        return postgres.ended()

    await eventually(has_ended)
