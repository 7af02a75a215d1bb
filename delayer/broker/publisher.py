"""The publishing side of the broker: batches on one channel, with confirms and the mandatory flag.

The isolation (delayer/broker/isolation.py) publishes messages that were not confirmed in time, that were in flight when
the broker closed the channel or the connection, or that may cause such a close. A destination with an open circuit
breaker does not get messages (delayer/broker/circuit_breaker.py).

A return names a message by its token. Copies of one message share a token, so only one copy at a time uses the shared
channel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Final

import structlog

from delayer.amqp.channel import Channel, seconds_until_due
from delayer.amqp.errors import BrokerLost, ChannelClosed, ConfirmTimeout, ConnectionLost
from delayer.amqp.framing import DEFAULT_FRAME_MAX, header_limit
from delayer.amqp.values import CONFIRMED, Answer, Outgoing, Pace
from delayer.broker.connection import ReconnectingConnection
from delayer.broker.isolation import Isolation, Pending, Suspicion
from delayer.core import faultpoint
from delayer.core.errors import Unconfirmed
from delayer.core.hold import Outcome, outcome_of
from delayer.core.message import as_text
from delayer.core.publisher import Isolated
from delayer.core.readable import counted
from delayer.retry import raise_first

log = structlog.get_logger(__name__)

CONFIRM_TIMEOUT: Final = 8.0
"""Seconds to wait for the confirms of a batch, less than the store's idle transaction timeout."""
_GRACE: Final = 0.5
"""Seconds that a publish may take longer, such as for opening a channel."""
LONGEST_PUBLISH: Final = CONFIRM_TIMEOUT + _GRACE
"""The longest time of a publish without a pace, in seconds."""
SHARED_FRACTION: Final = 0.625
"""The share of CONFIRM_TIMEOUT for the shared channel. The rest is for isolating unconfirmed messages."""
MAX_BATCH: Final = 10_000
"""Maximum number of messages in a batch."""
LONGEST_AHEAD: Final = 2.0
"""Maximum seconds that the last message of a pace may be ahead. Claims and kept messages are due sooner, unless a
clock was set back. Then the deadline ends the wait, and the messages are planned by the new time."""


class AmqpPublisher:
    """Satisfies core.publisher.Publisher with a channel that reopens after a loss."""

    def __init__(
        self,
        reconnecting: ReconnectingConnection,
        *,
        isolation: Isolation | None = None,
        confirm_timeout: float = CONFIRM_TIMEOUT,
    ) -> None:
        """``isolation``: shared by all publishers of the process."""
        self._reconnecting = reconnecting
        self._isolation = isolation or Isolation(reconnecting, timeout=confirm_timeout)
        self._timeout = confirm_timeout
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()
        self._tokens: set[bytes] = set()  # Tokens in flight on the shared channel.
        self._frame_max = DEFAULT_FRAME_MAX  # The last connection's.
        self.batch_limit = MAX_BATCH
        """A late batch divides the limit by four, a quick batch doubles it."""

    @property
    def ready(self) -> bool:
        return self._reconnecting.current is not None and not self._reconnecting.blocked

    @property
    def max_properties(self) -> int:
        connection = self._reconnecting.current
        if connection is not None:
            self._frame_max = connection.limits.frame_max
        return header_limit(self._frame_max)

    async def publish(self, batch: Sequence[Outgoing], pace: Pace | None = None) -> list[Outcome]:
        """Publish: see core.publisher. Messages of a ``pace`` are written every 2 ms. Isolated messages are written
        later, when the last of them is due.

        Raises BrokerLost if an outcome is missing ``confirm_timeout`` seconds after the last message is due.
        """
        if not batch:
            return []
        loop = asyncio.get_running_loop()
        ahead = min(seconds_until_due(pace, -1), LONGEST_AHEAD)
        pending = Pending(batch, loop.time() + self._timeout + ahead, pace)
        lost: Exception | None = None
        try:
            # This bounds everything else, such as opening a channel.
            async with asyncio.timeout_at(pending.deadline + _GRACE):
                await self._reconnecting.connection(self._timeout)
                await self._reconnecting.unblocked(self._timeout)
                await self._publish(pending, range(len(batch)))
        except BrokerLost as error:
            lost = error
        except TimeoutError:
            lost = BrokerLost(f"the broker did not take {counted(len(batch), 'message')} within {self._timeout:g} s")
        left = pending.deadline - loop.time()
        if len(pending.outcomes) == len(batch):
            if left > self._timeout * 3 / 4:
                self.batch_limit = min(MAX_BATCH, 2 * self.batch_limit)
            return [pending.outcomes[index] for index in range(len(batch))]
        if left <= self._timeout * (1 - SHARED_FRACTION):
            self.batch_limit = max(1, min(self.batch_limit, len(batch)) // 4)
        raise _unconfirmed(batch, pending.outcomes, lost) from lost

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.abandon()

    async def _publish(self, pending: Pending, indexes: Sequence[int], *, tried: bool = False) -> None:
        """Publish, and enter outcomes as they become known. The outcomes of silent destinations stay missing.

        ``tried``: whether the first message for each new exchange was published. Raises BrokerLost.
        """
        isolation, batch = self._isolation, pending.batch
        special = [index for index in indexes if isinstance(batch[index], Isolated)]
        ordinary = _without(indexes, special)
        held, doubtful = isolation.breaker.partition(batch, ordinary) if isolation.breaker.table else ({}, [])
        pending.outcomes |= held
        ordinary = _without(ordinary, [*held, *doubtful])
        unknown = {batch[index].exchange for index in ordinary} - isolation.exchanges
        new = [index for index in ordinary if batch[index].exchange in unknown] if unknown else []
        ordinary = _without(ordinary, new)
        if not (special or doubtful or new):
            return await self._publish_ordinary(pending, ordinary)
        work = [self._publish_ordinary(pending, ordinary)]
        if special:
            work.append(isolation.publish(pending, special, Suspicion.ALL_END_CONNECTIONS))
        if new and not tried:
            work.append(self._publish_new(pending, new))
        elif new:
            doubtful = sorted([*doubtful, *new])
        if doubtful:
            work.append(isolation.publish(pending, doubtful))
        raise_first(await asyncio.gather(*work, return_exceptions=True))

    async def _publish_new(self, pending: Pending, indexes: Sequence[int]) -> None:
        """Publish the first message for each new exchange alone, because a missing exchange closes the channel. Then
        publish the rest."""
        firsts = {pending.batch[index].exchange: index for index in reversed(indexes)}
        await self._isolation.publish(pending, sorted(firsts.values()))
        await self._publish(pending, pending.publishable(indexes), tried=True)

    async def _publish_ordinary(self, pending: Pending, indexes: Sequence[int]) -> None:
        """Publish on the shared channel, and publish copies and messages in doubt in isolation. Raises BrokerLost."""
        isolating = self._isolation.isolating_until > asyncio.get_running_loop().time()
        if pending.pace is not None and (isolating or not indexes):
            pending.pace.on_written()  # Let the next batch begin without waiting for the isolation.
        if isolating:
            return await self._isolation.publish(pending, indexes)
        together: list[int] = []
        copies: list[int] = []
        for index in indexes:
            token = pending.batch[index].token
            (copies if token in self._tokens else together).append(index)
            self._tokens.add(token)
        try:
            if together:
                await self._publish_shared(pending, together)
        finally:
            self._tokens.difference_update(pending.batch[index].token for index in together)
        if copies:
            await self._isolation.publish(pending, copies)

    async def _publish_shared(self, pending: Pending, indexes: Sequence[int]) -> None:
        whole = pace = pending.pace
        if whole is not None and len(indexes) < len(pending.batch):
            pace = Pace([whole.due_ms[index] for index in indexes], whole.now_ms, whole.on_written)
        lost: ChannelClosed | ConnectionLost | None = None
        try:
            channel = await self._shared_channel(pending)
            messages = [pending.batch[index] for index in indexes]
            answers: Sequence[Answer | None]
            timeout = self._timeout * SHARED_FRACTION
            answers = await channel.publish(messages, timeout=timeout, pace=pace, reach=faultpoint.reach)
        except (ChannelClosed, ConnectionLost) as error:
            lost, answers = error, error.answers
        if whole is not None and pace is not None and pace is not whole:
            whole.written_ms |= {indexes[at]: written_ms for at, written_ms in pace.written_ms.items()}
        for index, answer in zip(indexes, answers, strict=bool(answers)):
            if answer is not None:
                pending.outcomes[index] = CONFIRMED if answer is CONFIRMED else outcome_of(answer)
        silent = isinstance(lost, ConfirmTimeout)
        if lost is None or (silent and self._reconnecting.blocked):
            return
        if not (silent or lost.caused_by_client):
            raise lost
        unknown = pending.publishable(indexes)
        if not silent:
            log.warning("publish channel closed", reason=str(lost), in_doubt=len(unknown))
        ended = isinstance(lost, ConnectionLost)
        suspicion = Suspicion.ONE_ENDS_CONNECTION if ended else Suspicion.DESTINATION
        await self._isolation.publish(pending, unknown, suspicion)

    async def _shared_channel(self, pending: Pending) -> Channel:
        connection = await self._reconnecting.connection(pending.deadline - asyncio.get_running_loop().time())
        async with self._opening:
            if self._channel is None or self._channel.closed.done():
                self._channel = await self._reconnecting.confirming_channel(connection, self._timeout * SHARED_FRACTION)
            return self._channel


def _without(indexes: Sequence[int], others: Collection[int]) -> Sequence[int]:
    return sorted({*indexes}.difference(others)) if others else indexes


def _unconfirmed(batch: Sequence[Outgoing], outcomes: dict[int, Outcome], lost: Exception | None) -> BrokerLost:
    """Build the error for missing outcomes, with the known outcomes."""
    if not outcomes and isinstance(lost, BrokerLost):
        return lost
    known = [outcomes.get(index) for index in range(len(batch))]
    first = next(message for message, outcome in zip(batch, known, strict=True) if outcome is None)
    text = str(lost) if lost is not None else f"{known.count(None)} of {len(batch)} messages were not confirmed in time"
    return Unconfirmed(
        f"{text}; the first for exchange {as_text(first.exchange)!r}, key {as_text(first.routing_key)!r}", known
    )
