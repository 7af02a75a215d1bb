"""The publishing side of the relay: confirmed, mandatory, and exact about which message the broker objects to.

A publish to an exchange that is missing, internal or closed to us makes the broker close the channel, which leaves
every unconfirmed publish on it in doubt. So an exchange is first tried with one message alone, on a channel beside the
shared one; only when the broker took that one or returned it does the rest of a batch follow, all on the shared one.

Should the broker close the shared channel all the same (the exchange was deleted meanwhile; topic permissions depend
on the key), then as many messages as were in doubt are next published one at a time, in small batches, until the one
that closes the channel is known; its exchange is left alone with its messages for a while (delayer.broker.caution).
Slow, rare, and nobody is stopped for good.

A returned message is known by its token. Copies of one message (repeated after a fault, on their way through the
cascade or on their way here) share theirs; so only one of them at a time goes over the shared channel.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import structlog

from delayer.broker.caution import Caution
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
MARGIN: Final = 0.5
"""Seconds after the confirm timeout in which whatever else hangs, such as the opening of a channel, is given up."""
NOT_FOUND: Final = 404
ACCESS_REFUSED: Final = 403


class RelayPublisher:
    """Satisfies ports.Publisher. Several publishes may be in flight on its one channel."""

    def __init__(
        self,
        relay: Relay,
        *,
        confirm_timeout: float = CONFIRM_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._relay = relay
        self._timeout = confirm_timeout
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()
        self._tokens: set[bytes] = set()  # in flight on the shared channel
        self._caution = Caution(clock)
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

    @property
    def batch_limit(self) -> int:
        """See ports.Publisher."""
        return self._caution.batch_limit

    async def publish(self, batch: Sequence[Outgoing]) -> list[Outcome]:
        """See ports.Publisher. Nothing is published while the broker blocks us.

        Raises BrokerLost when not everything is confirmed ``confirm_timeout`` seconds after the call.
        """
        if not batch:
            return []
        deadline = asyncio.get_running_loop().time() + self._timeout
        try:
            async with asyncio.timeout_at(deadline + MARGIN):
                outcomes = await self._publish(batch, deadline)
        except ConfirmTimeout:
            self._caution.overdue(len(batch))
            raise
        except TimeoutError as late:
            self._caution.overdue(len(batch))
            raise BrokerLost(f"the broker did not take {len(batch)} messages within {self._timeout:g} s") from late
        self._caution.settled(len(batch), quickly=_left(deadline) > self._timeout * 3 / 4)
        return outcomes

    async def close(self) -> None:
        """See ports.Publisher."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.abandon()

    async def _publish(self, batch: Sequence[Outgoing], deadline: float) -> list[Outcome]:
        connection = await self._usable()
        # Asked as late as possible: what one message teaches holds for the next.
        alone = (index for index, message in enumerate(batch) if self._caution.alone(message.exchange))
        outcomes = await self._one_by_one(connection, batch, alone, deadline)
        together, apart = self._reserve(batch, (index for index in range(len(batch)) if index not in outcomes))
        try:
            shared = await self._together(connection, [batch[index] for index in together], deadline)
        finally:
            self._tokens.difference_update(batch[index].token for index in together)
        outcomes.update(zip(together, shared, strict=True))
        outcomes |= await self._one_by_one(connection, batch, apart, deadline)
        return [outcomes[index] for index in range(len(batch))]

    async def _usable(self) -> Connection:
        connection = await self._relay.connection(self._timeout)
        try:
            await asyncio.wait_for(connection.unblocked, self._timeout)
        except TimeoutError as late:
            raise BrokerLost("the broker blocks publishers (a resource alarm)") from late
        return connection

    def _reserve(self, batch: Sequence[Outgoing], indexes: Iterable[int]) -> tuple[list[int], list[int]]:
        """Note the tokens that go over the shared channel now. Returns their messages, and those that must not go with
        them: their token is there already, or their exchange has turned out to be delicate."""
        together: list[int] = []
        apart: list[int] = []
        for index in indexes:
            exchange, token = batch[index].exchange, batch[index].token
            if token in self._tokens or self._caution.delicate(exchange):
                apart.append(index)
            else:
                together.append(index)
                self._tokens.add(token)
        return together, apart

    async def _one_by_one(
        self, connection: Connection, batch: Sequence[Outgoing], indexes: Iterable[int], deadline: float
    ) -> dict[int, Outcome]:
        """Outcomes by index. What the broker says of an exchange holds for the rest of the batch."""
        outcomes: dict[int, Outcome] = {}
        closed: dict[bytes, Returned] = {}
        probe = _Probe(connection, deadline)
        try:
            for index in indexes:
                exchange = batch[index].exchange
                if exchange in closed:
                    outcomes[index] = closed[exchange]
                    continue
                outcomes[index], objection = await probe.publish(batch[index])
                if objection is None:
                    self._caution.took(exchange)
                elif _concerns_exchange(objection):
                    closed[exchange] = objection
                else:
                    self._caution.objected(exchange)
        except (ConfirmTimeout, TimeoutError, asyncio.CancelledError):
            if not _left(deadline):
                self._caution.late(len(outcomes), len(batch))
            raise
        finally:
            probe.close()
        return outcomes

    async def _together(self, connection: Connection, batch: Sequence[Outgoing], deadline: float) -> list[Outcome]:
        if not batch:
            return []
        channel = await self._shared(connection)
        try:
            return await channel.publish(batch, timeout=_left(deadline))
        except ConfirmTimeout:
            raise
        except ChannelClosed as closed:
            log.warning("publish channel closed", reason=str(closed), in_doubt=len(batch))
            self._caution.in_doubt(len(batch))
            raise

    async def _shared(self, connection: Connection) -> Channel:
        async with self._opening:
            if self._channel is None or self._channel.closed.done():
                self._channel = await _confirming(connection)
            return self._channel


class _Probe:
    """Publishes one message at a time, on a channel that is opened again whenever the broker closed it: then its
    objection is to that message, and to no other."""

    def __init__(self, connection: Connection, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self._channel: Channel | None = None

    async def publish(self, message: Outgoing) -> tuple[Outcome, Returned | None]:
        """The outcome, and again if it is the broker's objection and not an answer of its queues.

        Raises TimeoutError when the time is over before anything is written.
        """
        if not _left(self._deadline):
            raise TimeoutError
        if self._channel is None:
            self._channel = await _confirming(self._connection)
        try:
            return (await self._channel.publish([message], timeout=_left(self._deadline)))[0], None
        except ConfirmTimeout:
            raise
        except ChannelClosed as closed:
            self._channel = None
            objection = Returned(closed.code, closed.text)
            return objection, objection

    def close(self) -> None:
        if self._channel is not None:
            self._channel.abandon()


def _concerns_exchange(objection: Returned) -> bool:
    """Missing, internal, or closed to this user; not if it is about this message or its key (topic permissions)."""
    return objection.code == NOT_FOUND or (objection.code == ACCESS_REFUSED and "topic '" not in objection.text)


async def _confirming(connection: Connection) -> Channel:
    channel = await connection.channel()
    try:
        await channel.confirm_select()
    except BaseException:
        channel.abandon()  # nobody else knows of it, and its number would never be free again
        raise
    return channel


def _left(deadline: float) -> float:
    return max(0.0, deadline - asyncio.get_running_loop().time())
