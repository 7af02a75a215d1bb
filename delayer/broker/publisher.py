"""The publishing side of the broker: batches on one channel, with confirms and the mandatory flag.

The isolation (delayer/broker/isolation.py) publishes messages that got no confirm in time. It also publishes messages
in flight when the broker closed the channel or the connection, and messages that may close one. A destination with an
open circuit breaker gets no message (delayer/broker/circuit_breaker.py).

A return names a message by its token. Copies of one message share a token, so only one copy at a time takes the shared
channel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

import structlog

from delayer.amqp.channel import Channel, seconds_until
from delayer.amqp.connection import Connection
from delayer.amqp.errors import ChannelClosed, ConfirmTimeout, ConnectionLost
from delayer.broker.connection import ReconnectingConnection
from delayer.broker.isolation import Isolation
from delayer.core.errors import BrokerLost, Unconfirmed
from delayer.core.message import CONFIRMED, Outcome, Outgoing, Schedule, is_direct_reply

log = structlog.get_logger(__name__)

CONFIRM_TIMEOUT: Final = 8.0
"""Seconds to wait for the confirms of a batch. They are fewer than the idle timeout of the store's transaction."""
SHARED: Final = 0.625
"""The share of that time for the shared channel. The rest is for the isolation of unconfirmed messages."""
OVERHEAD: Final = 8 + 12
"""Bytes of a content-header frame around the properties: type, channel, size and end; class, weight and body size."""
MAX_PROPERTIES: Final = 131_072 - OVERHEAD
"""The room in RabbitMQ's default frame; assumed before the first connection."""
BATCH: Final = 10_000
"""The most messages of a batch."""


_Work = Callable[[Sequence[Outgoing], list[int], dict[int, Outcome], float], Coroutine[None, None, None]]


class AmqpPublisher:
    """Satisfies ports.Publisher. Several publishes may be in flight on its one channel."""

    def __init__(
        self,
        reconnecting: ReconnectingConnection,
        *,
        isolation: Isolation | None = None,
        confirm_timeout: float = CONFIRM_TIMEOUT,
    ) -> None:
        """``isolation``: the one that all publishers of the process share."""
        self._reconnecting = reconnecting
        self._isolation = isolation or Isolation(reconnecting, timeout=confirm_timeout)
        self._timeout = confirm_timeout
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()
        self._tokens: set[bytes] = set()  # Tokens in flight on the shared channel.
        self._max_properties = MAX_PROPERTIES
        self.batch_limit = BATCH
        """See ports.Publisher. A batch that misses its time divides it by four, and a quick one doubles it."""

    @property
    def ready(self) -> bool:
        """See ports.Publisher."""
        return self._reconnecting.current is not None and not self._reconnecting.blocked

    @property
    def max_properties(self) -> int:
        """See ports.Publisher. The value is that of the last connection."""
        connection = self._reconnecting.current
        if connection is not None:
            self._max_properties = connection.frame_max - OVERHEAD
        return self._max_properties

    async def publish(self, batch: Sequence[Outgoing], schedule: Schedule | None = None) -> list[Outcome]:
        """See ports.Publisher. It waits while the broker blocks publishers.

        Raises Unconfirmed if outcomes are missing ``confirm_timeout`` seconds after the call, or after the last
        instant of the ``schedule``; BrokerLost.
        """
        if not batch:
            return []
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout + seconds_until(schedule, -1)
        outcomes: dict[int, Outcome] = {}
        lost: Exception | None = None
        try:
            # This bounds every other wait, such as the opening of a channel.
            async with asyncio.timeout_at(deadline + 0.5):
                await self._publish(batch, outcomes, deadline, schedule)
        except BrokerLost as error:
            lost = error
        except TimeoutError:
            lost = BrokerLost(f"the broker did not take {len(batch)} messages within {self._timeout:g} s")
        if len(outcomes) == len(batch):
            if deadline - loop.time() > self._timeout * 3 / 4:
                self.batch_limit = min(BATCH, 2 * self.batch_limit)
            return [outcomes[index] for index in range(len(batch))]
        if deadline - loop.time() <= self._timeout * (1 - SHARED):
            self.batch_limit = max(1, min(self.batch_limit, len(batch)) // 4)
        raise _unconfirmed(batch, outcomes, lost) from lost

    async def close(self) -> None:
        """See ports.Publisher."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.abandon()

    async def _publish(
        self, batch: Sequence[Outgoing], outcomes: dict[int, Outcome], deadline: float, schedule: Schedule | None
    ) -> None:
        """Publish, and enter outcomes as they become known. Silent destinations may leave theirs missing."""
        await self._usable()
        ordinary, separate = self._sorted(batch, outcomes, schedule)
        tasks = [asyncio.create_task(work(batch, indexes, outcomes, deadline)) for work, indexes in separate if indexes]
        if tasks:
            await asyncio.sleep(0)  # Then a later confirm proves that the broker answered after these began.
        try:
            if self._isolation.isolating_until > asyncio.get_running_loop().time():
                await _due(schedule, ordinary)
                await self._isolation.bisect(batch, list(ordinary), outcomes, deadline)
            else:
                await self._together(batch, ordinary, outcomes, deadline, schedule)
            for task in tasks:
                await task
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def _sorted(
        self, batch: Sequence[Outgoing], outcomes: dict[int, Outcome], schedule: Schedule | None
    ) -> tuple[Sequence[int], list[tuple[_Work, list[int]]]]:
        """The messages for the shared channel, and the work for the others. Enters the outcomes of open breakers."""
        isolation = self._isolation
        ordinary: Sequence[int] = range(len(batch))
        separate: list[tuple[_Work, list[int]]] = []
        if special := [index for index, one in enumerate(batch) if one.isolated or _is_reply(one)]:
            separate.append((partial(_when_due, schedule, isolation.publish_isolated), special))
            ordinary = sorted({*ordinary}.difference(special))
        if isolation.breaker.table:
            held, doubtful = isolation.breaker.partition(batch, ordinary)
            outcomes |= held
            separate.append((partial(_when_due, schedule, isolation.probe), doubtful))
            ordinary = sorted({*ordinary}.difference(held, doubtful))
        for exchange in {batch[index].exchange for index in ordinary} - isolation.exchanges:
            unknown = [index for index in ordinary if batch[index].exchange == exchange]
            separate.append((partial(self._first, schedule), unknown))
            ordinary = sorted({*ordinary}.difference(unknown))
        return ordinary, separate

    async def _first(
        self,
        schedule: Schedule | None,
        batch: Sequence[Outgoing],
        indexes: Sequence[int],
        outcomes: dict[int, Outcome],
        deadline: float,
    ) -> None:
        """Publish the first messages for an exchange: one alone, then the others."""
        known, exchange = self._isolation.exchanges, batch[indexes[0]].exchange
        await _due(schedule, indexes[:1])
        due = [index for index in indexes if not seconds_until(schedule, index)]
        for part in (due, indexes[len(due) :]):
            if part and exchange not in known:
                await _due(schedule, part)
                await self._isolation.try_exchange(batch, part, outcomes, deadline)
        if exchange in known:
            rest = [index for index in indexes if index not in outcomes]
            await self._together(batch, rest, outcomes, deadline, schedule)

    async def _usable(self) -> None:
        await self._reconnecting.connection(self._timeout)
        try:
            await asyncio.wait_for(self._reconnecting.unblocked(), self._timeout)
        except TimeoutError as late:
            raise BrokerLost("the broker blocks publishers (a resource alarm)") from late

    async def _together(
        self,
        batch: Sequence[Outgoing],
        indexes: Sequence[int],
        outcomes: dict[int, Outcome],
        deadline: float,
        schedule: Schedule | None = None,
    ) -> None:
        """Publish on the shared channel. The isolation publishes copies, and messages in doubt. Raises BrokerLost."""
        together: list[int] = []
        copies: list[int] = []
        for index in indexes:
            token = batch[index].token
            (copies if token in self._tokens else together).append(index)
            self._tokens.add(token)
        try:
            if together:
                await self._settle(batch, together, outcomes, deadline, schedule)
        finally:
            self._tokens.difference_update(batch[index].token for index in together)
        if copies:
            await _due(schedule, copies)
            await self._isolation.bisect(batch, copies, outcomes, deadline)

    async def _settle(
        self,
        batch: Sequence[Outgoing],
        indexes: Sequence[int],
        outcomes: dict[int, Outcome],
        deadline: float,
        schedule: Schedule | None,
    ) -> None:
        began = asyncio.get_running_loop().time()
        connection = await self._reconnecting.connection(deadline - began)
        lost: ChannelClosed | ConnectionLost | None = None
        part = schedule
        if schedule is not None and len(indexes) < len(batch):
            part = Schedule([schedule.due_ms[index] for index in indexes], schedule.now_ms, schedule.on_written)
        try:
            channel = await self._shared(connection)
            messages = [batch[index] for index in indexes]
            answers: Sequence[Outcome | None] = await channel.publish(
                messages, timeout=self._timeout * SHARED, schedule=part
            )
        except (ChannelClosed, ConnectionLost) as error:
            lost, answers = error, error.outcomes
        if schedule is not None and part is not None and part is not schedule:
            schedule.written_ms |= {indexes[at]: written_ms for at, written_ms in part.written_ms.items()}
        answered = zip(indexes, answers, strict=bool(answers))
        outcomes.update((index, outcome) for index, outcome in answered if outcome is not None)
        if CONFIRMED in answers:
            self._isolation.last_confirm = max(self._isolation.last_confirm, began)
        if lost is None:
            return
        silent = isinstance(lost, ConfirmTimeout)
        if not (silent or lost.objects):
            raise lost
        unknown = [index for index in indexes if index not in outcomes]
        await _due(schedule, unknown)
        if not silent:
            log.warning("publish channel closed", reason=str(lost), in_doubt=len(unknown))
            await self._isolation.bisect(batch, unknown, outcomes, deadline)
        elif not self._reconnecting.blocked:
            await self._isolation.probe(batch, unknown, outcomes, deadline)

    async def _shared(self, connection: Connection) -> Channel:
        async with self._opening:
            if self._channel is None or self._channel.closed.done():
                try:
                    async with asyncio.timeout(self._timeout * SHARED):
                        self._channel = await connection.confirming_channel()
                except TimeoutError as late:
                    await self._isolation.replace(connection)
                    raise BrokerLost("the broker opened no channel in time") from late
            return self._channel


async def _when_due(
    schedule: Schedule | None, work: _Work, batch: Sequence[Outgoing], indexes: list[int], *more: Any
) -> None:
    await _due(schedule, indexes)
    await work(batch, indexes, *more)


async def _due(schedule: Schedule | None, indexes: Sequence[int]) -> None:
    """Wait until all of these messages are due. The isolation publishes at once."""
    while indexes and (left := seconds_until(schedule, indexes[-1])):  # noqa: ASYNC110 - a clock
        await asyncio.sleep(left)


def _is_reply(one: Outgoing) -> bool:
    # Nearly every message has an exchange, so the first test is enough.
    return not one.exchange and is_direct_reply(one.exchange, one.routing_key)


def _unconfirmed(batch: Sequence[Outgoing], outcomes: dict[int, Outcome], lost: Exception | None) -> BrokerLost:
    """The error for missing outcomes, with the known ones."""
    if not outcomes and isinstance(lost, BrokerLost):
        return lost
    known = [outcomes.get(index) for index in range(len(batch))]
    first = next(message for message, outcome in zip(batch, known, strict=True) if outcome is None)
    text = str(lost) if lost is not None else f"{known.count(None)} of {len(batch)} messages were not confirmed in time"
    return Unconfirmed(
        f"{text}; the first for exchange {_shown(first.exchange)}, key {_shown(first.routing_key)}", known
    )


def _shown(name: bytes) -> str:
    return repr(name.decode("utf-8", "backslashreplace"))
