"""An operator's change of a schedule in a process of its own, which may die in it: ``python -m tests.support.operating
URL CHANGE NAME``, with DELAYER_FAULT."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace

import asyncpg

from delayer.core.units import MINUTE_MS
from delayer.store.admin import actions
from delayer.store.admin.detail import FoundIn
from delayer.store.schedules import changes, reading


async def operate(url: str, change: str, name: str) -> None:
    async with actions.change_connection(url, change) as connection:
        if change == "pause":
            await changes.pause(connection, name, who="operator")
        elif change == "edit":
            await changes.edit(connection, name, lambda one: replace(one, body=b"edited"), who="operator")
        elif change == "run":
            await changes.run_now(connection, name, who="operator")
        elif change == "cancel":
            await cancel_next(connection, name)
        else:
            raise ValueError(change)


async def cancel_next(connection: asyncpg.Connection, name: str) -> None:
    """Cancel the waiting occurrence. If it leaves meanwhile, cancel the one that follows."""
    found = {0: FoundIn.NOWHERE}
    while FoundIn.WAITING not in found.values():
        record = await reading.get(connection, name)
        assert record is not None and record.waiting_id is not None
        found = await actions.cancel(connection, [record.waiting_id])


async def perform(url: str, change: str, name: str, fault: str = "") -> int:
    """Let another process make the change. Return its exit code."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.operating", url, change, name, env=os.environ | {"DELAYER_FAULT": fault}
    )
    async with asyncio.timeout(MINUTE_MS / 1000):
        return await process.wait()


if __name__ == "__main__":
    asyncio.run(operate(*sys.argv[1:]))
