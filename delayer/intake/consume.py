"""The consumer of one queue: it subscribes, passes batches to a handler, acknowledges accepted deliveries, and
resubscribes after a loss."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from delayer.core.backoff import LogThrottle, pause
from delayer.core.errors import BrokerLost, NotTaken
from delayer.core.faultpoint import reach
from delayer.core.heartbeat import Heartbeat
from delayer.core.message import Delivery
from delayer.intake.ports import Consumer, Subscription
from delayer.retry import LOSSES, Backoff, Pause, raise_first, take_failures

log = structlog.get_logger(__name__)


class AckTracker:
    """Acknowledges accepted deliveries in as few frames as possible.

    Several batches are in flight and finish out of order, and ``basic.ack multiple`` settles everything up to a tag. So
    an acknowledgement waits until every delivery before it is accepted, and one frame settles thousands. The cost is
    that a crash repeats the finished batches after the oldest unfinished one.

    A kept delivery (large, or not due yet) would hold up all that follow, so those are acknowledged one by one.

    Deliveries that are never accepted return to the queue when the channel closes.
    """

    def __init__(self, subscription: Subscription, progress: Callable[[], None] = lambda: None) -> None:
        """``progress`` feeds the watchdog."""
        self._subscription = subscription
        self.progress = progress
        self._order: deque[int] = deque()
        self._accepted: set[int] = set()
        self._single: set[int] = set()  # Acknowledged one by one, after one that is not accepted.
        self._kept: dict[int, int] = {}
        self.kept_bytes = 0
        self.has_accepted = False

    @property
    def outstanding(self) -> int:
        """Number of deliveries not acknowledged yet."""
        return len(self._order) - len(self._single)

    @property
    def kept(self) -> int:
        """Number of kept deliveries that are not accepted yet."""
        return len(self._kept)

    def add(self, deliveries: Iterable[Delivery]) -> None:
        """Add deliveries, in the order in which the broker sent them. Large ones count as kept."""
        for delivery in deliveries:
            self._order.append(delivery.tag)
            if len(delivery.body) > LARGE_BYTES:
                self.keep(delivery)

    def keep(self, delivery: Delivery) -> None:
        """Note that this delivery stays in memory, which KEPT_BYTES bounds."""
        size = len(delivery.body) + len(delivery.properties)
        self.kept_bytes += size - self._kept.get(delivery.tag, 0)
        self._kept[delivery.tag] = size

    def accept(self, tags: Iterable[int]) -> None:
        """Accept deliveries whose messages are safe: in the store, the cascade, their destination or the refused
        queue."""
        accepted = set(tags)
        self._accepted |= accepted
        for tag in accepted & self._kept.keys():
            self.kept_bytes -= self._kept.pop(tag)
        self.has_accepted = self.has_accepted or bool(self._accepted)
        last = None
        while self._order and (self._order[0] in self._accepted or self._order[0] in self._single):
            tag = self._order.popleft()
            if tag in self._single:
                self._single.remove(tag)
            else:
                self._accepted.remove(tag)
                last = tag
        if last is not None:
            self._subscription.ack(last, multiple=True)
            reach("intake.acked")
        if self._accepted and self._order and self._order[0] in self._kept:
            self.flush()
            reach("intake.acked")

    def flush(self) -> None:
        """Acknowledge accepted deliveries one by one, although one before them is not accepted. At the end of a session
        the closing channel would requeue them."""
        for tag in sorted(self._accepted):
            self._subscription.ack(tag, multiple=False)
        self._single |= self._accepted
        self._accepted.clear()


KEPT_BYTES: Final = 16 << 20
"""A session reads no batch while it keeps this many bytes. It keeps large messages, and those not due yet."""
LARGE_BYTES: Final = 1 << 20
"""The batches in flight bound the memory of smaller messages."""


class Session:
    """The work for the deliveries of one subscription."""

    def __init__(self, subscription: Subscription, progress: Callable[[], None], in_flight: int) -> None:
        self.acks = AckTracker(subscription, progress)
        self.prefetch = subscription.prefetch
        """Maximum number of deliveries without an acknowledgement."""
        self._in_flight = in_flight
        self._tasks: set[asyncio.Task[None]] = set()
        self._punctual: set[asyncio.Task[None]] = set()
        self._lost: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self.has_succeeded = False
        """Whether some work succeeded. The reader sets it back."""
        self.has_failed = False
        """Whether a failure of the work was raised."""

    @property
    def is_busy(self) -> bool:
        return bool(self._tasks or self._punctual or self.acks.kept)

    def start(self, work: Coroutine[None, None, None], *, punctual: bool = False) -> None:
        """Start ``work``, which accepts its deliveries. The first failure ends the session. ``punctual`` work does not
        count as a batch in flight, and a lost subscription cancels it."""
        tasks = self._punctual if punctual else self._tasks
        task = asyncio.create_task(work, name="deliveries")
        tasks.add(task)
        task.add_done_callback(partial(self._on_done, tasks))

    def _on_done(self, tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if task.cancelled() or task.exception() is not None:
            self._lost.add(task)
        else:
            self.has_succeeded = True
        self._changed.set()

    async def wait_for_room(self, is_full: Callable[[], bool] = lambda: False) -> None:
        """Wait until another batch may begin, and the handler is not full. Raises the first failure."""
        await self._wait_until(
            lambda: len(self._tasks) < self._in_flight and self.acks.kept_bytes < KEPT_BYTES and not is_full()
        )

    async def wait_until_idle(self) -> None:
        """Wait until all work is done, and no delivery is kept. Raises the first failure."""
        await self._wait_until(lambda: not self.is_busy)

    async def wait_until_started(self, handler: Handler) -> None:
        """After a failure, wait until all waiting work has begun."""
        handler.flush()
        while handler.is_waiting:
            self._changed.clear()
            await self._changed.wait()

    async def _wait_until(self, is_reached: Callable[[], bool]) -> None:
        while True:
            self._changed.clear()
            if self._lost:
                lost, self._lost = self._lost, set()
                self.has_failed = True
                raise_first(take_failures(lost))
            if is_reached():
                return
            await self._changed.wait()

    def cancel(self, *, only_punctual: bool = False) -> None:
        """Cancel work. Its deliveries return to the queue, as after a crash."""
        for task in self._punctual if only_punctual else self._tasks | self._punctual:
            task.cancel()

    async def finish(self) -> None:
        """Wait for work in progress. Raises every error that is not in LOSSES."""
        while tasks := self._tasks | self._punctual:
            await asyncio.wait(tasks)
            await asyncio.sleep(0)  # The callbacks of the tasks run now.
        raise_first(take_failures(self._lost), unless=LOSSES)


class Handler(ABC):
    """Decides what happens to the deliveries of a consumer. One session follows another."""

    is_over = False
    """Whether the consumption ends for good."""
    _session: Session

    def begin(self, session: Session) -> None:
        """Begin a session."""
        self._session = session

    @abstractmethod
    def handle(self, batch: Sequence[Delivery]) -> None:
        """Start the work for these deliveries in the session. The work accepts each of them, or raises BrokerLost or
        StoreLost, which ends the session and returns the rest to the queue."""

    def flush(self) -> None:
        """Start the work that waits for more deliveries."""
        return

    @property
    def is_full(self) -> bool:
        """Whether it accepts no further batch until some of its work is done."""
        return False

    @property
    def is_waiting(self) -> bool:
        """Whether work waits until it is due. It starts by itself."""
        return False

    def end(self) -> None:
        """End the session: start no more work."""
        return


@dataclass(frozen=True, slots=True)
class Intake:
    """How a session reads its queue.

    A batch gathers for up to ``gather`` seconds since the last one, because each has a fixed cost. Up to ``in_flight``
    pieces of work run at a time.

    RabbitMQ closes the channel of a consumer that leaves a delivery unacknowledged for 30 minutes. So the subscription
    ends after ``give_back_after`` seconds in which fewer deliveries than ``prefetch`` were begun while more waited. Its
    deliveries return to the queue. No delivery is handled when it is older than twice that.
    """

    queue: str
    prefetch: int
    give_back_after: float = 480.0
    batch: int = 2000
    gather: float = 0.005
    in_flight: int = 3


class _Pace:
    """Whether a subscription is read fast enough: a whole prefetch in ``seconds``, or until nothing waits."""

    def __init__(self, subscription: Subscription, seconds: float) -> None:
        self._subscription = subscription
        self._seconds = seconds
        self.last_tag = self._tag = 0
        self._since = asyncio.get_running_loop().time()

    def is_too_slow(self) -> bool:
        now = asyncio.get_running_loop().time()
        if not self._subscription.behind or self.last_tag - self._tag >= self._subscription.prefetch:
            self._tag, self._since = self.last_tag, now
        return now - self._since > self._seconds


class QueueConsumer:
    """Consumes one queue until ``stopping`` is set."""

    def __init__(
        self,
        intake: Intake,
        consumer: Consumer,
        handler: Handler,
        *,
        prepare: Callable[[], Awaitable[None]],
        heartbeat: Heartbeat,
        reached: Callable[[], object] = lambda: None,
    ) -> None:
        """``reached`` changes when the broker or the store is reachable again, which ends a pause after a loss."""
        self._intake = intake
        self._consumer = consumer
        self._handler = handler
        self._prepare = prepare
        self._reached = reached
        self._beat = partial(heartbeat.beat, intake.queue)
        self._forget = partial(heartbeat.forget, intake.queue)
        self.consuming = asyncio.Event()

    @property
    def active(self) -> bool:
        """Whether the broker delivers the queue's messages to this process, as far as known. Otherwise it stands by."""
        return self.consuming.is_set() and self._consumer.active

    async def run(self, stopping: asyncio.Event, pause: Pause = pause) -> None:
        """Consume. After a loss, sleep for a ``pause`` and begin again. Returns when ``stopping`` is set."""
        retry, throttle = Backoff(self._beat, stopping, pause=pause), LogThrottle()
        while not (stopping.is_set() or self._handler.is_over):
            interrupted, reached = False, self._reached()
            try:
                await self._prepare()
                subscription = await self._consumer.subscribe(self._intake.queue, self._intake.prefetch)
                log.info("consuming", queue=self._intake.queue, prefetch=subscription.prefetch)
                self.consuming.set()
                await self._consume(subscription, stopping, retry)
            except LOSSES as lost:
                if stopping.is_set() and not self.consuming.is_set():
                    break  # A daemon that stops while it starts does not log a loss.
                if self.consuming.is_set():
                    throttle.reset()
                if throttle.should_log(str(lost), asyncio.get_running_loop().time()):
                    step = {"next_step": lost.advice} if lost.advice else {}
                    cause = type(lost).__name__
                    log.warning(
                        "consuming interrupted", queue=self._intake.queue, cause=cause, reason=str(lost), **step
                    )
                interrupted = True
            finally:
                self.consuming.clear()
            if interrupted:
                await retry.pause(partial(self._is_reached_again, reached))
        self._forget()

    def _is_reached_again(self, before: object) -> bool:
        return self._reached() != before

    async def _consume(self, subscription: Subscription, stopping: asyncio.Event, retry: Backoff) -> None:
        session = Session(subscription, self._beat, self._intake.in_flight)
        self._handler.begin(session)
        try:
            await self._read(subscription, session, stopping, retry)
            subscription.stop()
            self._handler.flush()
            await session.wait_until_idle()
        except asyncio.CancelledError:
            # The stop took too long. Deliveries in flight return to the queue, as after a crash.
            session.cancel()
            raise
        except LOSSES as lost:
            if not session.has_failed:
                # The subscription is lost and its deliveries return, so do not publish those not due yet.
                session.cancel(only_punctual=True)
            elif isinstance(lost, NotTaken) or not isinstance(lost, BrokerLost):
                # The broker is reachable. A message that is stuck must not hold up the rest.
                await session.wait_until_started(self._handler)
            # Some messages wait for room, for example in a full refused queue. The rest need not wait longer.
            if isinstance(lost, NotTaken) and session.acks.has_accepted:
                retry.succeeded()
            raise
        finally:
            # Stop reading, and settle the deliveries in flight. Each handler has its own deadlines.
            self._handler.end()
            try:
                await session.finish()
            finally:
                session.acks.flush()
                await subscription.close()

    async def _read(
        self, subscription: Subscription, session: Session, stopping: asyncio.Event, retry: Backoff
    ) -> None:
        """Pass batches to the handler until the subscription should end. Raises its loss, or the work's first
        failure."""
        pace = _Pace(subscription, self._intake.give_back_after)
        while not (stopping.is_set() or subscription.overrun or self._handler.is_over):
            self._beat()
            if pace.is_too_slow():
                log.warning("deliveries given back", queue=self._intake.queue, seconds=self._intake.give_back_after)
                return
            batch = await subscription.next_batch(self._intake.batch, self._intake.gather)
            if has_read := bool(batch):
                pace.last_tag = batch[-1].tag
                reach("intake.read")
                session.acks.add(batch)
                self._handler.handle(batch)
                del batch  # Free it before the next one, which may take long to arrive.
            await session.wait_for_room(lambda: self._handler.is_full)
            if session.has_succeeded or not (has_read or session.is_busy):
                session.has_succeeded = False
                retry.succeeded()
