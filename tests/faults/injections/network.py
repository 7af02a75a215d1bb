"""Faults of the network between one daemon and one server. ``fault.detail`` is "broker" or "store"."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.faults.fault import Fault, Untouched
from tests.faults.fleet import Fleet
from tests.support.proxy import Proxy


def link(fleet: Fleet, fault: Fault) -> Proxy:
    daemon = fleet.daemons[fault.target]
    return daemon.broker if fault.detail == "broker" else daemon.store


async def cut(fleet: Fleet, fault: Fault) -> None:
    """Every connection is reset; new ones are let through."""
    async with _met(fleet, fault) as proxy:
        proxy.cut()


async def refused(fleet: Fleet, fault: Fault) -> None:
    """Cut, and every new connection is refused for ``seconds``."""
    async with _met(fleet, fault) as proxy:
        await proxy.refuse()
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            await proxy.accept()


async def half_open(fleet: Fleet, fault: Fault) -> None:
    """The proxy accepts connections but does not answer for ``seconds``."""
    async with _met(fleet, fault) as proxy:
        proxy.stall()
        await _healed_after(proxy, fault)


async def unheard(fleet: Fleet, fault: Fault) -> None:
    """The server acts on each request, but its answers do not arrive; then the connections are cut."""
    async with _met(fleet, fault) as proxy:
        proxy.stall(to_server=False)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            proxy.cut()
            proxy.resume()


async def delayed(fleet: Fleet, fault: Fault) -> None:
    """Everything takes a fifth of a second longer, each way."""
    async with _met(fleet, fault) as proxy:
        proxy.slow(delay=0.2)
        await _healed_after(proxy, fault)


async def throttled(fleet: Fleet, fault: Fault) -> None:
    """200 kB/s, each way of each connection."""
    async with _met(fleet, fault) as proxy:
        proxy.slow(bytes_per_second=200_000)
        await _healed_after(proxy, fault)


async def _healed_after(proxy: Proxy, fault: Fault) -> None:
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        proxy.resume()


@asynccontextmanager
async def _met(fleet: Fleet, fault: Fault) -> AsyncIterator[Proxy]:
    """The proxy of the link. Raises Untouched at the end if no connection used it before or during the block."""
    proxy = link(fleet, fault)
    there, accepted = proxy.connections, proxy.accepted
    yield proxy
    if not there and proxy.accepted == accepted:
        raise Untouched(f"daemon {fault.target + 1} had no connection to the {fault.detail}")
