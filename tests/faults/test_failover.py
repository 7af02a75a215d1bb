"""Two daemons on one intake queue: the standby takes over when the active daemon dies, hangs, or loses its store."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.daemon import DaemonProcess
from tests.support.flow import flowing
from tests.support.ledger import Ledger
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.servers import Postgres

A_SECOND = 200
SEED = 38
HEARTBEAT = 2
"""Seconds, for daemons that hang. The shortest heartbeats would end daemons that only wait for the processor."""
SLACK = 15.0
"""Seconds for a busy machine."""
SILENT_SECONDS = 45.0
"""The promise G6: when a store is silent, the broker has all deliveries back."""


@asynccontextmanager
async def two(place: Place, **active: str) -> AsyncIterator[tuple[Ledger, DaemonProcess, DaemonProcess]]:
    """An active daemon with these extra settings, and its standby, under load."""
    heartbeat = {"BROKER__HEARTBEAT": f"{HEARTBEAT}s"}
    async with place.ledger(SEED) as ledger, place.daemon(**heartbeat, **active) as first:
        await first.ready()
        async with place.daemon(**heartbeat) as second:
            await second.event("standing by", where=lambda event: event["queue"] == "delays")
            await second.ready()
            async with flowing(ledger, A_SECOND, longest_ms=2_000):
                await ledger.until(lambda: ledger.total() > A_SECOND)
                yield ledger, first, second
            await place.ended(ledger, repeats=True)


async def took_over(second: DaemonProcess, ledger: Ledger, began: float) -> float:
    """Seconds from ``began`` until the standby took over. Messages published since arrive."""
    await second.event("standby took over", timeout=90)
    seconds = time.monotonic() - began
    print(f"the standby took over after {seconds:.1f} s")
    back = ledger.total()
    await ledger.until(lambda: ledger.total() > back + 2 * A_SECOND)
    return seconds


@pytest.mark.parametrize("mode", ["store", "native"])
async def test_the_active_daemon_dies(vhost: str, store: str, mode: str) -> None:
    place = Place(mode, vhost, store if mode == "store" else None)
    async with two(place) as (ledger, first, second):
        began = time.monotonic()
        first.signal(signal.SIGKILL)
        assert await took_over(second, ledger, began) < SLACK


@pytest.mark.parametrize("mode", ["store", "native"])
async def test_the_active_daemon_hangs(vhost: str, store: str, mode: str) -> None:
    """RabbitMQ checks once per interval, and closes a connection after two silent intervals. The first may begin just
    after the daemon's last frame."""
    place = Place(mode, vhost, store if mode == "store" else None)
    async with two(place) as (ledger, first, second):
        began = time.monotonic()
        first.signal(signal.SIGSTOP)
        assert await took_over(second, ledger, began) < 3 * HEARTBEAT + SLACK
        seen = len(first.events)
        first.signal(signal.SIGCONT)
        await first.event("standing by", after=seen)


@pytest.mark.parametrize("how", ["refused", "silent"])
async def test_the_active_daemon_loses_its_store(vhost: str, store: str, postgres: Postgres, how: str) -> None:
    """It stops consuming. The standby, whose store answers, takes over."""
    async with Proxy(postgres.port) as proxy:
        place = Place("store", vhost, store)
        via = store.replace(f":{postgres.port}/", f":{proxy.port}/")
        async with two(place, STORE__URL=via) as (ledger, first, second):
            began = time.monotonic()
            if how == "refused":
                await proxy.refuse()
            else:
                proxy.stall()
            assert await took_over(second, ledger, began) < SLACK + (SILENT_SECONDS if how == "silent" else 0)
            await first.event("consuming interrupted")
            await proxy.accept()
            proxy.resume()
