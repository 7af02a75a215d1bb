"""Declaring by the connection that says in detail what the broker has against it."""

from __future__ import annotations

from delayer.broker.admin import Admin
from delayer.broker.errors import BrokerRefused
from delayer.core.errors import BrokerLost
from delayer.core.topology import Topology


async def connect_admin(url: str) -> Admin:
    """Raises BrokerLost."""
    try:
        return await Admin.connect(url)
    except BrokerRefused as refused:
        raise BrokerLost(str(refused)) from refused


async def declare_in_detail(url: str, topology: Topology) -> None:
    """Something is not as it should be: to hear what, and to declare the rest. Raises BrokerLost, TopologyMismatch."""
    admin = await connect_admin(url)
    try:
        await admin.declare(topology)
    finally:
        await admin.close()
