"""Postgres: failover, backup and restore, a full disk, and the recovery of a backlog whose server is gone."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import asyncpg

from delayer.amqp.reading import iso
from tests.faults.place import eventually
from tests.runbooks.desk import NOT_OK, Desk
from tests.support.flow import flowing
from tests.support.postgres_kinds import SmallDisk, Standby
from tests.support.proxy import Proxy
from tests.support.servers import Postgres, RabbitMQ


async def postgres_failover(desk: Desk) -> None:
    """The primary dies under 300 messages a second; the standby, which confirmed every commit, is promoted."""
    broker, primary = RabbitMQ(), Postgres()
    await desk.server(broker)
    await desk.server(primary)
    primary.add_database("delayer")
    address = await desk.stack.enter_async_context(Proxy(primary.port))
    url = primary.url("delayer", port=address.port)
    desk.configure(broker.url(), url)
    await desk.quietly("db", "upgrade")
    standby = Standby(primary)
    await desk.server(standby)
    await asyncio.to_thread(primary.execute, "ALTER SYSTEM SET synchronous_standby_names = '*'")
    await asyncio.to_thread(primary.execute, "SELECT pg_reload_conf()")
    ledger = await desk.ledger(broker.url())
    await desk.begin()
    async with flowing(ledger, 300, longest_ms=4_000):
        await ledger.until(lambda: ledger.total() > 1_000, timeout=120)
        desk.notes.step("300 messages a second flow; SIGKILL to every process of the primary")
        desk.mark()
        await asyncio.to_thread(primary.kill)
        await desk.event("lane lost")
        await desk.event("store unreachable")
        await desk.delayer("status", expect=3, show="out of reach")
        await asyncio.to_thread(standby.promote)
        desk.notes.step("SELECT pg_promote() on the standby; then the address leads there")
        back = ledger.total()
        desk.mark()
        address.lead_to(standby.port)
        await desk.event("lane taken")
        await ledger.until(lambda: ledger.total() > back + 1_000, timeout=120)
        desk.notes.step("messages come out again")
        await desk.delayer("check", show=NOT_OK)
    await ledger.all_back(timeout=120)
    await desk.end()
    desk.balance(ledger, repeats=True)


async def backup_and_restore(desk: Desk) -> None:
    """A dump beside the running daemon; the database is lost afterwards, and comes back from the dump."""
    broker, postgres = RabbitMQ(), Postgres()
    await desk.server(broker)
    await desk.server(postgres)
    postgres.add_database("delayer")
    late = {"late_limit": "3s", "late_action": "hold"}
    desk.configure(broker.url(), postgres.url("delayer"))
    await desk.quietly("db", "upgrade")
    ledger = await desk.ledger(broker.url())
    await desk.begin()
    await ledger.publish(300, delay_ms=30_000)
    await ledger.publish(2_000, delay_ms=90_000)
    await eventually(lambda: waiting(desk), lambda count: count == 2_300, timeout=120)
    dump, programs = desk.directory / "delayer.dump", postgres.programs
    where = ["--host", "127.0.0.1", "--port", str(postgres.port), "--username", "postgres"]
    await desk.run(
        programs / "pg_dump", *where, "--format=custom", f"--file={dump}", "delayer",
        shown="pg_dump --format=custom --file=delayer.dump delayer",
    )  # fmt: skip
    desk.notes.seen(f"2,300 messages waited; {dump.stat().st_size / 1024:,.0f} kB")
    await ledger.until(lambda: ledger.total() == 300, timeout=120)
    desk.notes.step("300 of them were released since the backup")
    await desk.end()
    await asyncio.to_thread(postgres.drop_database, "delayer")
    desk.notes.step("the database is lost, and made again")
    await desk.run(
        programs / "pg_restore", *where, "--create", "--dbname=postgres", str(dump),
        shown="pg_restore --create --dbname=postgres delayer.dump",
    )  # fmt: skip
    await eventually(lambda: waiting(desk), lambda count: count == 2_300, timeout=120)
    await desk.delayer("status", show="parked")
    await desk.delayer("db", "skip-ids")
    desk.configure(broker.url(), postgres.url("delayer"), route=late)
    desk.notes.step('late_limit = "3s", late_action = "hold" in the route: what was due before is held')
    await desk.begin()
    await eventually(lambda: held(desk), lambda count: count == 300, timeout=120)
    await desk.delayer("held", "list", "--limit", "1")
    assert ledger.total() == 300
    await desk.delayer("held", "drop", "--all", "--yes")
    await ledger.all_back(timeout=120)
    await desk.end()
    desk.balance(ledger)


async def disaster_recovery(desk: Desk) -> None:
    """The machine of the store is gone: base backup and archived WAL bring the backlog back to the archive's end. What
    was released since then is held instead of sent again, and beside it what became late during the outage."""
    broker, postgres = RabbitMQ(), Postgres(settings=archiving(desk.directory))
    (desk.directory / "wal").mkdir()
    desk.directory.chmod(0o755)
    (desk.directory / "wal").chmod(0o777)
    ledger = await desk.installed(broker, postgres)
    await ledger.publish(1_000, delay_ms=150_000)
    copy = Standby(postgres)
    desk.stack.callback(copy.close)
    await asyncio.to_thread(copy.copy)
    desk.notes.step("$ pg_basebackup --pgdata=/backup/base --checkpoint=fast   (1,000 messages waited)")
    await ledger.publish(1_000, delay_ms=150_000)
    await ledger.publish(500, delay_ms=12_000)
    await eventually(lambda: waiting(desk), lambda count: count == 2_500, timeout=120)
    await archive(postgres)
    desk.notes.step("1,500 more are parked, and the WAL that says so is archived")
    await ledger.until(lambda: ledger.total() == 500, timeout=120)
    desk.mark()
    await asyncio.to_thread(postgres.kill)
    crash = iso(time.time_ns() // 1_000_000)
    desk.notes.step(
        f"500 of them are released; before the WAL that says so is archived the machine is gone, at {crash}"
    )
    await desk.event("store unreachable")
    await ledger.publish(200, delay_ms=100, absolute=True)
    desk.notes.step("200 messages come in meanwhile: they wait in `delays`")
    await asyncio.to_thread(copy.recover, f"cp {desk.directory}/wal/%f %p")
    await asyncio.to_thread(copy.start)
    desk.notes.step("Postgres is started on the copy, with restore_command and recovery.signal; it is the primary now")
    await desk.end()
    late = {"late_limit": "2s", "late_action": "hold"}
    desk.configure(broker.url(), copy.url(), route=late)
    await desk.delayer("status", show="parked")
    await desk.delayer("db", "skip-ids")
    await desk.begin()
    desk.notes.step('store.url names the new server; late_limit = "2s", late_action = "hold"; the daemon is started')
    await eventually(lambda: held(desk), lambda count: count == 700, timeout=120)
    await desk.delayer("held", "list", "--limit", "1")
    dropped = await desk.delayer("held", "drop", "--due-before", crash, "--yes")
    assert "Dropped: 500." in dropped, dropped
    await desk.delayer("held", "retry", "--all", "--yes")
    desk.configure(broker.url(), copy.url())
    desk.reload()
    await desk.event("reloaded")
    await ledger.until(lambda: ledger.total() == 700, timeout=120)
    await desk.delayer("audit", show="✓|✗|rule", lines=8)
    await ledger.all_back(timeout=200)
    await desk.end()
    desk.balance(ledger)


async def disk_full(desk: Desk) -> None:
    """Somebody else's file fills the disk that Postgres writes to, and is removed half a minute later."""
    broker, postgres = RabbitMQ(), SmallDisk(220)
    ledger = await desk.installed(broker, postgres)

    async def queued() -> int:
        status = await desk.quietly("status", "--json", expect=None)
        return int(json.loads(status)["broker"]["queues"]["delays"])

    async with flowing(ledger, 300, longest_ms=8_000):
        await ledger.until(lambda: ledger.total() > 1_000, timeout=120)
        desk.notes.step("300 messages a second flow; the disk is filled to the last byte")
        desk.mark()
        await asyncio.to_thread(postgres.fill)
        await desk.event("consuming interrupted")
        await eventually(queued, lambda count: count > 4_000, timeout=120)
        await desk.delayer("status", expect=None, lines=6)
        said = [line.partition("]")[2].strip() for line in postgres.log().splitlines() if "No space left" in line]
        desk.notes.step(f"Postgres's log, {len(said)} times:")
        desk.notes.seen(said[0])
        await asyncio.to_thread(postgres.free)
        if postgres.answers():
            desk.notes.step("the file is removed; Postgres is still up")
        else:
            await asyncio.to_thread(postgres.kill)
            await asyncio.to_thread(postgres.start)
            desk.notes.step("the file is removed; Postgres had ended, and is started again")
        at = ledger.total()
        await ledger.until(lambda: ledger.total() > at + 4_000, timeout=120)
        desk.notes.step("messages come out again")
        await desk.delayer("check", show=NOT_OK)
    await ledger.all_back(timeout=120)
    await desk.end()
    desk.balance(ledger, repeats=True)


async def waiting(desk: Desk) -> int:
    return int(json.loads(await desk.quietly("status", "--json"))["store"]["waiting"])


async def held(desk: Desk) -> int:
    return int(json.loads(await desk.quietly("status", "--json"))["store"]["held"])


def archiving(directory: Path) -> dict[str, str | int]:
    return {"archive_mode": "on", "archive_command": f"cp %p {directory}/wal/%f", "wal_level": "replica"}


async def archive(postgres: Postgres) -> None:
    """Everything that was written so far is in the archive."""
    connection = await asyncpg.connect(postgres.url())
    try:
        name = await connection.fetchval("SELECT pg_walfile_name(pg_switch_wal())")
        done = "SELECT last_archived_wal >= $1 FROM pg_stat_archiver"
        await eventually(lambda: connection.fetchval(done, name), bool, timeout=120)
    finally:
        await connection.close()
