"""One connection of the hot path that comes back by itself. The relay's publisher and consumer stand on it."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from functools import partial
from typing import Final

import structlog

from delayer.amqp.address import Address
from delayer.amqp.connection import Connection
from delayer.core.backoff import Sparing, pause
from delayer.core.errors import BrokerLost

log = structlog.get_logger(__name__)

SETTLED: Final = 5.0
"""Seconds after which a connection counts as a success, so that the next one is tried at once."""


class Relay:
    """Keeps one connection open, from :meth:`start` to :meth:`close`."""

    def __init__(self, address: Address, name: str, *, heartbeat: float, timeout: float = 10.0) -> None:
        self._address = address
        self._name = name
        self._heartbeat = heartbeat
        self._timeout = timeout
        self._connection: Connection | None = None
        self._connected = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._others: list[Connection] = []
        self.connects = 0

    @property
    def current(self) -> Connection | None:
        """The open connection, if there is one now."""
        return self._connection

    @property
    def blocked(self) -> bool:
        """Whether the broker takes no publishes (a resource alarm). It tells a connection so when that one publishes:
        perhaps only one that :meth:`another` opened."""
        return any(one.blocked for one in self._open())

    async def unblocked(self) -> None:
        """Return when the broker takes publishes on every connection. Raises ConnectionLost."""
        for one in self._open():
            await one.unblocked

    def _open(self) -> list[Connection]:
        every = (self._connection, *self._others)
        return [one for one in every if one is not None and not one.closed.done()]

    def start(self) -> None:
        """Begin to connect, and to connect again whenever the connection is lost."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(), name=f"keep {self._name}")

    async def connection(self, timeout: float) -> Connection:
        """The open connection. Raises BrokerLost if there is none after ``timeout`` seconds.

        Raises also what ended the keeper, if anything did: without it there would never be a connection again.
        """
        if self._keeper is not None and self._keeper.done():
            self._keeper.result()
        try:
            await asyncio.wait_for(self._connected.wait(), timeout)
        except TimeoutError as late:
            raise BrokerLost(f"no connection to {self._address} for {timeout:g} s") from late
        if self._connection is None:
            raise BrokerLost(f"the connection to {self._address} is lost")
        return self._connection

    async def another(self, timeout: float) -> Connection:
        """A second connection. It ends with this relay, or when the caller ends it. Raises BrokerLost.

        The URL may shorten ``timeout``, but not extend it, because messages wait.
        """
        seconds = timeout if self._address.timeout is None else min(timeout, self._address.timeout)
        name = f"{self._name}, isolation"
        connection = await Connection.open(
            replace(self._address, timeout=seconds), name=name, heartbeat=self._heartbeat
        )
        connection.on_alarm(partial(_alarmed, name))
        self._others = [one for one in self._others if not one.closed.done()] + [connection]
        return connection

    async def close(self) -> None:
        """Close and stop connecting. Safe to call twice, and before start."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait({keeper})
        connection, self._connection = self._connection, None
        self._connected.clear()
        others, self._others = self._others, []
        await asyncio.gather(*(one.close() for one in (connection, *others) if one is not None))

    async def _keep(self) -> None:
        failures = 0
        sparing = Sparing()
        while True:
            try:
                connection = await Connection.open(
                    self._address, name=self._name, heartbeat=self._heartbeat, timeout=self._timeout
                )
            except BrokerLost as lost:
                # Also for a refused password or a missing vhost: operators repair those while we wait.
                if sparing.worth(str(lost), time.monotonic()):
                    log.warning(
                        "broker unreachable", connection=self._name, broker=str(self._address), reason=str(lost)
                    )
                await asyncio.sleep(pause(failures, random.random()))
                failures += 1
                continue
            log.info("broker connected", connection=self._name, broker=str(self._address))
            self.connects += 1
            sparing.over()
            began = time.monotonic()
            self._connection = connection
            connection.on_alarm(partial(_alarmed, self._name))
            self._connected.set()
            reason = await asyncio.shield(connection.closed)
            self._connected.clear()
            self._connection = None
            log.warning("broker connection lost", connection=self._name, reason=str(reason))
            if time.monotonic() - began > SETTLED:
                failures = 0
            else:
                # Let in and thrown out again: as good as not let in.
                await asyncio.sleep(pause(failures, random.random()))
                failures += 1


def _alarmed(name: str, reason: str) -> None:
    if reason:
        log.warning("broker blocked", connection=name, reason=reason)
    else:
        log.info("broker unblocked", connection=name)
