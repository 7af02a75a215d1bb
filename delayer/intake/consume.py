"""The consumer of one queue: it subscribes, hands batches to a handler, acknowledges, and begins again after a loss."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from delayer.broker.ports import Consumer, Heartbeat, Subscription
from delayer.broker.retry import LOSSES, Retry, raise_first, take_failures
from delayer.core.backoff import LogThrottle
from delayer.core.errors import NotTaken
from delayer.core.faultpoint import reach
from delayer.core.message import Delivery

log = structlog.get_logger(__name__)


class AckTracker:
    """Turns accepted deliveries into acknowledgements, as few as possible.

    Several parks are in flight, so batches finish out of order, and ``basic.ack multiple`` settles everything up to a
    tag. An acknowledgement therefore waits until every delivery before it is accepted. One frame settles thousands of
    deliveries that way. In return, a crash repeats the finished batches behind the oldest unfinished one.

    Deliveries that are never accepted return to the queue when the channel closes.
    """

    def __init__(self, subscription: Subscription, progress: Callable[[], None] = lambda: None) -> None:
        """``progress`` feeds the watchdog."""
        self._subscription = subscription
        self.progress = progress
        self._order: deque[int] = deque()
        self._accepted: set[int] = set()
        self.accepted_any = False

    @property
    def outstanding(self) -> int:
        """Deliveries read and not acknowledged yet."""
        return len(self._order)

    def read(self, deliveries: Iterable[Delivery]) -> None:
        """Note deliveries in the order in which the broker sent them."""
        self._order.extend(delivery.tag for delivery in deliveries)

    def accept(self, tags: Iterable[int]) -> None:
        """These are safe: in the store, in the cascade, at their destination, or in the refused queue."""
        self._accepted.update(tags)
        self.accepted_any = self.accepted_any or bool(self._accepted)
        last = None
        while self._order and self._order[0] in self._accepted:
            last = self._order.popleft()
            self._accepted.remove(last)
        if last is not None:
            self._subscription.ack(last, multiple=True)
            reach("intake.acked")

    def flush(self) -> None:
        """Acknowledge one by one the accepted deliveries behind an unaccepted one, at the end of a session. Otherwise
        the closing channel would requeue messages that are safe already."""
        for tag in sorted(self._accepted):
            self._subscription.ack(tag, multiple=False)
        self._order = deque(tag for tag in self._order if tag not in self._accepted)
        self._accepted.clear()


Handle = Callable[[Sequence[Delivery], AckTracker], Coroutine[None, None, None]]
"""Carries a batch out and accepts every delivery of it. Raises BrokerLost, StoreLost: they end the subscription, which
returns the rest to the queue."""


@dataclass(frozen=True, slots=True)
class Intake:
    """How a session reads its queue.

    The first delivery of a batch waits up to ``gather`` seconds for others, because a commit costs the same for one
    message as for many. A message that is due sooner is late by that time. A relative delay without a broker's
    timestamp counts from the reading of the batch. ``in_flight`` batches overlap each other's waiting.

    RabbitMQ closes the channel of a consumer that leaves a delivery unacknowledged for 30 minutes. So the subscription
    ends after ``give_back_after`` seconds in which fewer deliveries than ``prefetch`` were begun while more wait. Its
    deliveries return to the queue. No delivery is older than twice that when its turn comes.
    """

    queue: str
    prefetch: int
    give_back_after: float = 480.0
    batch: int = 2000
    gather: float = 0.010
    in_flight: int = 3


class QueueConsumer:
    """Runs until ``stopping`` is set. One of these per consumed queue."""

    def __init__(
        self,
        intake: Intake,
        consumer: Consumer,
        handle: Handle,
        *,
        prepare: Callable[[], Awaitable[None]],
        heartbeat: Heartbeat,
    ) -> None:
        self._intake = intake
        self._consumer = consumer
        self._handle = handle
        self._prepare = prepare
        self._beat = partial(heartbeat.beat, intake.queue)
        self._forget = partial(heartbeat.forget, intake.queue)
        self.consuming = asyncio.Event()

    async def run(self, stopping: asyncio.Event) -> None:
        """Consume; after a loss, wait a little longer each time and begin again. Returns when stopping is set."""
        retry, throttle = Retry(stopping, self._beat), LogThrottle()
        while not stopping.is_set():
            interrupted = False
            try:
                await self._prepare()
                subscription = await self._consumer.subscribe(self._intake.queue, self._intake.prefetch)
                log.info("consuming", queue=self._intake.queue, prefetch=subscription.prefetch)
                self.consuming.set()
                await self._consume(subscription, stopping, retry)
            except LOSSES as lost:
                if stopping.is_set() and not self.consuming.is_set():
                    break  # A daemon that stops while it starts logs no loss.
                if self.consuming.is_set():
                    throttle.reset()
                if throttle.should_log(str(lost), asyncio.get_running_loop().time()):
                    log.warning(
                        "consuming interrupted", queue=self._intake.queue, cause=type(lost).__name__, reason=str(lost)
                    )
                interrupted = True
            finally:
                self.consuming.clear()
            if interrupted:
                await retry.pause()
        self._forget()

    async def _consume(self, subscription: Subscription, stopping: asyncio.Event, retry: Retry) -> None:
        acks = AckTracker(subscription, self._beat)
        running: set[asyncio.Task[None]] = set()
        now = asyncio.get_running_loop().time
        last_tag, well_tag, well = 0, 0, now()
        try:
            while not (stopping.is_set() or subscription.overrun):
                self._beat()
                if not subscription.behind or last_tag - well_tag >= subscription.prefetch:
                    well_tag, well = last_tag, now()
                if now() - well > self._intake.give_back_after:
                    log.warning("deliveries given back", queue=self._intake.queue, seconds=self._intake.give_back_after)
                    break
                batch = await subscription.next_batch(self._intake.batch, self._intake.gather)
                if batch:
                    last_tag = batch[-1].tag
                    reach("intake.read")
                    acks.read(batch)
                    running.add(asyncio.create_task(self._handle(batch, acks), name=f"handle {len(batch)}"))
                carried = await self._reap(running, at_most=self._intake.in_flight - 1)
                if carried or not (batch or running):
                    retry.succeeded()
            await subscription.stop_deliveries()
            await self._reap(running, at_most=0)
        except asyncio.CancelledError:
            # The time to stop in is over. Deliveries in flight return to the queue, as after a crash.
            for task in running:
                task.cancel()
            raise
        except NotTaken:
            # Some messages wait for room, in a full refused queue for example. The others need not wait longer.
            if acks.accepted_any:
                retry.succeeded()
            raise
        finally:
            # A stop or a loss ends the wait for new deliveries. Deliveries in flight are settled first.
            # Each handler has deadlines of its own.
            if running:
                await asyncio.wait(running)
            acks.flush()
            await subscription.close()
            raise_first(take_failures(running), unless=LOSSES)  # The session is over: its losses are expected.

    async def _reap(self, running: set[asyncio.Task[None]], at_most: int) -> bool:
        """Wait until at most ``at_most`` handlers run. Returns whether one finished. Raises the first failure."""
        carried = False
        while running:
            waiting = None if len(running) > at_most else 0
            done, _ = await asyncio.wait(running, timeout=waiting, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            running -= done
            if any(task.cancelled() or task.exception() is not None for task in done):
                raise_first(take_failures(done))
            carried = True
        return carried
