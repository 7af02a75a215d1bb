"""The reconnecting connection of the hot path, for publishers and consumers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import structlog

from delayer.amqp.address import Address
from delayer.amqp.channel import Channel
from delayer.amqp.connection import Connection
from delayer.amqp.errors import BrokerLost
from delayer.broker.addresses import CONNECT_SECONDS, connect, first_success
from delayer.broker.errors import FREE
from delayer.core.backoff import LogThrottle, pause
from delayer.core.errors import OF_BROKER, certificate_advice
from delayer.core.marks import ID

log = structlog.get_logger(__name__)

SETTLED: Final = 5.0
"""After a connection that lasted for this many seconds, the next attempt is immediate."""
SHORT_LIVED: Final = 3
"""Maximum failures that shorter connections count as, so that the pause after them stays below a second."""


@dataclass(eq=False)
class ReconnectingConnection:
    """A connection that is kept open from :meth:`start` to :meth:`close`.

    ``addresses``: reads the broker's addresses before each round of attempts, with the current login and certificates.
    It may raise BrokerLost. ``throttle``: limits the log of failures to connect. The connections to one broker share
    it, so that only one of them logs. ``accept``: raises BrokerLost if a new connection must not be used.
    """

    addresses: Callable[[], Sequence[Address]]
    name: str
    heartbeat: float
    timeout: float = CONNECT_SECONDS
    throttle: LogThrottle = field(default_factory=LogThrottle)
    accept: Callable[[Connection], Awaitable[None]] | None = None
    connects: int = field(default=0, init=False)
    current: Connection | None = field(default=None, init=False)
    """The open connection."""
    _address: Address | None = field(default=None, init=False)  # The last connection's.
    _where: str = field(default="the broker", init=False)
    _connected: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _keeper: asyncio.Task[None] | None = field(default=None, init=False)
    _others: list[Connection] = field(default_factory=list, init=False)

    @property
    def blocked(self) -> bool:
        """Whether the broker rejects publishes (a resource alarm). It reports this only to connections that publish, so
        perhaps only to one of :meth:`another`."""
        return any(one.blocked for one in self._open())

    async def unblocked(self, timeout: float) -> None:
        """Wait until the broker accepts publishes on every connection. Raises BrokerLost."""
        try:
            async with asyncio.timeout(timeout):
                for one in self._open():
                    await one.unblocked()
        except TimeoutError as late:
            raise BrokerLost("the broker blocks publishers (a resource alarm)") from late

    def _open(self) -> list[Connection]:
        every = (self.current, *self._others)
        return [one for one in every if one is not None and not one.closed.done()]

    def start(self) -> None:
        """Connect, and reconnect whenever the connection is lost."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(), name=f"keep {self.name}")

    async def connection(self, timeout: float) -> Connection:
        """Return the open connection. Raises BrokerLost if there is none after ``timeout`` seconds.

        Also raises an unexpected error of the reconnecting task, because no connection would ever follow.
        """
        if self._keeper is not None and self._keeper.done():
            self._keeper.result()
        while self.current is not None and self.current.closed.done():  # noqa: ASYNC110 - the keeper clears it
            await asyncio.sleep(0)
        try:
            await asyncio.wait_for(self._connected.wait(), timeout)
        except TimeoutError as late:
            raise BrokerLost(f"no connection to {self._where} for {timeout:g} s") from late
        if self.current is None:
            raise BrokerLost(f"the connection to {self._where} is lost")
        return self.current

    async def another(self, timeout: float) -> Connection:
        """Open a second connection, which :meth:`close` or the caller closes. Raises BrokerLost.

        The URL may shorten ``timeout`` but not extend it, because messages wait.
        """
        last, name = self._address, f"{self.name}, isolation"
        if last is None:
            raise BrokerLost(f"no connection to {self._where} yet")
        # At the same address, with the current login.
        now = next((one for one in self.addresses() if (one.host, one.port) == (last.host, last.port)), last)
        address = replace(now, at=last.at, timeout=timeout if now.timeout is None else min(timeout, now.timeout))
        connection = await self._open_checked(address, name)
        connection.on_alarm(partial(_alarmed, name))
        self._others = [one for one in self._others if not one.closed.done()] + [connection]
        return connection

    async def confirming_channel(self, connection: Connection, seconds: float | None) -> Channel:
        """Open a channel of this connection or of :meth:`another`. Raises BrokerLost if that takes over ``seconds``.

        Then it also drops the connection, except during a resource alarm. The broker may have stopped reading the
        connection, because one of its channels waits for a silent queue.
        """
        try:
            async with asyncio.timeout(seconds):
                return await connection.channel(token_header=ID)
        except TimeoutError as late:
            if not self.blocked:
                connection.drop("the broker opened no channel in time")
            raise BrokerLost("the broker opened no channel in time") from late

    async def close(self) -> None:
        """Close, and stop reconnecting. Safe to call twice, and before start."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait({keeper})
        connection, self.current = self.current, None
        self._connected.clear()
        others, self._others = self._others, []
        await asyncio.gather(*(one.close() for one in (connection, *others) if one is not None))

    async def _keep(self) -> None:
        failures = 0
        while True:
            if failures:
                await asyncio.sleep(pause(failures - 1, random.random()))
            try:
                connection = await self._open_any()
            except BrokerLost as lost:
                # Retry even a rejected password or missing vhost, because an operator may fix it in the meantime.
                told = self.throttle.should_log(str(lost), time.monotonic())
                advice = _advice(lost)
                if told and advice:
                    log.error("broker refused", broker=self._where, reason=str(lost), next_step=advice)
                elif told:
                    log.warning("broker unreachable", broker=self._where, reason=str(lost))
                failures += 1
                continue
            log.info("broker connected", connection=self.name, broker=str(self._address))
            self.connects += 1
            self.throttle.reset()
            began = time.monotonic()
            self.current = connection
            connection.on_alarm(partial(_alarmed, self.name))
            self._connected.set()
            reason = await asyncio.shield(connection.closed)
            self._connected.clear()
            self.current = None
            step = {"next_step": reason.advice} if reason.advice else {}
            log.warning("broker connection lost", connection=self.name, reason=str(reason), **step)
            # Only failures make the pause grow, but a broker that closes each connection needs a pause too.
            failures = 0 if time.monotonic() - began > SETTLED else min(failures + 1, SHORT_LIVED)

    async def _open_any(self) -> Connection:
        """Raises BrokerLost."""
        addresses = self.addresses()
        self._where = ", ".join(map(str, addresses))
        failed: dict[Address, BrokerLost] = {}

        async def attempt(address: Address) -> Connection:
            try:
                connection = await self._open_checked(address, self.name, self.timeout)
            except BrokerLost as lost:
                failed[address] = lost
                raise
            self._address = address
            return connection

        connection = await first_success(addresses, attempt, self._address)
        for address, lost in failed.items():  # Another connection may hide the loss, but not forever.
            if (advice := _advice(lost)) and self.throttle.is_new(f"{address}: {lost}"):
                log.error("broker refused", broker=str(address), reason=str(lost), next_step=advice)
        return connection

    async def _open_checked(self, address: Address, name: str, timeout: float = CONNECT_SECONDS) -> Connection:
        """Raises BrokerLost, also if the connection must not be used."""
        connection = await connect(address, name=name, heartbeat=self.heartbeat, timeout=timeout)
        if self.accept is not None:
            try:
                await self.accept(connection)
            except BaseException:
                await connection.close()
                raise
        return connection


def _advice(lost: BrokerLost) -> str:
    return lost.advice or certificate_advice(str(lost), *OF_BROKER)


def _alarmed(name: str, reason: str) -> None:
    if reason:
        log.warning("broker blocked", connection=name, reason=reason, next_step=FREE)
    else:
        log.info("broker unblocked", connection=name)
