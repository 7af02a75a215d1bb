"""Checks on every new connection that the broker is the one the store belongs to (store/identity.py)."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from delayer.amqp.connection import Connection
from delayer.broker.errors import BrokerRefused, TopologyMismatch
from delayer.broker.pipelined_admin import PipelinedAdmin
from delayer.core.errors import BrokerLost, StoreLost
from delayer.core.topology import Topology
from delayer.store.postgres import PostgresStore

PATIENCE: Final = 10.0
RIGHTS: Final = "give the broker's user *configure* on delayer.store.* (docs/security.md)"


class StoreBond:
    """Rejects brokers that are not the store's, once the store is known."""

    def __init__(self) -> None:
        self._store: PostgresStore | None = None

    async def attach(self, store: PostgresStore, connection: Connection | None) -> None:
        """Check ``connection``, if open yet, and every later connection. Raises StoreLost if its broker is another
        store's, or cannot be asked."""
        if connection is not None:
            try:
                await self._check(store, connection)
            except BrokerLost as lost:
                raise StoreLost(f"the broker of the store could not be checked: {lost}") from lost
        self._store = store

    async def check(self, connection: Connection) -> None:
        """Check a new connection. Raises BrokerLost if its broker is not the store's, or cannot be asked."""
        if self._store is None:
            return
        try:
            await self._check(self._store, connection)
        except StoreLost as wrong:
            raise WrongBroker(str(wrong), wrong.advice) from wrong

    async def _check(self, store: PostgresStore, connection: Connection) -> None:
        """Raises StoreLost, BrokerLost."""
        with suppress(StoreLost):  # The daemon also works without its store, and the id seldom changes.
            await store.read_identity()
        exchange = store.identity.exchange

        async def declare() -> None:
            await admin.declare(Topology((exchange,), (), ()))

        try:
            async with PipelinedAdmin(connection, PATIENCE) as admin:
                if not await store.give_broker(declare):
                    await store.identity.check_broker(admin.exchange_exists)
        except (BrokerRefused, TopologyMismatch) as refused:
            raise StoreLost(f"the mark of the store's broker is missing: {refused}", RIGHTS) from refused


class WrongBroker(BrokerLost):
    """The broker is not the one the store belongs to. ``advice``: the next step, as an imperative."""

    def __init__(self, text: str, advice: str) -> None:
        super().__init__(text)
        self.advice = advice
