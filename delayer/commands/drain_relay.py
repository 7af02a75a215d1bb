"""The connection of a drain to its broker, and how much it moves at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from delayer.broker.relay import Relay
from delayer.settings import Settings
from delayer.wire.address import Address

NAME: Final = "delayer drain"
PORTION: Final = 500
"""Messages of one transaction, or of one acknowledgement."""
HEARTBEAT: Final = 20.0


@asynccontextmanager
async def relay_of(settings: Settings) -> AsyncIterator[Relay]:
    """Closed at the end."""
    relay = Relay(Address.parse(settings.broker_url), NAME, heartbeat=HEARTBEAT)
    relay.start()
    try:
        yield relay
    finally:
        await relay.close()
