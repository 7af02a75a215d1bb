"""Segments and the daemon as its users run it: what was compacted arrives on time, once, and byte for byte."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from datetime import datetime

import asyncpg

from tests.faults.place import Place, eventually
from tests.support.daemon import EXECUTABLE
from tests.support.ledger import Ledger

MESSAGES = 1_000
OF_A_SEGMENT = 100


async def parked(place: Place, ledger: Ledger, count: int, delay_ms: int) -> None:
    """A daemon parks so many more, and stops."""
    before = await place.rows()
    async with place.daemon() as daemon:
        await daemon.ready()
        await ledger.publish(count, delay_ms=delay_ms, absolute=True)
        await eventually(place.rows, lambda rows: rows == before + count)
        assert await daemon.stop() == 0, daemon.tail()


async def status(store: str, vhost: str, *arguments: str) -> str:
    """What `delayer status` says."""
    process = await asyncio.create_subprocess_exec(
        str(EXECUTABLE), "--set", f"store.url={store}", "--set", f"broker.url={vhost}", "status", *arguments,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    return output.decode()


async def test_segments_at_the_start_arrive_on_time_and_once(vhost: str, store: str) -> None:
    """While new messages pass; those in segments are due some seconds after the start."""
    place = await Place("store", vhost, store).declare()
    async with place.ledger(1) as ledger:
        await parked(place, ledger, MESSAGES, 12_000)
        assert await place.compact(OF_A_SEGMENT) >= MESSAGES // OF_A_SEGMENT
        told = json.loads(await status(store, vhost, "--json"))["store"]["segments"]
        assert (told["messages"], told["broken"]) == (MESSAGES, 0)
        assert told["count"] >= MESSAGES // OF_A_SEGMENT
        assert f"compacted: {MESSAGES} in {told['count']} segments" in await status(store, vhost)
        async with place.daemon() as daemon:
            await daemon.ready()
            await ledger.publish(300, longest_ms=2_000)
            await ledger.all_back()
            restored = [event for event in daemon.events if event["event"] == "segment restored"]
            assert sum(event["messages"] for event in restored) == MESSAGES
            assert await daemon.stop() == 0, daemon.tail()
            [end] = [event for event in daemon.events if event["event"] == "stopped"]
            assert (end["restored"], end["broken_segments"]) == (MESSAGES, 0)
        verdict = await place.settle_accounts(ledger)
    verdict.assert_kept()
    counters = await place.conserved()
    assert counters["compacted"] == counters["restored"] == MESSAGES
    # On a machine that is busy with other things the preparations may have taken longer than the delay.
    since_ms = max(datetime.fromisoformat(event["timestamp"]).timestamp() * 1000 for event in restored)
    arrivals = [one for number in range(MESSAGES) for one in ledger.arrivals[number]]
    late = max(one.at_ms - max(one.due_ms, since_ms) for one in arrivals)
    assert late < 3_000, f"{late:.0f} ms late"


async def test_late_segments_at_once(vhost: str, store: str) -> None:
    """Every daemon was down when they were due."""
    place = await Place("store", vhost, store).declare()
    async with place.ledger(2) as ledger:
        await parked(place, ledger, MESSAGES, 3_000)
        await place.compact(OF_A_SEGMENT)
        due_ms = time.time() * 1000 + 3_000  # or sooner
        connection = await asyncpg.connect(store)
        await eventually(
            lambda: connection.fetchval("SELECT extract(epoch FROM clock_timestamp()) * 1000"),
            lambda now_ms: now_ms > due_ms + 500,
        )
        await connection.close()
        assert ledger.total() == 0
        async with place.daemon() as daemon:
            await ledger.all_back(timeout=20.0)
            assert await daemon.stop() == 0, daemon.tail()
        verdict = await place.settle_accounts(ledger)
    verdict.assert_kept()


async def test_two_daemons_share_and_the_traffic_goes_on(vhost: str, store: str) -> None:
    place = await Place("store", vhost, store).declare()
    async with place.ledger(3) as ledger, AsyncExitStack() as stack:
        await parked(place, ledger, 2 * MESSAGES, 6_000)
        made = await place.compact(OF_A_SEGMENT // 2)
        daemons = [await stack.enter_async_context(place.daemon()) for _ in range(2)]
        await asyncio.gather(*(daemon.ready() for daemon in daemons))
        await ledger.publish(1_000, longest_ms=3_000)
        await ledger.all_back()
        for daemon in daemons:  # a segment's messages may be out before it is said that it was restored
            assert await daemon.stop() == 0, daemon.tail()
        shares = [[one["segment"] for one in each.events if one["event"] == "segment restored"] for each in daemons]
        print(f"{made} segments, shared {list(map(len, shares))}")
        assert len(set(shares[0] + shares[1])) == len(shares[0] + shares[1]) == made
        verdict = await place.settle_accounts(ledger)
    verdict.assert_kept()
    await place.conserved()
