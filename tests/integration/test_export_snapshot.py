"""`delayer export` writes one snapshot, also while the store changes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import asyncpg
import pytest

from delayer.cli.errors import ExitCode
from delayer.core.filters import Filter
from delayer.core.units import DAY_MS
from delayer.store import held_messages
from delayer.store.admin import exporting
from delayer.store.rows import partitions
from delayer.store.segments import catalog, restore
from tests.support.daemon import EXECUTABLE
from tests.support.rows import compact, everything, put, rows
from tests.support.store import sql

WAITING = 3_000
"""Three pages of an export, and ten times the size of a pipe."""


async def now_ms(admin: asyncpg.Connection) -> int:
    found: int = await admin.fetchval("SELECT now()")
    return found


async def fill(admin: asyncpg.Connection) -> set[int]:
    """Write rows, and one segment after them. Returns all ids."""
    due_ms = await now_ms(admin) + 100 * DAY_MS
    await put(admin, rows(WAITING, due_ms))
    await compact(admin, after_ms=due_ms + DAY_MS * 9 // 10)
    assert await admin.fetchval("SELECT count(*) FROM segment") == 1
    return set(await everything(admin))


async def _compact(admin: asyncpg.Connection) -> None:
    assert await compact(admin)


async def _restore(admin: asyncpg.Connection) -> None:
    [segment] = await catalog.list_segments(admin)
    assert await restore.restore(admin, segment.id)


async def _reschedule(admin: asyncpg.Connection) -> None:
    """Make the last messages the first."""
    last = "(SELECT id FROM message ORDER BY due_at DESC, id DESC LIMIT 400)"
    await admin.execute(f"UPDATE message SET due_at = due_at - interval '50 days' WHERE id IN {last}")


async def _release(admin: asyncpg.Connection) -> None:
    await admin.execute("DELETE FROM message")


async def hold(admin: asyncpg.Connection) -> None:
    """Hold some waiting messages between the two reads of an export, which could write them twice then."""
    columns = "id, due_at, parked_at, checksum, lane, format, route, exchange, routing_key, to_exchange, to_key,"
    columns += " properties, body, key"
    await admin.execute(
        "WITH gone AS (DELETE FROM message WHERE id % 7 = (SELECT min(id) % 7 FROM message) RETURNING *) "
        f"INSERT INTO held ({columns}, retry_at, attempts, kind, reason, may_be_delivered, isolated) "
        f"SELECT {columns}, now(), 1, 'returned', 'why', false, false FROM gone"
    )


async def _all(admin: asyncpg.Connection) -> None:
    for meanwhile in (_reschedule, _restore, hold, _compact, _release):
        await meanwhile(admin)


@pytest.mark.parametrize("meanwhile", [_compact, _restore, _reschedule, _release, hold, _all])
async def test_concurrent_changes_leave_no_message_out_of_an_export(
    database: str, meanwhile: Callable[[asyncpg.Connection], Awaitable[None]]
) -> None:
    """A page is listed at once, and fetched in portions."""
    async with sql(database) as admin:
        there = await fill(admin)
        async with exporting.snapshot(database) as reading:
            found: list[int] = []
            portions = exporting.read_portions(reading, Filter(), page_bytes=1_000)
            found += [one.checksum for one in await anext(portions)]
            await meanwhile(admin)
            async for portion in portions:
                found += [one.checksum for one in portion]
            held = [one async for portion in held_messages.read_all(reading) for one in portion]
        assert (len(found), len(held)) == (len(there), 0)
        assert len(set(found)) == len(there), "each once; their bodies differ"


async def test_partitions_stay_until_the_export_ends(database: str) -> None:
    """No snapshot has the rows of a dropped partition, and an attached day would hide rows of the default one."""
    async with sql(database) as admin:
        now = await now_ms(admin)
        today = now // DAY_MS
        assert await partitions.make(admin, today + 1, today) is partitions.PartitionResult.DONE
        await put(admin, [*rows(5, (today + 1) * DAY_MS), *rows(7, (today + 2) * DAY_MS, first_id=100)])
        async with exporting.snapshot(database) as reading:
            await reading.fetchval("SELECT count(*) FROM lane")  # the snapshot is taken, and no message is read yet
            await admin.execute("DELETE FROM message WHERE id < 100")
            with pytest.raises(asyncpg.LockNotAvailableError):
                await partitions.drop_empty(admin, partitions.name_of(today + 1))
            assert await partitions.make(admin, today + 2, today) is not partitions.PartitionResult.DONE
            found = [len(portion) async for portion in exporting.read_portions(reading, Filter())]
            assert sum(found) == 12
        assert await partitions.drop_empty(admin, partitions.name_of(today + 1))


async def test_the_last_line_counts_the_snapshot(database: str, tmp_path: Path) -> None:
    """A compaction runs while the export writes to a pipe with a slow reader."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ExitStack() as closing:
        await _export_beside_a_compaction(database, pipe, closing)


async def _export_beside_a_compaction(database: str, pipe: Path, closing: ExitStack) -> None:
    async with sql(database) as admin:
        there = await fill(admin)
        words = ("--config", os.devnull, "--store-url", database, "export", str(pipe))
        export = await asyncio.create_subprocess_exec(str(EXECUTABLE), *words, stderr=asyncio.subprocess.PIPE)
        file = await asyncio.to_thread(pipe.open, "rb")
        closing.callback(file.close)
        first = await asyncio.to_thread(file.readline)
        await admin.execute("SET idle_in_transaction_session_timeout = 0")  # This session packs segments below.
        await admin.execute("ALTER SYSTEM SET idle_in_transaction_session_timeout = '200ms'")
        await admin.execute("SELECT pg_reload_conf()")
        try:
            await asyncio.sleep(0.5)
            await compact(admin)
            lines = [first, *(await asyncio.to_thread(file.readlines))]
        finally:
            await admin.execute("ALTER SYSTEM RESET idle_in_transaction_session_timeout")
            await admin.execute("SELECT pg_reload_conf()")
        _, told = await export.communicate()
        assert (export.returncode, f"{len(there):,} messages" in told.decode()) == (ExitCode.DONE, True), told
        assert json.loads(lines[-1]) == {"v": 1, "messages": len(there)}
        assert len({json.loads(line)["body"] for line in lines[:-1]}) == len(there)


async def test_an_export_whose_reader_has_gone_ends_with_1(database: str) -> None:
    """Like every verb whose output has no reader."""
    async with sql(database) as admin:
        await put(admin, rows(WAITING, await now_ms(admin) + 100 * DAY_MS))
    line = '{ "$0" --store-url "$1" export -; echo $? >&2; } | head -c 9'
    export = await asyncio.create_subprocess_exec(
        "sh", "-c", line, str(EXECUTABLE), database, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    head, told = await export.communicate()
    assert len(head) == 9
    assert told.decode().splitlines()[-1] == str(int(ExitCode.FOUND))
    assert b"the reader closed the pipe" in told and b"Exception" not in told
