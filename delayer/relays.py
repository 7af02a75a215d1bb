"""The daemon's connections to its broker: one for each use, and one for isolation."""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import suppress
from typing import Final

from delayer.broker.isolation import Isolation
from delayer.broker.publisher import CONFIRM_TIMEOUT
from delayer.broker.relay import Relay
from delayer.core.errors import BrokerLost
from delayer.settings import Settings
from delayer.store.lane_locks import broker_mark
from delayer.wire.address import Address

MEETING: Final = 1.0
"""Seconds that the store waits for the broker at the start."""


class Relays:
    """By their uses: ``intake``, ``due``, ``publish``, and ``takeover`` where something is taken over."""

    def __init__(self, settings: Settings) -> None:
        address = Address.parse(settings.broker_url)
        self._vhost, self._cluster = address.vhost, ""
        heartbeat = settings.broker.heartbeat_ms / 1000
        self._relays = {
            use: Relay(address, f"delayer {use}", heartbeat=heartbeat)
            for use in ("intake", "due", "publish", *(["takeover"] if settings.takeovers else []))
        }
        self.isolation = Isolation(self._relays["publish"], timeout=CONFIRM_TIMEOUT)

    def __getitem__(self, use: str) -> Relay:
        return self._relays[use]

    def __contains__(self, use: str) -> bool:
        return use in self._relays

    def start(self) -> None:
        """Connect, and stay so."""
        for relay in self._relays.values():
            relay.start()

    def closings(self) -> list[Coroutine[None, None, None]]:
        """To be waited for together: a broker that hangs answers no goodbye."""
        self.isolation.close()
        return [relay.close() for relay in self._relays.values()]

    async def meet_broker(self) -> None:
        """Lanes say whose messages are in them, if that is known when they are taken; waiting for longer would keep
        those that are due from being looked at, and a broker that is away from being told."""
        with suppress(BrokerLost):
            await self._relays["publish"].connection(MEETING)

    def broker_mark(self) -> str:
        """Which broker this is, as far as it was ever reached (lane_locks.py)."""
        relays = [relay.current for relay in self._relays.values()]
        cluster = next((connection.cluster for connection in relays if connection is not None), self._cluster)
        self._cluster = cluster
        return broker_mark(cluster, self._vhost)

    def reaching(self) -> bool:
        """Whether any of them is connected."""
        return any(relay.current is not None for relay in self._relays.values())

    def connected(self) -> bool:
        """Whether all of them are."""
        return all(relay.current is not None for relay in self._relays.values())

    def blocked(self) -> bool:
        """Whether the broker takes no publishes on one of them."""
        return any(relay.current is not None and relay.current.blocked for relay in self._relays.values())

    def as_dict(self) -> dict[str, dict[str, int]]:
        """How they stand: connected, blocked, and how often they were made."""
        return {
            use: {
                "connected": relay.current is not None,
                "blocked": relay.current is not None and relay.current.blocked,
                "connects": relay.connects,
            }
            for use, relay in self._relays.items()
        }
