"""The consuming side of the relay: deliveries gathered into batches, bounded by bytes as well as by count."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Final

import structlog

from delayer.broker.fitting import Fitting
from delayer.broker.relay import Relay
from delayer.core.errors import BrokerLost
from delayer.core.message import Delivery
from delayer.wire.channel import Channel
from delayer.wire.connection import Connection
from delayer.wire.errors import ConsumerCancelled

log = structlog.get_logger(__name__)

IDLE: Final = 1.0
"""Seconds after which an idle next_batch returns, so that its caller can look around."""
CONNECT: Final = 2.0
"""Seconds that a subscription waits for a connection before its caller is told."""
CANCEL: Final = 2.0
"""Seconds that the broker has to end a consumer."""
BATCH_BYTES: Final = 8 << 20
BUFFER_BYTES: Final = 32 << 20
"""Above this many bytes waiting here the socket is not read any more; the rest stays with the broker. The prefetch
counts messages, and five thousand of 1 MB would be five gigabytes."""
UNREAD: Final = 10.0
"""Seconds that the socket may be left alone, where the subscription can be begun again: RabbitMQ cuts a connection that
took nothing for thirty."""


class RelayConsumer:
    """Satisfies ports.Consumer, over a relay of its own: pausing one queue must not pause another.

    ``fitting``: what a queue's messages turned out to be like, where subscriptions may end themselves in order
    (``overrun``) to read less ahead, or more.
    """

    def __init__(
        self,
        relay: Relay,
        *,
        batch_bytes: int = BATCH_BYTES,
        buffer_bytes: int = BUFFER_BYTES,
        fitting: Fitting | None = None,
    ) -> None:
        self._relay = relay
        self._batch_bytes = batch_bytes
        self._buffer_bytes = buffer_bytes
        self._fitting = fitting

    async def subscribe(self, queue: str, prefetch: int) -> RelaySubscription:
        """Consume ``queue``. Raises BrokerLost, also where the queue is missing or forbidden."""
        connection = await self._relay.connection(CONNECT)
        channel = await connection.channel()
        try:
            subscription = RelaySubscription(
                connection,
                channel,
                queue,
                prefetch=prefetch,
                batch_bytes=self._batch_bytes,
                buffer_bytes=self._buffer_bytes,
                fitting=self._fitting,
            )
            await channel.qos(subscription.prefetch)
            await subscription.begin()
        except BaseException:
            channel.abandon()  # nobody else knows of it, and its number would never be free again
            raise
        return subscription


class RelaySubscription:
    """Satisfies ports.Subscription."""

    def __init__(
        self,
        connection: Connection,
        channel: Channel,
        queue: str,
        *,
        prefetch: int,
        batch_bytes: int,
        buffer_bytes: int,
        fitting: Fitting | None,
    ) -> None:
        self._connection = connection
        self._channel = channel
        self._queue = queue
        self._batch_bytes = batch_bytes
        self._buffer_bytes = buffer_bytes
        self._consumer_tag: str | None = None
        self._buffer: deque[Delivery] = deque()
        self._bytes = 0
        self._wanted = prefetch
        self._fitting = fitting
        self.prefetch = prefetch if fitting is None else fitting.prefetch(prefetch)
        self.overrun = False
        self.received = 0
        """Deliveries so far. The broker has so many acknowledgements, less the prefetch: or it would not send more."""
        self.in_order = False
        """Whether the broker ended the consumer, and so has all that was acknowledged before."""
        self._paused = False
        self._unread: asyncio.TimerHandle | None = None
        self._cancelled = False
        self._stopped = False
        self._arrived = asyncio.Event()
        self._filled = asyncio.Event()
        self._limit = 0  # of the batch that is waited for
        # Also wakes a waiting next_batch when the channel ends.
        channel.closed.add_done_callback(lambda _: self._arrived.set())

    async def begin(self) -> None:
        """Start the consumer. Raises BrokerLost."""
        self._consumer_tag = await self._channel.consume(self._queue, self._on_delivery, self._on_cancelled)

    async def next_batch(self, limit: int, gather: float) -> list[Delivery]:
        """See ports.Subscription."""
        if not self._buffer:
            self._arrived.clear()
            self._raise_if_lost()
            try:
                await asyncio.wait_for(self._arrived.wait(), IDLE)
            except TimeoutError:
                return []
        # What is here is unsettled: the broker sends no more of it than the prefetch, and to wait for more is in vain.
        self._limit = min(limit, self.prefetch)
        if not self._full():
            self._filled.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(gather):
                    await self._filled.wait()
        self._raise_if_lost()
        return self._take(limit)

    @property
    def behind(self) -> bool:
        """See ports.Subscription."""
        return bool(self._buffer) or self._paused

    @property
    def lost(self) -> bool:
        """Nothing comes any more, and what was acknowledged last may not have come to the broker."""
        return self._cancelled or self._channel.closed.done()

    def ack(self, tag: int, *, multiple: bool) -> None:
        """See ports.Subscription."""
        if not self._channel.closed.done():
            self._channel.ack(tag, multiple=multiple)

    async def stop_deliveries(self) -> None:
        """See ports.Subscription. The consumer itself ends in :meth:`close`, behind the last acknowledgement."""
        self._stop()

    async def close(self, seconds: float = CANCEL) -> None:
        """See ports.Subscription. ``seconds`` is what the broker has to end the consumer.

        A quorum queue may overlook acknowledgements that are followed by the end of the channel, or that follow the
        end of the consumer, while it is busy (seen on 3.10.8: hundreds of messages repeated after a stop in order). The
        end of a consumer goes through the queue's log, behind everything that the consumer acknowledged before.
        """
        self._stop()
        if self._consumer_tag is not None and not self._cancelled and not self._channel.closed.done():
            try:
                async with asyncio.timeout(seconds):
                    await self._channel.cancel(self._consumer_tag)
                self.in_order = not self._channel.closed.done()
            except (BrokerLost, TimeoutError) as lost:
                # What was acknowledged may be delivered again, as after any loss.
                log.warning("consumer not ended in order", queue=self._queue, reason=str(lost) or "no answer in time")
        await self._channel.close()

    def _stop(self) -> None:
        """Nobody takes a batch any more: keep nothing, and read on, or the broker's answers would never be seen."""
        self._stopped = True
        self._buffer.clear()
        self._bytes = 0
        self._resume()

    def _on_delivery(self, delivery: Delivery) -> None:
        self.received += 1
        if self._stopped:
            return  # it returns to its queue when the channel closes
        self._buffer.append(delivery)
        self._bytes += len(delivery.body) + len(delivery.properties)
        if self._full():
            self._filled.set()
        if self._bytes > self._buffer_bytes and not self._paused:
            self._paused = True
            self._connection.pause_reading()
            if self._fitting is not None:
                self._unread = asyncio.get_running_loop().call_later(UNREAD, self._let_go, self._fitting)
        self._arrived.set()

    def _let_go(self, fitting: Fitting) -> None:
        """Too much came, for too long: what nobody took yet returns to its queue when the channel closes."""
        fitting.full(len(self._buffer))
        log.warning("deliveries given back", queue=self._queue, seconds=UNREAD, read_ahead=len(self._buffer))
        self.overrun = True
        self._stop()
        self._arrived.set()

    def _on_cancelled(self) -> None:
        log.warning("consumer cancelled by the broker", queue=self._queue)
        self._cancelled = True
        self._arrived.set()

    def _full(self) -> bool:
        """There is as much as a batch may have."""
        return len(self._buffer) >= self._limit or self._bytes >= self._batch_bytes

    def _raise_if_lost(self) -> None:
        """What is still buffered then is not handed out: the broker delivers it again to somebody."""
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
        if self._fitting is not None and self._fitting.took(len(batch), taken, self._wanted):
            self.overrun = True
        if self._bytes < self._buffer_bytes // 2:
            self._resume()
        return batch

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._connection.resume_reading()
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None
