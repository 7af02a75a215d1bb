"""Daemons that hang, connections that are ended under them, and things deleted under them: while messages pass."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from contextlib import AsyncExitStack

import aio_pika
import pytest

from delayer.store import pool
from tests.faults.place import Place, eventually
from tests.support.daemon import DaemonProcess

SEED = 4_000


async def end_connections(store: str, application: str) -> int:
    """End the server's processes behind these connections (a LIKE pattern); how many there were."""
    connection = await pool.connect(store, "test")
    try:
        ended: int = await connection.fetchval(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
            " WHERE application_name LIKE $1 AND datname = current_database()",
            application,
        )
        return ended
    finally:
        await pool.close(connection)


async def _lanes(*daemons: DaemonProcess) -> list[set[int]]:
    """The lanes of each, by its log."""

    def said(daemon: DaemonProcess, event: str) -> Counter[int]:
        return Counter(one["lane"] for one in daemon.events if one["event"] == event)

    return [set(said(daemon, "lane taken") - said(daemon, "lane dropped")) for daemon in daemons]


async def test_a_daemon_that_hangs_loses_its_lanes_and_notices(vhost: str, store: str) -> None:
    """Stopped for longer than its lanes live, while another runs: that one takes and releases them."""
    place = await Place("store", vhost, store).declare()
    async with place.ledger(SEED) as ledger, AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(place.daemon()) for _ in range(2)]
        await asyncio.gather(first.ready(), second.ready())
        owned, _ = await eventually(lambda: _lanes(first, second), lambda both: len(both[0]) == len(both[1]) == 2)
        await ledger.publish(2_000, delay_ms=4_000)
        await eventually(place.rows, lambda rows: rows > 1_500)
        before = len(second.events)
        first.signal(signal.SIGSTOP)
        adopted = await second.event("lane taken", after=before, where=lambda event: event["lane"] in owned)
        first.signal(signal.SIGCONT)
        lost = await first.event("lane lost")
        assert {adopted["lane"], lost["lane"]} <= owned
        await ledger.all_back()
        await first.event("lane taken", after=first.events.index(lost))
        assert [await first.stop(), await second.stop()] == [0, 0]
        verdict = await place.settle_accounts(ledger)
    print(verdict, await place.conserved())
    verdict.assert_kept(repeats=True)


@pytest.mark.parametrize("application", ["delayer lane%", "delayer park"])
async def test_connections_to_the_store_are_ended_under_load(vhost: str, store: str, application: str) -> None:
    place = await Place("store", vhost, store).declare()
    async with place.ledger(SEED + 1) as ledger, place.daemon() as daemon:
        await daemon.ready()
        publishing = asyncio.create_task(ledger.publish(6_000, longest_ms=2_000))
        for share in (1, 2, 3):
            await ledger.until(lambda share=share: len(ledger.arrivals) > share * 1_000)
            # Those that were ended a moment ago may not be back yet.
            assert await eventually(lambda: end_connections(store, application), lambda ended: ended > 0)
        await publishing
        await ledger.all_back()
        assert await daemon.stop() == 0
        verdict = await place.settle_accounts(ledger)
    counters = await place.conserved()
    print(application, verdict, counters)
    verdict.assert_kept(repeats=True)
    assert counters["parked"] == counters["released"]


async def test_the_destination_exchange_is_deleted_in_flight(vhost: str, store: str) -> None:
    """The broker closes the publishing channel: what was in flight waits in held, and goes out when there is an
    exchange again."""
    place = await Place("store", vhost, store).declare()
    async with place.ledger(SEED + 2) as ledger, place.daemon() as daemon:
        await daemon.ready()
        await ledger.publish(2_000, longest_ms=3_000)
        await ledger.until(lambda: len(ledger.arrivals) > 500)
        async with await aio_pika.connect(vhost) as connection:
            await (await connection.channel()).exchange_delete("delayer.out")
        held = await daemon.event("message held")
        assert "404" in held["reason"]
        await ledger.declare()
        await ledger.all_back()
        await eventually(place.rows, lambda rows: rows == 0)
        assert await daemon.stop() == 0
        verdict = await place.settle_accounts(ledger)
    counters = await place.conserved()
    print(verdict, counters)
    verdict.assert_kept(repeats=True)
    assert counters["held"] == 0
    assert counters["parked"] == counters["released"]


@pytest.mark.parametrize("mode", ["store", "native"])
async def test_the_intake_queue_is_deleted(mode: str, vhost: str, store: str) -> None:
    """The broker cancels the consumer; the daemon declares the queue again and goes on."""
    place = await Place(mode, vhost, store if mode == "store" else None).declare()
    async with place.ledger(SEED + 3) as ledger, place.daemon() as daemon:
        await daemon.ready()
        await ledger.publish(500, longest_ms=500)
        await ledger.all_back()
        async with await aio_pika.connect(vhost) as connection:
            await (await connection.channel()).queue_delete("delays")
        cancelled = await daemon.event("consumer cancelled by the broker")
        await daemon.event("consuming", after=daemon.events.index(cancelled))
        await ledger.publish(500, longest_ms=500)
        await ledger.all_back()
        assert await daemon.stop() == 0
        verdict = await place.settle_accounts(ledger)
    verdict.assert_kept(repeats=True)
