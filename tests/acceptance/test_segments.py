"""Segments and the daemon as its users run it: what was compacted arrives on time, once, and byte for byte."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from tests.faults.place import Place, eventually
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
