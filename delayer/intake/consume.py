"""The consumer of one queue: it subscribes, passes batches to a handler, acknowledges accepted deliveries, and
resubscribes after a loss."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import structlog

from delayer.amqp.errors import BrokerLost
from delayer.amqp.values import Delivery
from delayer.core.backoff import LogThrottle, pause
from delayer.core.errors import NotTaken
from delayer.core.faultpoint import reach
from delayer.core.heartbeat import Heartbeat
from delayer.intake.ports import Consumer, Subscription
from delayer.intake.session import Session, Unsettled
from delayer.retry import LOSSES, Backoff, Pause

log = structlog.get_logger(__name__)

UNSTEADY_LOSSES: Final = 5
UNSTEADY_SECONDS: Final = 60.0
"""UNSTEADY_LOSSES interruptions within UNSTEADY_SECONDS show that a part of the messages cannot be settled."""


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
    deliveries return to the queue. A delivery older than twice that is not handled.
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


@dataclass(eq=False)
class QueueConsumer:
    """Consumes one queue. ``prepare`` runs before each session. ``reached`` changes when the broker or the store is
    reachable again, which ends a pause after a loss."""

    intake: Intake
    consumer: Consumer
    handler: Handler
    prepare: Callable[[], Awaitable[None]]
    heartbeat: Heartbeat
    reached: Callable[[], object] = lambda: None
    consuming: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    unsettled: Unsettled = field(default_factory=Unsettled, init=False)
    _not_taken: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=UNSTEADY_LOSSES), init=False)

    def _beat(self) -> None:
        self.heartbeat.beat(self.intake.queue)

    @property
    def active(self) -> bool:
        """Whether the broker delivers the queue's messages to this process, as far as known. Otherwise it stands by."""
        return self.consuming.is_set() and self.consumer.active

    @property
    def unsteady(self) -> str:
        """The last reason why the broker did not take a publish, if such reasons interrupt the consumer again and
        again; else ""."""
        since = asyncio.get_running_loop().time() - UNSTEADY_SECONDS
        losses = self._not_taken
        return losses[-1][1] if len(losses) == UNSTEADY_LOSSES and losses[0][0] > since else ""

    async def run(self, stopping: asyncio.Event, pause: Pause = pause) -> None:
        """Consume. After a loss, sleep for a ``pause`` and begin again. Returns when ``stopping`` is set."""
        retry, throttle = Backoff(self._beat, stopping, pause=pause), LogThrottle()
        while not (stopping.is_set() or self.handler.is_over):
            interrupted, reached = False, self.reached()
            try:
                await self.prepare()
                subscription = await self.consumer.subscribe(self.intake.queue, self.intake.prefetch)
                log.info("consuming", queue=self.intake.queue, prefetch=subscription.prefetch)
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
                    log.warning("consuming interrupted", queue=self.intake.queue, cause=cause, reason=str(lost), **step)
                interrupted = True
                if isinstance(lost, NotTaken):
                    self._not_taken.append((asyncio.get_running_loop().time(), str(lost)))
            finally:
                self.consuming.clear()
            if interrupted:
                await retry.pause(partial(self._is_reached_again, reached))
        self.heartbeat.forget(self.intake.queue)

    def _is_reached_again(self, before: object) -> bool:
        return self.reached() != before

    async def _consume(self, subscription: Subscription, stopping: asyncio.Event, retry: Backoff) -> None:
        session = Session(subscription, self._beat, self.intake.in_flight, self.unsettled)
        self.handler.begin(session)
        try:
            await self._read(subscription, session, stopping, retry)
            subscription.stop()
            self.handler.flush()
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
                self.handler.flush()
                await session.wait_while(lambda: self.handler.is_waiting)
            # Some messages wait for room, for example in a full refused queue. The rest need not wait longer.
            if isinstance(lost, NotTaken) and (session.acks.has_accepted or session.acks.has_postponed):
                retry.succeeded()
            raise
        finally:
            # Stop reading, and settle the deliveries in flight. Each handler has its own deadlines.
            self.handler.end()
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
        pace = _Pace(subscription, self.intake.give_back_after)
        while not (stopping.is_set() or subscription.overrun or self.handler.is_over):
            self._beat()
            if pace.is_too_slow():
                log.warning("deliveries given back", queue=self.intake.queue, seconds=self.intake.give_back_after)
                return
            batch = await subscription.next_batch(self.intake.batch, self.intake.gather)
            if has_read := bool(batch):
                pace.last_tag = batch[-1].tag
                reach("intake.read")
                session.acks.add(batch)
                self.handler.handle(batch)
                del batch  # Free it before the next batch, which may take long to arrive.
                await asyncio.sleep(0)  # Batches may be there already, and each may take long to decode.
            await session.wait_for_room(lambda: self.handler.is_full)
            if session.has_succeeded or not (has_read or session.is_busy):
                session.has_succeeded = False
                session.note_progress()
                retry.succeeded()
