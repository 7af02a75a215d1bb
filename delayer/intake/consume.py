"""The consumer of one queue: it subscribes, hands batches to a handler, publishes for deliveries, and acknowledges. It
begins again after a loss."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Final, NamedTuple

import structlog

from delayer.amqp import edits
from delayer.amqp.edits import Endpoints, HoldNote
from delayer.amqp.properties import Properties
from delayer.amqp.reading import message_id
from delayer.core.backoff import LogThrottle, first_of_each, pause
from delayer.core.counters import Counted, Counters
from delayer.core.errors import BrokerLost, NotTaken, Rejected, Unconfirmed
from delayer.core.faultpoint import reach
from delayer.core.heartbeat import Heartbeat
from delayer.core.hold import Confirmed, Outcome
from delayer.core.message import Delivery, Outgoing, Parcel, Schedule
from delayer.core.publisher import Publisher
from delayer.intake.holding import MessageHolder, Objection
from delayer.intake.ports import Consumer, IntakeSettings, Subscription
from delayer.retry import LOSSES, Backoff, Pause, raise_first, take_failures

log = structlog.get_logger(__name__)


class AckTracker:
    """Turns accepted deliveries into acknowledgements, as few as possible.

    Several parks are in flight, so batches finish out of order, and ``basic.ack multiple`` settles everything up to a
    tag. An acknowledgement therefore waits until every delivery before it is accepted. One frame settles thousands of
    deliveries that way. The cost: a crash repeats finished batches behind the oldest unfinished batch.

    A kept delivery (large, or not due yet) would hold up all behind it. So those are acknowledged one by one.

    Deliveries that are never accepted return to the queue when the channel closes.
    """

    def __init__(self, subscription: Subscription, progress: Callable[[], None] = lambda: None) -> None:
        """``progress`` feeds the watchdog."""
        self._subscription = subscription
        self.progress = progress
        self._order: deque[int] = deque()
        self._accepted: set[int] = set()
        self._single: set[int] = set()  # Acknowledged one by one, behind one that is not accepted.
        self._kept: dict[int, int] = {}
        self.kept_bytes = 0
        self.accepted_any = False

    @property
    def outstanding(self) -> int:
        """Deliveries read and not acknowledged yet."""
        return len(self._order) - len(self._single)

    def read(self, deliveries: Iterable[Delivery]) -> None:
        """Note deliveries in the order in which the broker sent them. Large ones count as kept."""
        for delivery in deliveries:
            self._order.append(delivery.tag)
            if len(delivery.body) > LARGE_BYTES:
                self.keep(delivery)

    @property
    def kept(self) -> int:
        """Deliveries that are kept for their instant, and not accepted yet."""
        return len(self._kept)

    def keep(self, delivery: Delivery) -> None:
        """Note that this delivery is kept for its instant."""
        size = len(delivery.body) + len(delivery.properties)
        self.kept_bytes += size - self._kept.get(delivery.tag, 0)
        self._kept[delivery.tag] = size

    def accept(self, tags: Iterable[int]) -> None:
        """These are safe: in the store, in the cascade, at their destination, or in the refused queue."""
        accepted = set(tags)
        self._accepted |= accepted
        for tag in accepted & self._kept.keys():
            self.kept_bytes -= self._kept.pop(tag)
        self.accepted_any = self.accepted_any or bool(self._accepted)
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
        """Acknowledge one by one the accepted deliveries behind an unaccepted one. At the end of a session the closing
        channel would requeue messages that are safe already."""
        for tag in sorted(self._accepted):
            self._subscription.ack(tag, multiple=False)
        self._single |= self._accepted
        self._accepted.clear()


KEPT_BYTES: Final = 16 << 20
"""A session reads no batch while it keeps this many bytes. It keeps messages for their instants, and large ones."""
LARGE_BYTES: Final = 1 << 20  # The batches in flight bound smaller ones.


class Session:
    """The work for one subscription. ``prefetch``: the most deliveries without an acknowledgement."""

    def __init__(self, subscription: Subscription, progress: Callable[[], None], in_flight: int) -> None:
        self.acks = AckTracker(subscription, progress)
        self.prefetch = subscription.prefetch
        self._in_flight = in_flight
        self._tasks: set[asyncio.Task[None]] = set()
        self._punctual: set[asyncio.Task[None]] = set()
        self._lost: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self.any_succeeded = False
        """Whether some work ended well. The reader sets it back."""
        self.failed = False  # Whether a failure of the work was raised.

    @property
    def busy(self) -> bool:
        """Whether any delivery is being worked on."""
        return bool(self._tasks or self._punctual or self.acks.kept)

    def start(self, work: Coroutine[None, None, None], *, punctual: bool = False) -> None:
        """Carry out ``work``, which accepts its deliveries. The first failure ends the session. ``punctual`` work does
        not count against the batches in flight, and a loss cancels it."""
        tasks = self._punctual if punctual else self._tasks
        task = asyncio.create_task(work, name="deliveries")
        tasks.add(task)
        task.add_done_callback(partial(self._ended, tasks))

    def _ended(self, tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if task.cancelled() or task.exception() is not None:
            self._lost.add(task)
        else:
            self.any_succeeded = True
        self._changed.set()

    async def room(self, is_full: Callable[[], bool] = lambda: False) -> None:
        """Wait until another batch may begin, and the handler is not full. Raises the first failure."""
        await self._until(
            lambda: len(self._tasks) < self._in_flight and self.acks.kept_bytes < KEPT_BYTES and not is_full()
        )

    async def settled(self) -> None:
        """Wait until all work is done, and no delivery is kept any more. Raises the first failure."""
        await self._until(lambda: not self.busy)

    async def wait_until_started(self, handler: Handler) -> None:
        """After a failure, wait until all waiting work has begun."""
        handler.flush()
        while handler.waiting:
            self._changed.clear()
            await self._changed.wait()

    async def _until(self, reached: Callable[[], bool]) -> None:
        while True:
            self._changed.clear()
            if self._lost:
                lost, self._lost = self._lost, set()
                self.failed = True
                raise_first(take_failures(lost))
            if reached():
                return
            await self._changed.wait()

    def cancel(self, *, punctual: bool = False) -> None:
        """Cancel all work, or the ``punctual`` work: its deliveries return to the queue, as after a crash."""
        for task in self._punctual if punctual else self._tasks | self._punctual:
            task.cancel()

    async def end(self) -> None:
        """Wait for the work that was begun. Raises every error that is not in LOSSES."""
        while tasks := self._tasks | self._punctual:
            await asyncio.wait(tasks)
            await asyncio.sleep(0)  # The callbacks of the tasks run now.
        raise_first(take_failures(self._lost), unless=LOSSES)


def new_id() -> bytes:
    """An ``x-delayer-id`` for a message that no store has numbered."""
    return os.urandom(16).hex().encode()


class Publication(NamedTuple):
    """A publish on behalf of a delivery.

    ``parcel`` is the message to hold if its destination does not take it; None where the publish must succeed (cascade,
    refused queue): the delivery returns to the queue otherwise. ``refusal``: the reason, of a refused message.
    ``earlier``: the note of earlier attempts. ``undelayed``: it asked for no delay.
    """

    delivery: Delivery
    outgoing: Outgoing
    parcel: Parcel | None = None
    refusal: str = ""
    earlier: HoldNote | None = None
    undelayed: bool = False

    @property
    def counted(self) -> Counted:
        if self.parcel is None:
            return "refused" if self.refusal else "cascaded", self.delivery.exchange, None
        delayed = self.earlier is None and not self.undelayed
        return "released", self.parcel.route, self.parcel.due_ms if delayed else None


def to_refused(
    delivery: Delivery, reason: str, names: Endpoints, token: bytes, parsed: Properties | None = None
) -> Publication:
    """The publication that puts a delivery into the refused queue. ``parsed``: its properties, if they are known."""
    properties, carried = edits.refused(delivery, reason, token, names.max_properties, parsed)
    outgoing = Outgoing(names.refused_exchange, delivery.routing_key, properties, delivery.body, carried)
    return Publication(delivery, outgoing, refusal=reason)


def rejected(reason: str) -> str:
    """Why a delivery is refused that the database rejects."""
    return f"the database of the store rejects it: {reason}"


class Dispatch:
    """Publishes on behalf of deliveries. It accepts confirmed ones, and holds those that a destination did not take."""

    def __init__(self, publisher: Publisher, holding: MessageHolder, live: IntakeSettings, counters: Counters) -> None:
        self.publisher = publisher
        self.new_id = holding.new_id
        self._holding = holding
        self._live = live
        self._counters = counters

    async def __call__(self, publications: Sequence[Publication], acks: AckTracker, due_ms: Sequence[int] = ()) -> None:
        """Accept or hold the delivery of every publication, in batches of the size that the publisher wants.

        ``due_ms``: the instant of each publication, in ascending order; none: now.

        Raises BrokerLost, StoreLost; NotTaken, and Unconfirmed, after every known outcome is settled.
        """
        stuck: list[str] = []
        begin = 0
        while begin < len(publications):
            if begin:
                acks.progress()  # A batch may take many publishes.
            end = begin + self.publisher.batch_limit
            stuck += await self._publish(publications[begin:end], acks, due_ms[begin:end])
            begin = end
        if stuck:
            raise NotTaken(f"{len(stuck)} of {len(publications)} messages were not taken; the first by {stuck[0]}")

    async def hold(self, objections: Sequence[Objection], acks: AckTracker) -> None:
        """Hold messages, and accept the deliveries of those that are held. If the database rejects one, each half is
        held by itself, and the one that is found is refused. Raises BrokerLost, StoreLost."""
        if not objections:
            return
        reason, middle = "", len(objections) // 2
        try:
            await self._holding.hold(objections, lambda held: acks.accept(one.delivery.tag for one in held))
        except Rejected as error:
            reason = rejected(str(error))
        if reason and middle:
            await self.hold(objections[:middle], acks)
            await self.hold(objections[middle:], acks)
        elif reason:
            refused = to_refused(objections[0].delivery, reason, self._live.names(), self.new_id())
            await self([refused], acks)

    async def _publish(self, publications: Sequence[Publication], acks: AckTracker, due_ms: Sequence[int]) -> list[str]:
        """Returns the destinations that did not take a message that they must take."""
        began = perf_counter()
        schedule = Schedule(due_ms, self._live.now_lower_ms)
        try:
            outgoing = [publication.outgoing for publication in publications]
            outcomes = await self.publisher.publish(outgoing, schedule if due_ms else None)
        except Unconfirmed as late:
            # Settle the known outcomes: an unanswered message must not repeat the others.
            await self._settle(publications, late.outcomes, schedule, acks)
            raise
        reach("intake.confirmed")
        if not due_ms:
            self._counters.took("publish", perf_counter() - began)
        self._counters.batch("publish", len(publications))
        return await self._settle(publications, outcomes, schedule, acks)

    async def _settle(
        self,
        publications: Sequence[Publication],
        outcomes: Sequence[Outcome | None],
        schedule: Schedule,
        acks: AckTracker,
    ) -> list[str]:
        through: list[Publication] = []
        objections: list[Objection] = []
        stuck: list[str] = []
        now_ms = self._live.now_lower_ms()
        for publication, outcome in zip(publications, outcomes, strict=True):
            if isinstance(outcome, Confirmed):
                through.append(publication)
            elif outcome is not None and publication.parcel is not None:
                parcel = publication.parcel._replace(token=publication.outgoing.token)
                objections.append(Objection(publication.delivery, parcel, outcome, publication.earlier))
            elif outcome is not None:
                exchange = publication.outgoing.exchange.decode("utf-8", "replace")
                stuck.append(f"exchange {exchange!r}: {outcome.text}")
        acks.accept(publication.delivery.tag for publication in through)
        self._counters.settled([one.counted for one in publications], outcomes, schedule, now_ms)
        self._counters.sent(one.parcel.target for one in through if one.parcel is not None)
        refused = [one for one in through if one.refusal]
        for one, more in first_of_each(refused, lambda one: one.delivery.exchange) if refused else ():
            log.warning(
                "message refused",
                reason=one.refusal,
                exchange=one.delivery.exchange,
                routing_key=one.delivery.routing_key,
                message_id=message_id(one.delivery.properties),
                more=more,
            )
        await self.hold(objections, acks)
        return stuck


class Handler(ABC):
    """The behaviour of a consumer: what happens to its deliveries. One session follows another."""

    over = False
    """Whether the consumption ends for good."""
    _session: Session

    def begin(self, session: Session) -> None:
        """A session begins."""
        self._session = session

    @abstractmethod
    def take(self, batch: Sequence[Delivery]) -> None:
        """Start the work for these deliveries in the session. The work accepts every one of them, or raises BrokerLost,
        StoreLost: that ends the session, which returns the rest to the queue."""

    def flush(self) -> None:
        """Start the work that waits for more."""
        return

    @property
    def full(self) -> bool:
        """Whether it takes no further batch before some of its work is done."""
        return False

    @property
    def waiting(self) -> bool:
        """Whether work waits for its instant. It starts by itself."""
        return False

    def end(self) -> None:
        """The session is over: start nothing any more."""
        return


@dataclass(frozen=True, slots=True)
class Intake:
    """How a session reads its queue.

    A batch gathers for up to ``gather`` seconds since the last one, because each costs some time. ``in_flight`` pieces
    of work run side by side.

    RabbitMQ closes the channel of a consumer that leaves a delivery unacknowledged for 30 minutes. So the subscription
    ends after ``give_back_after`` seconds in which fewer deliveries than ``prefetch`` were begun while more wait. Its
    deliveries return to the queue. No delivery is older than twice that when its turn comes.
    """

    queue: str
    prefetch: int
    give_back_after: float = 480.0
    batch: int = 2000
    gather: float = 0.005
    in_flight: int = 3


class QueueConsumer:
    """Runs until ``stopping`` is set. One of these per consumed queue."""

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
        """``reached`` changes when broker or store are reached again: a pause after a loss ends then."""
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
        """Whether the queue's messages come to this process, as far as this is known. Otherwise it stands by."""
        return self.consuming.is_set() and self._consumer.active

    async def run(self, stopping: asyncio.Event, pause: Pause = pause) -> None:
        """Consume; after a loss, sleep for a ``pause`` and begin again. Returns when stopping is set."""
        retry, throttle = Backoff(self._beat, stopping, pause=pause), LogThrottle()
        while not (stopping.is_set() or self._handler.over):
            interrupted, reached = False, self._reached()
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
                    step = {"next_step": lost.advice} if lost.advice else {}
                    cause = type(lost).__name__
                    log.warning(
                        "consuming interrupted", queue=self._intake.queue, cause=cause, reason=str(lost), **step
                    )
                interrupted = True
            finally:
                self.consuming.clear()
            if interrupted:
                await retry.pause(partial(self._reached_since, reached))
        self._forget()

    def _reached_since(self, before: object) -> bool:
        return self._reached() != before

    async def _consume(self, subscription: Subscription, stopping: asyncio.Event, retry: Backoff) -> None:
        session = Session(subscription, self._beat, self._intake.in_flight)
        self._handler.begin(session)
        now = asyncio.get_running_loop().time
        last_tag, well_tag, well = 0, 0, now()
        try:
            while not (stopping.is_set() or subscription.overrun or self._handler.over):
                self._beat()
                if not subscription.behind or last_tag - well_tag >= subscription.prefetch:
                    well_tag, well = last_tag, now()
                if now() - well > self._intake.give_back_after:
                    log.warning("deliveries given back", queue=self._intake.queue, seconds=self._intake.give_back_after)
                    break
                batch = await subscription.next_batch(self._intake.batch, self._intake.gather)
                if read := bool(batch):
                    last_tag = batch[-1].tag
                    reach("intake.read")
                    session.acks.read(batch)
                    self._handler.take(batch)
                    del batch  # The next one may be long in coming.
                await session.room(lambda: self._handler.full)
                if session.any_succeeded or not (read or session.busy):
                    session.any_succeeded = False
                    retry.succeeded()
            subscription.stop()
            self._handler.flush()
            await session.settled()
        except asyncio.CancelledError:
            # The stop took too long. Deliveries in flight return to the queue, as after a crash.
            session.cancel()
            raise
        except LOSSES as lost:
            if session.failed and (isinstance(lost, NotTaken) or not isinstance(lost, BrokerLost)):
                # The broker is there. A message that cannot go on must not keep back the others.
                await session.wait_until_started(self._handler)
            elif not session.failed:
                # The deliveries come again, so those that are not due yet are not published.
                session.cancel(punctual=True)
            # Some messages wait for room, in a full refused queue for example. The others need not wait longer.
            if isinstance(lost, NotTaken) and session.acks.accepted_any:
                retry.succeeded()
            raise
        finally:
            # A stop or a loss ends the wait for new deliveries. Deliveries in flight are settled first.
            # Each handler has deadlines of its own.
            self._handler.end()
            try:
                await session.end()
            finally:
                session.acks.flush()
                await subscription.close()
