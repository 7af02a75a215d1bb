"""Handing a lane over, while one of the two is killed or freezes: at each step the lane comes to a living daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from delayer.store.postgres import PostgresStore
from tests.conformance.store_contract import MANY, owned, parcel, release_all
from tests.faults.place import eventually
from tests.integration.test_store_lane import opened

PROGRAM = """
import asyncio, sys
from delayer.store.postgres import PostgresStore

async def main(url, role):
    store = await PostgresStore.connect(url)
    if role == "asker":
        [lane] = await store.own_lanes(1)
        print("owns", flush=True)
    else:
        [lane] = await store.adopt(1)
        print("adopted", flush=True)
        while not await store.wanted([lane.number]):
            await asyncio.sleep(0.01)
        print("asked", flush=True)
        if role == "giver":
            await lane.release()
            print("gave", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""
TAKES_SECONDS = 15.0
"""Longer than any timeout; without one it would be for ever."""
ENDS = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])


@asynccontextmanager
async def child(url: str, role: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, url, role, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def said(process: asyncio.subprocess.Process, word: bytes) -> None:
    assert process.stdout is not None
    while word not in (line := await process.stdout.readline()):
        assert line, "it ended"


async def with_rows(store: PostgresStore) -> int:
    """A lane with something due soon, and without an owner."""
    async with owned(store) as [lane]:
        await store.park(lane, [parcel(store.now_ms() + 60_000)], [])
        return lane.number


async def comes_to(store: PostgresStore, number: int) -> None:
    """A living daemon can adopt it."""
    [lane] = await eventually(lambda: store.adopt(MANY), bool, timeout=TAKES_SECONDS)
    assert lane.number == number
    await release_all(lane)
    await lane.release()


@ENDS
async def test_the_asker_ends_before_the_lane_is_let_go(database: str, number: signal.Signals) -> None:
    async with opened(database) as store:
        lane = await with_rows(store)
        [spare] = await store.adopt(MANY)
        async with child(database, "asker") as asker:
            await eventually(lambda: store.wanted([lane]), lambda found: found == {lane})
            os.kill(asker.pid, number)
            await spare.release()
            await comes_to(store, lane)


@ENDS
async def test_the_asker_ends_with_the_lane_in_hand(database: str, number: signal.Signals) -> None:
    async with opened(database) as store:
        lane = await with_rows(store)
        [spare] = await store.adopt(MANY)
        async with child(database, "asker") as asker:
            await eventually(lambda: store.wanted([lane]), lambda found: found == {lane})
            await spare.release()
            await said(asker, b"owns")
            os.kill(asker.pid, number)
            await comes_to(store, lane)


@ENDS
async def test_the_giver_ends_before_it_lets_go(database: str, number: signal.Signals) -> None:
    """Whoever asks has a lane within seconds, this one or a new one; and this one is not lost to the others."""
    async with opened(database) as store, opened(database) as newcomer:
        lane = await with_rows(store)
        async with child(database, "hesitant") as giver:
            await said(giver, b"adopted")
            asking = asyncio.create_task(newcomer.own_lanes(1))
            await said(giver, b"asked")
            os.kill(giver.pid, number)
            async with asyncio.timeout(TAKES_SECONDS):
                [own] = await asking
            if number == signal.SIGKILL:
                assert own.number == lane
            if own.number != lane:
                await comes_to(store, lane)
            await own.release()


@ENDS
async def test_the_giver_ends_after_it_let_go(database: str, number: signal.Signals) -> None:
    async with opened(database) as store, opened(database) as newcomer:
        lane = await with_rows(store)
        async with child(database, "giver") as giver:
            await said(giver, b"adopted")
            asking = asyncio.create_task(newcomer.own_lanes(1))
            await said(giver, b"gave")
            os.kill(giver.pid, number)
            [own] = await asking
            assert own.number == lane
            await own.release()
