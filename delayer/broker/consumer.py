"""The consuming side of the broker: gathers deliveries into batches, bounded by bytes and by count."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import structlog
from pamqp.commands import Queue as QueueMethods

from delayer.amqp.channel import Channel
from delayer.amqp.connection import Connection
from delayer.amqp.errors import BrokerLost, ConsumerCancelled
from delayer.amqp.values import Delivery
from delayer.broker.connection import ReconnectingConnection
from delayer.broker.pipelined_admin import check_queue

log = structlog.get_logger(__name__)

BUFFER_BYTES: Final = 32 << 20
"""Maximum buffered bytes. Above this the socket is not read, and further deliveries stay with the broker. The prefetch
bounds only the count, and five thousand messages of 1 MB are 5 GB."""
UNREAD_SECONDS: Final = 10.0
"""Seconds without reading after which a subscription closes, if it can begin again. RabbitMQ closes a connection that
reads nothing for 30 seconds."""
BATCH_BYTES: Final = 1 << 20
"""A batch ends with this many bytes. The process does nothing else while it reads the delays in their JSON bodies."""
PROPERTIES_BYTES: Final = 512 << 10
"""A batch ends with this many bytes of properties. The process does nothing else while it decodes them, and 125 kB of
small values may take 50 ms."""
IDLE_SECONDS: Final = 1.0
"""Seconds after which an idle next_batch returns, so that its caller can do other work."""
ANSWER_SECONDS: Final = 2.0
"""Seconds that a subscription waits for a connection, and for the broker to close a consumer."""
OPEN_ROOMS: Final = 2
CLOSE_ROOMS: Final = 4
"""While one subscription waits for the broker's answers, others may buffer this many times their room. Closing needs
the broker's answer, which shows that the acknowledgements arrived."""
NACKS_UNCOUNTED: Final = (4, 3)
"""The first version of RabbitMQ that does not count a nacked message as delivered."""
SAMPLE_PREFETCHES: Final = 10
"""The average size of messages is known after this many prefetches of them."""
MIN_GAIN: Final = 2
"""A new subscription is worth its cost only if it can buffer this many times the messages."""


class FlowControl:
    """The buffered bytes of one subscription, or of all that share a connection.

    Subscriptions that share a connection delay each other anyway, so they share one limit of ``room`` bytes. They close
    after ``unread_seconds`` without reading.
    """

    def __init__(self, room: int = BUFFER_BYTES, unread_seconds: float = UNREAD_SECONDS) -> None:
        self._room = room
        self._unread_seconds = unread_seconds
        self.buffered = 0
        self._waiting: set[AmqpSubscription] = set()
        self._extra_rooms: list[int] = []
        self.paused: set[Connection] = set()
        self._timer: asyncio.TimerHandle | None = None

    def is_behind(self, one: AmqpSubscription) -> bool:
        """Whether more deliveries may wait in the socket. With several subscriptions their owner is unknown."""
        return bool(self.paused) and self._waiting <= {one}

    def add_buffered(self, one: AmqpSubscription, socket: Connection, size: int) -> None:
        """Count ``size`` more buffered bytes of one subscription."""
        self.buffered += size
        self._waiting.add(one)
        if self.buffered > self._limit and socket not in self.paused:
            self.paused.add(socket)
            socket.pause_reading()
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(self._unread_seconds, self._on_stall)

    def remove_buffered(self, size: int) -> None:
        self.buffered -= size
        if self.buffered < self._room // 2:
            self._resume()

    def clear_buffered(self, one: AmqpSubscription, size: int) -> None:
        """Remove all ``size`` buffered bytes of one subscription."""
        self._waiting.discard(one)
        self.remove_buffered(size)

    @contextmanager
    def reading_on(self, rooms: int) -> Iterator[None]:
        """Read up to ``rooms`` times the room while a subscription waits for the broker's answer, which follows all
        deliveries."""
        self._extra_rooms.append(rooms)
        if self.buffered <= self._limit:
            self._resume()
        try:
            yield
        finally:
            self._extra_rooms.remove(rooms)

    @property
    def _limit(self) -> int:
        return self._room * max(self._extra_rooms, default=1)

    def _resume(self) -> None:
        for socket in self.paused:
            socket.resume_reading()
        self.paused.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_stall(self) -> None:
        self._timer = None
        for one in tuple(self._waiting):
            one.end_if_stalled(self._unread_seconds)


class AdaptivePrefetch:
    """The prefetch that suits the sizes of a queue's messages. ``room``: bytes that may be buffered."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._limit: int | None = None
        self._messages = 0
        self._bytes = 0

    def prefetch(self, wanted: int) -> int:
        """Return the prefetch of the next subscription, at most ``wanted``."""
        self._messages = self._bytes = 0
        return wanted if self._limit is None else min(wanted, self._limit)

    def record_overflow(self, messages: int) -> None:
        """Note that ``messages`` deliveries filled the buffer for too long."""
        self._limit = max(messages, 1)

    def record_batch(self, messages: int, size: int, wanted: int) -> bool:
        """Note a batch of ``size`` bytes. Returns whether a new subscription should read further ahead."""
        limit = self._limit
        if limit is None or limit >= wanted:
            return False
        self._messages += messages
        self._bytes += size
        if self._messages < SAMPLE_PREFETCHES * limit:
            return False
        would_fit = self._room * self._messages // max(self._bytes, 1)
        self._messages = self._bytes = 0
        if would_fit < MIN_GAIN * limit:
            return False
        self._limit = None if would_fit >= wanted else would_fit
        return True


@dataclass(eq=False)
class AmqpConsumer:
    """Satisfies intake.ports.Consumer. Each queue has its own connection, because pausing one must not pause another.
    Consumers that share a connection share its ``flow_control``; otherwise each subscription has its own.

    ``adaptive_prefetch``: the sizes of a queue's messages so far, so that a subscription may become ``overrun``, and
    its successor reads more or less ahead. ``one_active``: whether the queue has a single active consumer.
    """

    reconnecting: ReconnectingConnection
    batch_bytes: int = BATCH_BYTES
    adaptive_prefetch: AdaptivePrefetch | None = None
    flow_control: FlowControl | None = None
    one_active: bool = False
    _subscription: AmqpSubscription | None = field(default=None, init=False)

    @property
    def active(self) -> bool:
        return self._subscription is not None and self._subscription.active

    async def subscribe(self, queue: str, prefetch: int) -> AmqpSubscription:
        flow_control = self.flow_control or FlowControl()
        with flow_control.reading_on(OPEN_ROOMS):
            connection = await self.reconnecting.connection(ANSWER_SECONDS)
            channel = await connection.channel()
            subscription = AmqpSubscription(self, connection, channel, flow_control, queue, prefetch)
            try:
                await channel.qos(subscription.prefetch)
                await subscription.begin()
            except BaseException:
                subscription.stop()
                channel.abandon()  # No caller has this channel, so nothing else would free it.
                raise
            self._subscription = subscription
            return subscription


@dataclass(eq=False)
class AmqpSubscription:
    """Satisfies intake.ports.Subscription."""

    consumer: AmqpConsumer
    connection: Connection
    channel: Channel
    flow_control: FlowControl
    queue: str
    wanted_prefetch: int

    def __post_init__(self) -> None:
        adaptive = self.consumer.adaptive_prefetch
        self.prefetch = self.wanted_prefetch if adaptive is None else adaptive.prefetch(self.wanted_prefetch)
        self.overrun = False
        """Set if the deliveries filled the buffer for too long, or have become smaller."""
        self.is_settled = False
        """After the close: whether the broker has all acknowledgements."""
        self.active = not self.consumer.one_active
        """Whether the broker delivers to this consumer. AMQP does not announce which consumer is active. So this is
        known only for the queue's first consumer, and after a delivery."""
        self._consumer_tag: str | None = None
        self._cancelled = False
        self._stopped = False
        self._buffer: deque[Delivery] = deque()
        self._bytes = 0
        self._arrived = asyncio.Event()
        self._filled = asyncio.Event()
        self._batch_limit = 0  # The size of the batch that a caller waits for.
        self._last_batch_at = asyncio.get_running_loop().time()
        # The end of the channel also wakes a waiting next_batch.
        self.channel.closed.add_done_callback(lambda _: self._arrived.set())

    async def begin(self) -> None:
        """Start the consumer. Raises BrokerLost."""
        if self.consumer.one_active:
            # A quorum queue counts only its active consumer, so the count is meaningless once we consume.
            seen = await self.channel.call(check_queue(self.queue), QueueMethods.DeclareOk)
            self.active = not seen.consumer_count
            if not self.active:
                log.info("standing by", queue=self.queue)
        self._consumer_tag = await self.channel.consume(self.queue, self._on_delivery, self._on_cancelled)

    async def next_batch(self, limit: int, gather: float) -> list[Delivery]:
        if not self._buffer:
            self._arrived.clear()
            self._raise_if_lost()
            try:
                await asyncio.wait_for(self._arrived.wait(), IDLE_SECONDS)
            except TimeoutError:
                return []
        # The buffered deliveries are unsettled, so the broker sends only the rest of the prefetch.
        self._batch_limit = min(limit, self.prefetch)
        now = asyncio.get_running_loop().time
        if not self._is_full() and (left := self._last_batch_at + gather - now()) > 0:
            self._filled.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._filled.wait()
        self._raise_if_lost()
        self._last_batch_at = now()
        return self._pop_batch(limit)

    @property
    def behind(self) -> bool:
        return bool(self._buffer) or self.flow_control.is_behind(self)

    @property
    def lost(self) -> bool:
        """Whether no more deliveries arrive, and the last acknowledgements may not have reached the broker."""
        return self._cancelled or self.channel.closed.done()

    def ack(self, tag: int, *, multiple: bool) -> None:
        if not self.channel.closed.done():
            self.channel.ack(tag, multiple=multiple)

    async def close(self, seconds: float = ANSWER_SECONDS) -> None:
        """Close the consumer and its channel. The broker has ``seconds`` to close the consumer.

        A busy quorum queue may miss acknowledgements just before the channel closes, or after the consumer closes. On
        3.10.8 hundreds of messages were repeated after an orderly stop. Closing a consumer goes through the queue's
        log, after all its acknowledgements.

        Unsettled messages return to their places. From NACKS_UNCOUNTED on, a ``basic.nack`` after the consumer closed
        returns them, because the broker counts the end of a channel as a delivery, but not the nack. In older versions
        the end of the channel returns them, because 3.10 returns more than 32 nacked messages in the order of a hash.

        With a single active consumer the end of the channel returns them in every version. Closing the consumer would
        first activate a standby, and newer messages would overtake those that return. So this starts one more consumer,
        which stands by, because its start also goes through the queue's log.
        """
        await self.cancel(seconds)
        if self.is_settled and not self.consumer.one_active and self.connection.version >= NACKS_UNCOUNTED:
            self.channel.nack(0, multiple=True)
        await self.channel.close()

    async def cancel(self, seconds: float = ANSWER_SECONDS) -> None:
        """Close the consumer but not its channel: messages stop arriving, and none returns yet."""
        self.stop()
        tag, self._consumer_tag = self._consumer_tag, None
        if tag is None or self.lost:
            return
        try:
            with self.flow_control.reading_on(CLOSE_ROOMS):
                async with asyncio.timeout(seconds):
                    if self.consumer.one_active:
                        await self.channel.consume(self.queue, self._on_delivery, self._on_cancelled)
                    else:
                        await self.channel.cancel(tag)
            self.is_settled = not self.channel.closed.done()
        except (BrokerLost, TimeoutError) as lost:
            # The broker may deliver the last acknowledged messages again, as after any loss.
            log.warning("consumer not ended in order", queue=self.queue, reason=str(lost) or "no answer in time")

    def postpone(self, _tags: Sequence[int]) -> bool:
        """See intake.ports.Subscription. The broker returns deliveries to their places, so they come first again."""
        return False

    def stop(self) -> None:
        """Also drops the buffer."""
        self._stopped = True
        self._buffer.clear()
        self.flow_control.clear_buffered(self, self._bytes)
        self._bytes = 0

    def _on_delivery(self, delivery: Delivery) -> None:
        if self._stopped:
            return  # The delivery returns to its queue when the channel closes.
        if not self.active:
            self.active = True
            log.info("standby took over", queue=self.queue)
        size = len(delivery.body) + len(delivery.properties)
        self._buffer.append(delivery)
        self._bytes += size
        if self._is_full():
            self._filled.set()
        self.flow_control.add_buffered(self, self.connection, size)
        self._arrived.set()

    def end_if_stalled(self, seconds: float) -> None:
        """Stop the subscription, if it can begin again: its deliveries filled the buffer for ``seconds``. They return
        to their queue when the channel closes, and the next subscription reads less ahead."""
        if self.consumer.adaptive_prefetch is None or not self._buffer:
            return
        self.consumer.adaptive_prefetch.record_overflow(len(self._buffer))
        log.warning("deliveries given back", queue=self.queue, seconds=seconds, read_ahead=len(self._buffer))
        self.overrun = True
        self.stop()
        self._arrived.set()

    def _on_cancelled(self) -> None:
        log.warning("consumer cancelled by the broker", queue=self.queue)
        self._cancelled = True
        self._arrived.set()

    def _is_full(self) -> bool:
        """Whether the buffer has a whole batch."""
        return len(self._buffer) >= self._batch_limit or self._bytes >= self.consumer.batch_bytes

    def _raise_if_lost(self) -> None:
        """Raise BrokerLost after a loss. The broker redelivers the buffered messages."""
        if self._cancelled:
            raise ConsumerCancelled(f"the broker cancelled the consumer of queue {self.queue!r}")
        if self.channel.closed.done():
            raise BrokerLost(f"consumer of queue {self.queue!r}: {self.channel.closed.result()}")

    def _pop_batch(self, limit: int) -> list[Delivery]:
        batch: list[Delivery] = []
        size = properties = 0
        while (
            self._buffer and len(batch) < limit and size < self.consumer.batch_bytes and properties < PROPERTIES_BYTES
        ):
            delivery = self._buffer.popleft()
            size += len(delivery.body) + len(delivery.properties)
            properties += len(delivery.properties)
            batch.append(delivery)
        self._bytes -= size
        adaptive = self.consumer.adaptive_prefetch
        if adaptive is not None and adaptive.record_batch(len(batch), size, self.wanted_prefetch):
            self.overrun = True
        self.flow_control.remove_buffered(size)
        return batch
