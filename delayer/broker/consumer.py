"""The consuming side of the broker: it gathers deliveries into batches, bounded by bytes and by count."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import structlog
from pamqp.commands import Queue as QueueMethods

from delayer.amqp.channel import Channel
from delayer.amqp.connection import Connection
from delayer.amqp.errors import ConsumerCancelled
from delayer.broker.connection import ReconnectingConnection
from delayer.broker.pipelined_admin import queue_look
from delayer.core.errors import BrokerLost
from delayer.core.message import Delivery

BUFFER_BYTES: Final = 32 << 20
"""The most buffered bytes. Above this the socket is not read, and the other deliveries stay with the broker. The
prefetch bounds only the count, and five thousand messages of 1 MB are five gigabytes."""
UNREAD: Final = 10.0
"""Seconds without reading after which a subscription ends, if it can begin again. RabbitMQ closes a connection that
reads nothing for thirty seconds."""


class FlowControl:
    """The buffered bytes of one subscription, or of all that share a connection. Sharing subscriptions delay each other
    anyway, and have one bound together: ``room`` bytes. They end after ``unread_seconds`` without reading."""

    def __init__(self, room: int = BUFFER_BYTES, unread_seconds: float = UNREAD) -> None:
        self._room = room
        self._unread_seconds = unread_seconds
        self.buffered = 0
        self._waiting: set[AmqpSubscription] = set()
        self._listening: list[int] = []
        self.paused: set[Connection] = set()
        self._timer: asyncio.TimerHandle | None = None

    def behind(self, one: AmqpSubscription) -> bool:
        """Whether more deliveries may wait in the socket. With several subscriptions their owner is unknown."""
        return bool(self.paused) and self._waiting <= {one}

    def came(self, to: AmqpSubscription, socket: Connection, size: int) -> None:
        """Count ``size`` more buffered bytes of one subscription."""
        self.buffered += size
        self._waiting.add(to)
        if self.buffered > self._limit and socket not in self.paused:
            self.paused.add(socket)
            socket.pause_reading()
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(self._unread_seconds, self._for_too_long)

    def went(self, size: int) -> None:
        """Count ``size`` bytes as taken."""
        self.buffered -= size
        if self.buffered < self._room // 2:
            self._resume()

    def emptied(self, one: AmqpSubscription, size: int) -> None:
        """Count all ``size`` buffered bytes of one subscription as taken."""
        self._waiting.discard(one)
        self.went(size)

    @contextmanager
    def listening(self, rooms: int) -> Iterator[None]:
        """While a subscription waits for the broker's answer, which follows all deliveries: read up to ``rooms`` times
        the room."""
        self._listening.append(rooms)
        if self.buffered <= self._limit:
            self._resume()
        try:
            yield
        finally:
            self._listening.remove(rooms)

    @property
    def _limit(self) -> int:
        return self._room * max(self._listening, default=1)

    def _resume(self) -> None:
        for socket in self.paused:
            socket.resume_reading()
        self.paused.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _for_too_long(self) -> None:
        self._timer = None
        for one in tuple(self._waiting):
            one.let_go(self._unread_seconds)


ENOUGH: Final = 10
"""After so many times the prefetch, the average size of messages is known."""
WORTH: Final = 2
"""A new subscription is worth its cost if it can buffer so many times as many messages."""


class AdaptivePrefetch:
    """The prefetch that fits the sizes of a queue's messages. ``room``: bytes that may be buffered."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._fits: int | None = None
        self._messages = 0
        self._bytes = 0

    def prefetch(self, wanted: int) -> int:
        """The prefetch to ask for, at most ``wanted``."""
        self._messages = self._bytes = 0
        return wanted if self._fits is None else min(wanted, self._fits)

    def full(self, messages: int) -> None:
        """Note that ``messages`` deliveries filled the buffer for too long."""
        self._fits = max(messages, 1)

    def took(self, messages: int, size: int, wanted: int) -> bool:
        """Note that a batch of ``size`` bytes was taken. Returns whether a new subscription should ask for more."""
        fits = self._fits
        if fits is None or fits >= wanted:
            return False
        self._messages += messages
        self._bytes += size
        if self._messages < ENOUGH * fits:
            return False
        would_fit = self._room * self._messages // max(self._bytes, 1)
        self._messages = self._bytes = 0
        if would_fit < WORTH * fits:
            return False
        self._fits = None if would_fit >= wanted else would_fit
        return True


log = structlog.get_logger(__name__)

BEGINNING: Final = 2
ENDING: Final = 4
"""The multiple of the room that is read for others while a subscription waits for the broker's answers. The end of a
subscription needs its answer, to know which acknowledgements arrived."""
IDLE: Final = 1.0
"""Seconds after which an idle next_batch returns, so that its caller can do other work."""
ANSWER_SECONDS: Final = 2.0
"""Seconds that a subscription waits for a connection, and for the broker to end a consumer."""
BATCH_BYTES: Final = 8 << 20
UNCOUNTED: Final = (4, 3)
"""The first version of RabbitMQ that does not count a nacked message as delivered."""


class AmqpConsumer:
    """Satisfies intake.ports.Consumer, over a connection of its own, because pausing one queue must not pause another.
    Consumers that share a connection share its ``flow_control``; otherwise each subscription has its own.

    ``adaptive_prefetch``: the size of a queue's messages so far. A subscription may end itself in order (``overrun``)
    to change how much it reads ahead. ``one_active``: whether the queue has a single active consumer.
    """

    def __init__(
        self,
        reconnecting: ReconnectingConnection,
        *,
        batch_bytes: int = BATCH_BYTES,
        adaptive_prefetch: AdaptivePrefetch | None = None,
        flow_control: FlowControl | None = None,
        one_active: bool = False,
    ) -> None:
        self._reconnecting = reconnecting
        self._flow_control = flow_control
        self._batch_bytes = batch_bytes
        self._adaptive_prefetch = adaptive_prefetch
        self._one_active = one_active
        self._subscription: AmqpSubscription | None = None

    @property
    def active(self) -> bool:
        return self._subscription is not None and self._subscription.active

    async def subscribe(self, queue: str, prefetch: int) -> AmqpSubscription:
        flow_control = self._flow_control or FlowControl()
        with flow_control.listening(BEGINNING):
            connection = await self._reconnecting.connection(ANSWER_SECONDS)
            channel = await connection.channel()
            subscription = AmqpSubscription(
                connection,
                channel,
                queue,
                prefetch=prefetch,
                batch_bytes=self._batch_bytes,
                flow_control=flow_control,
                adaptive_prefetch=self._adaptive_prefetch,
                one_active=self._one_active,
            )
            try:
                await channel.qos(subscription.prefetch)
                await subscription.begin()
            except BaseException:
                subscription.stop()
                channel.abandon()  # No caller knows this channel, so nothing else would free it.
                raise
            self._subscription = subscription
            return subscription


class AmqpSubscription:
    """Satisfies intake.ports.Subscription."""

    def __init__(
        self,
        connection: Connection,
        channel: Channel,
        queue: str,
        *,
        prefetch: int,
        batch_bytes: int,
        flow_control: FlowControl,
        adaptive_prefetch: AdaptivePrefetch | None,
        one_active: bool,
    ) -> None:
        self._connection = connection
        self._channel = channel
        self._queue = queue
        self._batch_bytes = batch_bytes
        self._flow_control = flow_control
        self._consumer_tag: str | None = None
        self._buffer: deque[Delivery] = deque()
        self._bytes = 0
        self._wanted = prefetch
        self._adaptive_prefetch = adaptive_prefetch
        self.prefetch = prefetch if adaptive_prefetch is None else adaptive_prefetch.prefetch(prefetch)
        self.overrun = False
        """Set when the deliveries were too large for too long, or when they are smaller now."""
        self.in_order = False
        """Whether the broker has all acknowledgements, after the close."""
        self._one_active = one_active
        self.active = not one_active
        """Whether the broker delivers to this consumer. AMQP does not tell a standby that it became the active
        consumer. So this is known of the first consumer of the queue, and after a delivery."""
        self._cancelled = False
        self._stopped = False
        self._arrived = asyncio.Event()
        self._filled = asyncio.Event()
        self._limit = 0  # The limit of the batch that a caller waits for.
        self._took_at = asyncio.get_running_loop().time()
        # The end of the channel wakes a waiting next_batch too.
        channel.closed.add_done_callback(lambda _: self._arrived.set())

    async def begin(self) -> None:
        """Start the consumer. Raises BrokerLost."""
        if self._one_active:
            # A quorum queue counts its active consumer alone, so the count says nothing after the start.
            seen = await self._channel.call(queue_look(self._queue), QueueMethods.DeclareOk)
            self.active = not seen.consumer_count
            if not self.active:
                log.info("standing by", queue=self._queue)
        self._consumer_tag = await self._channel.consume(self._queue, self._on_delivery, self._on_cancelled)

    async def next_batch(self, limit: int, gather: float) -> list[Delivery]:
        if not self._buffer:
            self._arrived.clear()
            self._raise_if_lost()
            try:
                await asyncio.wait_for(self._arrived.wait(), IDLE)
            except TimeoutError:
                return []
        # The buffered deliveries are unsettled, so the broker sends only the rest of the prefetch.
        self._limit = min(limit, self.prefetch)
        now = asyncio.get_running_loop().time
        if not self._full() and (left := self._took_at + gather - now()) > 0:
            self._filled.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._filled.wait()
        self._raise_if_lost()
        self._took_at = now()
        return self._take(limit)

    @property
    def behind(self) -> bool:
        return bool(self._buffer) or self._flow_control.behind(self)

    @property
    def lost(self) -> bool:
        """No delivery comes any more, and the last acknowledgements may not have reached the broker."""
        return self._cancelled or self._channel.closed.done()

    def ack(self, tag: int, *, multiple: bool) -> None:
        if not self._channel.closed.done():
            self._channel.ack(tag, multiple=multiple)

    async def close(self, seconds: float = ANSWER_SECONDS) -> None:
        """End the consumer and its channel. ``seconds`` is the time that the broker has to end the consumer.

        A busy quorum queue may miss acknowledgements just before the end of the channel, or after the end of the
        consumer. On 3.10.8 hundreds of messages were repeated after an orderly stop. The end of a consumer goes through
        the queue's log, after all its acknowledgements.

        The other messages return to their places. From UNCOUNTED on a ``basic.nack`` after the end of the consumer
        returns them: the broker does not count it as a delivery, but it counts the end of a channel. In older versions
        the end of the channel returns them: 3.10 returns more than 32 nacked messages in the order of a hash.

        With a single active consumer the end of the channel returns them in every version. The end of the consumer
        would activate a standby first, and newer messages would overtake those that return. So this asks for one more
        consumer, which stands by: that goes through the queue's log too.
        """
        await self.cancel(seconds)
        if self.in_order and not self._one_active and self._connection.version >= UNCOUNTED:
            self._channel.nack(0, multiple=True)
        await self._channel.close()

    async def cancel(self, seconds: float = ANSWER_SECONDS) -> None:
        """End the consumer, and not its channel: no message comes any more, and none returns yet."""
        self.stop()
        tag, self._consumer_tag = self._consumer_tag, None
        if tag is None or self.lost:
            return
        try:
            with self._flow_control.listening(ENDING):
                async with asyncio.timeout(seconds):
                    if self._one_active:
                        await self._channel.consume(self._queue, self._on_delivery, self._on_cancelled)
                    else:
                        await self._channel.cancel(tag)
            self.in_order = not self._channel.closed.done()
        except (BrokerLost, TimeoutError) as lost:
            # The broker may deliver the last acknowledged messages again, as after any loss.
            log.warning("consumer not ended in order", queue=self._queue, reason=str(lost) or "no answer in time")

    def stop(self) -> None:
        """Also drops the buffer."""
        self._stopped = True
        self._buffer.clear()
        self._flow_control.emptied(self, self._bytes)
        self._bytes = 0

    def _on_delivery(self, delivery: Delivery) -> None:
        if self._stopped:
            return  # The delivery returns to its queue when the channel closes.
        if not self.active:
            self.active = True
            log.info("standby took over", queue=self._queue)
        size = len(delivery.body) + len(delivery.properties)
        self._buffer.append(delivery)
        self._bytes += size
        if self._full():
            self._filled.set()
        self._flow_control.came(self, self._connection, size)
        self._arrived.set()

    def let_go(self, seconds: float) -> None:
        """End the subscription, if it can begin again: its deliveries filled the buffer for ``seconds``. They return to
        their queue when the channel closes, and the next subscription reads less ahead."""
        if self._adaptive_prefetch is None or not self._buffer:
            return
        self._adaptive_prefetch.full(len(self._buffer))
        log.warning("deliveries given back", queue=self._queue, seconds=seconds, read_ahead=len(self._buffer))
        self.overrun = True
        self.stop()
        self._arrived.set()

    def _on_cancelled(self) -> None:
        log.warning("consumer cancelled by the broker", queue=self._queue)
        self._cancelled = True
        self._arrived.set()

    def _full(self) -> bool:
        """Whether the buffer has a full batch."""
        return len(self._buffer) >= self._limit or self._bytes >= self._batch_bytes

    def _raise_if_lost(self) -> None:
        """Raise BrokerLost after a loss. The broker delivers the buffered deliveries again."""
        if self._cancelled:
            raise ConsumerCancelled(f"the broker cancelled the consumer of queue {self._queue!r}")
        if self._channel.closed.done():
            raise BrokerLost(f"consumer of queue {self._queue!r}: {self._channel.closed.result()}")

    def _take(self, limit: int) -> list[Delivery]:
        batch: list[Delivery] = []
        taken = 0
        while self._buffer and len(batch) < limit and taken < self._batch_bytes:
            delivery = self._buffer.popleft()
            taken += len(delivery.body) + len(delivery.properties)
            batch.append(delivery)
        self._bytes -= taken
        if self._adaptive_prefetch is not None and self._adaptive_prefetch.took(len(batch), taken, self._wanted):
            self.overrun = True
        self._flow_control.went(taken)
        return batch
