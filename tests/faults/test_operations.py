"""Steps of docs/operations.md not covered by other tests: a restored backup, and a store on a lost machine."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest

from delayer.core.readable import instant
from tests.faults.villain import held_rows
from tests.support import ports
from tests.support.place import Place, eventually
from tests.support.postgres import SUPERUSER
from tests.support.postgres_kinds import Standby
from tests.support.processes import make_directory, remove_directory
from tests.support.raw import now_ms
from tests.support.servers import Postgres

SEED = 12_000
HOLD_LATE = json.dumps([{"from": "delayer.in", "to": "delayer.out", "late_limit": "2s", "late_action": "hold"}])
pytestmark = pytest.mark.long


async def held(place: Place) -> int:
    return len(await held_rows(place))


async def run(program: Path, *words: str) -> None:
    process = await asyncio.create_subprocess_exec(str(program), *words)
    assert await process.wait() == 0, f"{program} {words}"


@pytest.mark.deadline(180)
async def test_a_restored_backup_holds_released_messages(
    vhost: str, postgres: Postgres, store: str, tmp_path: Path
) -> None:
    place = await Place("store", vhost, store).declare()
    name, dump = store.rpartition("/")[2], str(tmp_path / "delayer.dump")
    where = ["--host", ports.HOST, "--port", str(postgres.port), "--username", SUPERUSER]
    async with place.ledger(SEED) as ledger:
        async with place.working():
            await ledger.publish(300, delay_ms=15_000)
            await ledger.publish(1_000, delay_ms=60_000)
            await eventually(place.rows, lambda rows: rows == 1_300)
            await run(postgres.programs / "pg_dump", *where, "--format=custom", f"--file={dump}", name)
            await ledger.until(lambda: ledger.total() == 300)
        await asyncio.to_thread(postgres.drop_database, name)
        await run(postgres.programs / "pg_restore", *where, "--create", "--dbname=postgres", dump)
        assert await place.rows() == 1_300
        await place.delayer("db", "skip-ids")
        await asyncio.sleep(2.0)  # not to wait for anything: they are to be late
        async with place.working(ROUTE=HOLD_LATE):
            await eventually(lambda: held(place), lambda count: count == 300)
            assert ledger.total() == 300
            await place.delayer("held", "drop", "--all", "--yes")
        async with place.working():
            await ledger.all_back(timeout=90)
        (await place.settle_accounts(ledger)).assert_kept()


@pytest.mark.deadline(240)
async def test_base_backup_and_archived_wal_bring_the_backlog_back(vhost: str) -> None:
    """Messages released after the end of the archive are held, not sent again. Messages that became late during the
    outage are also held."""
    directory = make_directory()
    wal = directory / "wal"
    wal.mkdir()
    wal.chmod(0o777)
    archiving = {"archive_mode": "on", "archive_command": f"cp %p {wal}/%f", "wal_level": "replica"}
    postgres = Postgres(settings=archiving)
    async with AsyncExitStack() as stack:
        stack.callback(remove_directory, directory)
        stack.callback(postgres.close)
        await asyncio.to_thread(postgres.start)
        name = await asyncio.to_thread(postgres.add_store)
        place = await Place("store", vhost, postgres.url(name)).declare()
        ledger = await stack.enter_async_context(place.ledger(SEED + 1))
        daemon = await stack.enter_async_context(place.working())
        await ledger.publish(1_000, delay_ms=90_000)
        copy = Standby(postgres)
        stack.callback(copy.close)
        await asyncio.to_thread(copy.copy)
        await ledger.publish(1_000, delay_ms=90_000)
        await ledger.publish(500, delay_ms=12_000)
        await eventually(place.rows, lambda rows: rows == 2_500)
        await archive(postgres)
        await ledger.until(lambda: ledger.total() == 500)
        await asyncio.to_thread(postgres.kill)
        crash = instant(now_ms(), exact=True)
        await daemon.event("store unreachable")
        await ledger.publish(200, delay_ms=1_000, absolute=True)
        await asyncio.to_thread(copy.recover, f"cp {wal}/%f %p")
        await asyncio.to_thread(copy.start)
        assert await daemon.stop() == 0, daemon.tail()
        place = replace(place, store=copy.url(name))
        await place.delayer("db", "skip-ids")
        await asyncio.sleep(2.0)  # not to wait for anything: they are to be late
        async with place.working(ROUTE=HOLD_LATE):
            await eventually(lambda: held(place), lambda count: count == 700)
            dropped = await place.delayer("held", "drop", "--due-before", crash, "--yes")
            assert "Dropped: 500." in dropped, dropped
        await place.delayer("held", "retry", "--all", "--yes")
        async with place.working():
            await ledger.until(lambda: ledger.total() == 700)
            await ledger.all_back(timeout=120)
        (await place.settle_accounts(ledger)).assert_kept(redelivered=True)


async def archive(postgres: Postgres) -> None:
    """Wait until the archive has everything written so far."""
    connection = await asyncpg.connect(postgres.url())
    try:
        name = await connection.fetchval("SELECT pg_walfile_name(pg_switch_wal())")
        done = "SELECT last_archived_wal >= $1 FROM pg_stat_archiver"
        await eventually(lambda: connection.fetchval(done, name))
    finally:
        await connection.close()
