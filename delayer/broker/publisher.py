"""The publishing side of the relay: confirmed, mandatory, and exact about which message the broker objects to.

A publish to an exchange that is missing, internal or closed to us makes the broker close the channel, which leaves
every unconfirmed publish on it in doubt. So an exchange is first tried with one message alone, on a channel of its own;
only when the broker took that one or returned it does the rest of a batch follow, on the channel that they share.

Should the broker close the shared channel all the same (the exchange was deleted meanwhile; topic permissions depend
on the key), then as many messages as were in doubt are next published one at a time, each waiting for its own confirm,
until the one that closes the channel is known. Slow, rare, and nobody is stopped for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog

from delayer.broker.relay import Relay
from delayer.core.errors import BrokerLost
from delayer.core.message import Outcome, Outgoing, Returned
from delayer.wire.channel import Channel
from delayer.wire.connection import Connection
from delayer.wire.errors import ChannelClosed, ConfirmTimeout

log = structlog.get_logger(__name__)

CONFIRM_TIMEOUT: Final = 8.0
"""Seconds to wait for the confirms of a batch: less than the idle timeout of the store transaction behind it."""
OVERHEAD: Final = 8 + 12
"""Bytes of a content-header frame around the properties: type, channel, size and end; class, weight and body size."""
MAX_PROPERTIES: Final = 131_072 - OVERHEAD
"""What fits RabbitMQ's default frame; assumed before the first connection."""
REMEMBERED: Final = 10_000
"""Exchanges known to take publishes. Beyond that many distinct ones, forgetting costs a round trip each."""


class RelayPublisher:
    """Satisfies ports.Publisher. Several publishes may be in flight on its one channel."""

    def __init__(self, relay: Relay, *, confirm_timeout: float = CONFIRM_TIMEOUT) -> None:
        self._relay = relay
        self._timeout = confirm_timeout
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()
        self._tried: set[bytes] = set()
        self._careful = 0
        self._max_properties = MAX_PROPERTIES

    @property
    def ready(self) -> bool:
        """Connected, and not blocked by a resource alarm of the broker."""
        connection = self._relay.current
        return connection is not None and not connection.blocked

    @property
    def max_properties(self) -> int:
        """Bytes of properties that fit a frame, as last negotiated."""
        connection = self._relay.current
        if connection is not None:
            self._max_properties = connection.frame_max - OVERHEAD
        return self._max_properties

    async def publish(self, batch: Sequence[Outgoing]) -> list[Outcome]:
        """See ports.Publisher. Nothing is published while the broker blocks us: then BrokerLost, after a while."""
        if not batch:
            return []
        connection = await self._usable()
        if self._careful > 0:
            self._careful -= min(self._careful, len(batch))
            return [(await self._alone(connection, message))[0] for message in batch]
        outcomes = await self._try_exchanges(connection, batch)
        rest = [index for index in range(len(batch)) if index not in outcomes]
        shared = await self._together(connection, [batch[index] for index in rest])
        outcomes.update(zip(rest, shared, strict=True))
        return [outcomes[index] for index in range(len(batch))]

    async def _usable(self) -> Connection:
        connection = await self._relay.connection(self._timeout)
        try:
            await asyncio.wait_for(connection.unblocked, self._timeout)
        except TimeoutError as late:
            raise BrokerLost("the broker blocks publishers (a resource alarm)") from late
        return connection

    async def _try_exchanges(self, connection: Connection, batch: Sequence[Outgoing]) -> dict[int, Outcome]:
        """Outcomes by index: of the first message to each exchange that was never tried, and of every message to one
        that turns out to be closed to us."""
        outcomes: dict[int, Outcome] = {}
        closed: dict[bytes, Outcome] = {}
        for index, message in enumerate(batch):
            exchange = message.exchange
            if exchange in self._tried:
                continue
            if exchange in closed:
                outcomes[index] = closed[exchange]
                continue
            outcomes[index], survived = await self._alone(connection, message)
            if survived:
                if len(self._tried) >= REMEMBERED:
                    self._tried.clear()
                self._tried.add(exchange)
            else:
                closed[exchange] = outcomes[index]
        return outcomes

    async def _alone(self, connection: Connection, message: Outgoing) -> tuple[Outcome, bool]:
        """Publish one message on a channel of its own. Whether the channel survived it comes back with the outcome; a
        channel that the broker closed is its objection to this message, and to no other."""
        channel = await connection.channel()
        try:
            await channel.confirm_select()
            outcomes = await channel.publish([message], timeout=self._timeout)
        except ConfirmTimeout:
            raise
        except ChannelClosed as closed:
            return Returned(closed.code, closed.text), False
        await channel.close()
        return outcomes[0], True

    async def _together(self, connection: Connection, batch: Sequence[Outgoing]) -> list[Outcome]:
        if not batch:
            return []
        channel = await self._shared(connection)
        try:
            return await channel.publish(batch, timeout=self._timeout)
        except ConfirmTimeout:
            raise
        except ChannelClosed as closed:
            log.warning("publish channel closed", reason=str(closed), in_doubt=len(batch))
            self._careful += len(batch)
            self._tried.clear()
            raise

    async def _shared(self, connection: Connection) -> Channel:
        async with self._opening:
            if self._channel is None or self._channel.closed.done():
                channel = await connection.channel()
                await channel.confirm_select()
                self._channel = channel
            return self._channel
