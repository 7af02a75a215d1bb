"""Faults of the network between one daemon and one server. ``fault.detail`` is "broker" or "store"."""

from __future__ import annotations

import asyncio

from tests.faults.fault import Fault
from tests.faults.fleet import Fleet
from tests.rig.proxy import Proxy


def link(fleet: Fleet, fault: Fault) -> Proxy:
    daemon = fleet.daemons[fault.target]
    return daemon.broker if fault.detail == "broker" else daemon.store


async def cut(fleet: Fleet, fault: Fault) -> None:
    """Every connection is reset; new ones are let through."""
    link(fleet, fault).cut()


async def refused(fleet: Fleet, fault: Fault) -> None:
    """Cut, and nobody listens there for ``seconds``."""
    proxy = link(fleet, fault)
    await proxy.refuse()
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        await proxy.accept()


async def half_open(fleet: Fleet, fault: Fault) -> None:
    """Accepted and never answered, for ``seconds``."""
    link(fleet, fault).stall()
    await _healed_after(fleet, fault)


async def unheard(fleet: Fleet, fault: Fault) -> None:
    """What is asked for happens, and nobody hears of it; then the connections are cut."""
    link(fleet, fault).stall(to_server=False)
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        link(fleet, fault).cut()
        link(fleet, fault).resume()


async def delayed(fleet: Fleet, fault: Fault) -> None:
    """Everything takes a fifth of a second longer, each way."""
    link(fleet, fault).slow(delay=0.2)
    await _healed_after(fleet, fault)


async def throttled(fleet: Fleet, fault: Fault) -> None:
    """200 kB/s, each way of each connection."""
    link(fleet, fault).slow(bytes_per_second=200_000)
    await _healed_after(fleet, fault)


async def _healed_after(fleet: Fleet, fault: Fault) -> None:
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        link(fleet, fault).resume()
