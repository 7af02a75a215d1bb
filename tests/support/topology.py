"""Topologies on a broker, before a daemon or a test needs them."""

from __future__ import annotations

from delayer.broker.pipelined_admin import pipelined_admin
from delayer.core.topology import Binding, Topology


async def declare(url: str, *wanted: Topology) -> None:
    async with pipelined_admin(url, "test") as broker:
        for one in wanted:
            await broker.declare(one)


def bound(queue: str, exchange: str, key: str) -> Topology:
    """A binding alone, between an exchange and a queue that exist."""
    return Topology(bindings=(Binding(exchange, queue, "queue", key),))
