"""Checks on every new connection that the broker is the one the store belongs to (store/identity.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Final
from weakref import WeakKeyDictionary

import structlog

from delayer.amqp.connection import Connection
from delayer.amqp.errors import BrokerLost
from delayer.broker.errors import BrokerRefused, TopologyMismatch
from delayer.broker.pipelined_admin import PipelinedAdmin
from delayer.core.errors import StoreLost
from delayer.core.topology import Topology
from delayer.store.postgres import PostgresStore

log = structlog.get_logger(__name__)

PATIENCE: Final = 10.0
IDENTITY_SECONDS: Final = 1.0
"""How long a new connection waits for the store's id. A store that hangs must not keep the daemon off the broker."""
DELETED: Final = "find out what deletes them: an operator, or a policy with `expires` (rabbitmqctl list_policies)"
RIGHTS: Final = "give the broker's user *configure* on delayer.store.* (docs/security.md)"


class StoreBond:
    """Rejects brokers that are not the store's, once the store is known."""

    def __init__(self) -> None:
        self._store: PostgresStore | None = None
        self._passed: WeakKeyDictionary[Connection, str] = WeakKeyDictionary()  # And the store's id at the time.

    async def attach(self, store: PostgresStore, connections: Iterable[Connection]) -> None:
        """Check the open connections, and every later one. Raises StoreLost if a broker is another store's, or cannot
        be asked; then later ones are checked as before."""
        last, self._store = self._store, store  # First, because connections may open while this runs.
        try:
            for connection in connections:
                await self._check(store, connection)
            last = store
        except BrokerLost as lost:
            raise StoreLost(f"the broker of the store could not be checked: {lost}") from lost
        finally:
            self._store = last

    async def check(self, connection: Connection) -> None:
        """Check a connection. If it passed before, restore an exchange that was deleted since. Raises BrokerLost if its
        broker is not the store's, or cannot be asked."""
        if self._store is None:
            return
        try:
            await self._check(self._store, connection)
        except StoreLost as wrong:
            raise WrongBroker(str(wrong), advice=wrong.advice) from wrong

    async def _check(self, store: PostgresStore, connection: Connection) -> None:
        """Raises StoreLost, BrokerLost."""
        # The daemon also works without its store, and the id seldom changes.
        with suppress(StoreLost, TimeoutError):
            async with asyncio.timeout(IDENTITY_SECONDS):
                await store.read_identity()
        exchange = store.identity.exchange

        async def declare() -> None:
            await admin.declare(Topology((exchange,), (), ()))

        try:
            async with PipelinedAdmin(connection, PATIENCE) as admin:
                if self._passed.get(connection) == store.identity.id:
                    if not await admin.exchange_exists(exchange.name):
                        await declare()
                        log.warning("topology restored", parts=f"exchange {exchange.name}", next_step=DELETED)
                elif not await store.give_broker(declare):
                    await store.identity.check_broker(admin.exchange_exists)
                self._passed[connection] = store.identity.id
        except (BrokerRefused, TopologyMismatch) as refused:
            raise StoreLost(f"the mark of the store's broker is missing: {refused}", RIGHTS) from refused


class WrongBroker(BrokerLost):
    """The broker is not the one the store belongs to."""
