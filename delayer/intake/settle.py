"""Settles deliveries: runs their work, publishes or holds their messages, and acknowledges those that are safe.

Held messages go to the store if this process has a lane. Without one they return to the cascade, in an envelope that
counts the attempts. After :data:`MAX_ATTEMPTS`, or if only an operator can decide, they go to the strays queue
(``delayer strays``).
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic, perf_counter
from typing import Final, NamedTuple, TypeVar

import structlog

from delayer.amqp.properties import Properties
from delayer.amqp.values import Confirmed, Delivery, Outgoing, Pace
from delayer.core.backoff import first_of_each, pause_ms
from delayer.core.counters import Counted, Counters
from delayer.core.delay_headers import whole_seconds_until
from delayer.core.errors import NotTaken, Rejected, Unconfirmed
from delayer.core.faultpoint import reach
from delayer.core.hold import Hold, Outcome
from delayer.core.message import Parcel
from delayer.core.publisher import Publisher
from delayer.format.envelope import Endpoints, HoldNote, into_broker, to_strays
from delayer.format.reading import message_id
from delayer.format.refusal import refused_properties
from delayer.held import report_held
from delayer.intake.ports import Backlog, IntakeSettings, Subscription
from delayer.retry import LOSSES, raise_first, take_failures

log = structlog.get_logger(__name__)
T = TypeVar("T")

KEPT_BYTES: Final = 16 << 20
"""A session reads no batch while it keeps this many bytes. It keeps large messages, and those not due yet."""
LARGE_BYTES: Final = 1 << 20
"""A delivery with a larger body counts as kept. The number of batches in flight bounds the memory of the others."""
MAX_ATTEMPTS: Final = 10
"""Attempts after which a message in the cascade goes to the strays queue."""


class AckTracker:
    """Acknowledges accepted deliveries in as few frames as possible.

    Several batches are in flight and finish out of order, and ``basic.ack multiple`` settles everything up to a tag. So
    an acknowledgement waits until every delivery before it is accepted, and one frame settles thousands. The cost is
    that a crash repeats the finished batches after the oldest unfinished one.

    A kept delivery (large, or not due yet) would hold up all that follow, so while one is kept, the later ones are
    acknowledged one by one.

    Deliveries that are never accepted return to the queue when the channel closes.
    """

    def __init__(self, subscription: Subscription, progress: Callable[[], None] = lambda: None) -> None:
        """``progress`` is called with each acceptance, because a batch may take many publishes."""
        self._subscription = subscription
        self._progress = progress
        self._order: deque[int] = deque()
        self._accepted: set[int] = set()
        self._single: set[int] = set()  # Acknowledged one by one, although an earlier one is not accepted.
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

    def forget_kept(self, tags: Iterable[int]) -> None:
        """Forget kept deliveries that are accepted, or return to the queue."""
        for tag in self._kept.keys() & set(tags):
            self.kept_bytes -= self._kept.pop(tag)

    def accept(self, tags: Iterable[int]) -> None:
        """Accept deliveries whose messages are safe: in the store, the cascade, their destination or the refused
        queue."""
        accepted = set(tags)
        self._accepted |= accepted
        self.forget_kept(accepted)
        if accepted:
            self._progress()
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


OWN_QUEUE: Final = (
    "if it was nacked, the queue behind that exchange is full: empty it (`delayer refused`, `delayer strays`), or lift "
    "its limit (a policy with max-length and reject-publish). Or a queue there has no majority: "
    "`rabbitmq-queues quorum_status QUEUE`"
)
STUCK_SECONDS: Final = 30.0
"""After this time the intake counts as stuck. A batch takes at most ten seconds while broker and store are well."""


@dataclass
class Unsettled:
    """Outlives sessions: after a loss the broker delivers the same messages again, and they may get stuck again."""

    _clock: Callable[[], float] = monotonic
    _since: float | None = None

    def begin(self) -> None:
        """Work begins."""
        self._since = self._clock() if self._since is None else self._since

    def settle(self, *, busy: bool) -> None:
        """Note that some work was settled, or that there is none. ``busy``: whether more is under way."""
        self._since = self._clock() if busy else None

    @property
    def stuck_seconds(self) -> float:
        """How long nothing was settled; 0 unless that is too long."""
        seconds = 0.0 if self._since is None else self._clock() - self._since
        return seconds if seconds > STUCK_SECONDS else 0.0


class Session:
    """The work for the deliveries of one subscription."""

    def __init__(
        self, subscription: Subscription, beat: Callable[[], None], in_flight: int, unsettled: Unsettled | None = None
    ) -> None:
        self.acks = AckTracker(subscription, self._note_accepted)
        self._beat = beat
        self._unsettled = unsettled or Unsettled()
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
        self._unsettled.begin()
        tasks.add(task)
        task.add_done_callback(partial(self._on_done, tasks))

    def _on_done(self, tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if task.cancelled() or task.exception() is not None:
            self._lost.add(task)
        else:
            self.has_succeeded = True
            self.note_progress()
        self._changed.set()

    def _note_accepted(self) -> None:
        self._beat()
        self._unsettled.settle(busy=True)

    def note_progress(self) -> None:
        """Note that some work was settled, or that there is none."""
        self._unsettled.settle(busy=bool(self._tasks or self._punctual))

    async def wait_for_room(self, is_full: Callable[[], bool] = lambda: False) -> None:
        """Wait until another batch may begin, and the handler is not full. Raises the first failure."""
        await self._wait_until(
            lambda: len(self._tasks) < self._in_flight and self.acks.kept_bytes < KEPT_BYTES and not is_full()
        )

    async def wait_until_idle(self) -> None:
        """Wait until all work is done, and no delivery is kept. Raises the first failure."""
        await self._wait_until(lambda: not self.is_busy)

    async def wait_while(self, is_waiting: Callable[[], bool]) -> None:
        """Wait while ``is_waiting`` holds, even after a failure."""
        while is_waiting():
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


def new_id() -> bytes:
    """Return an ``x-delayer-id`` for a message that no store has numbered."""
    return os.urandom(16).hex().encode()


class Publication(NamedTuple):
    """A publish on behalf of a delivery.

    ``parcel``: the message to hold if its destination does not take it. None for the cascade and the refused queue,
    which must take it: if they do not, the delivery returns to its queue. ``refusal``: the reason, of a refused
    message. ``earlier``: the note of earlier attempts. ``undelayed``: whether the message asked for no delay.
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


class Objection(NamedTuple):
    """A message to hold, and why. ``earlier``: the note of earlier attempts."""

    delivery: Delivery
    parcel: Parcel
    hold: Hold
    earlier: HoldNote | None = None

    @property
    def attempts(self) -> int:
        """The number of earlier attempts."""
        return 0 if self.earlier is None else self.earlier.attempts

    @property
    def whole_hold(self) -> Hold:
        """The hold, with what earlier attempts showed."""
        return self.hold.after(self.earlier and self.earlier.hold)


async def halved(
    items: Sequence[T], write: Callable[[Sequence[T]], Awaitable[None]], refuse: Callable[[T, str], Awaitable[None]]
) -> None:
    """Write items in one transaction. If the database rejects it, write each half separately, in order, down to the
    item at fault, and refuse that one with the reason. Raises the other errors of ``write`` and ``refuse``."""
    try:
        return await write(items)
    except Rejected as error:
        reason = str(error)
    if len(items) == 1:
        return await refuse(items[0], reason)
    middle = len(items) // 2
    await halved(items[:middle], write, refuse)
    await halved(items[middle:], write, refuse)


def to_refused(
    delivery: Delivery, reason: str, names: Endpoints, token: bytes, properties: Properties | None = None
) -> Publication:
    """Build the publication that refuses a delivery. ``properties``: its parsed properties, if they are known."""
    raw, carried = refused_properties(delivery, reason, token, names.max_properties, properties)
    outgoing = Outgoing(names.refused_exchange, delivery.routing_key, raw, delivery.body, carried)
    return Publication(delivery, outgoing, refusal=reason)


@dataclass
class Dispatch:
    """Settles deliveries by publishing or holding their messages. ``pause_ms(attempts, number)``: the pause before a
    retry; ``number`` selects the jitter."""

    publisher: Publisher
    backlog: Backlog
    live: IntakeSettings
    counters: Counters
    new_id: Callable[[], bytes] = new_id
    pause_ms: Callable[[int, int], int] = pause_ms

    async def publish(self, publications: Sequence[Publication], acks: AckTracker, due_ms: Sequence[int] = ()) -> None:
        """Publish in batches of the size that the publisher recommends, and accept or hold each delivery.

        ``due_ms``: when each publication is due, in ascending order; empty means now.

        Raises BrokerLost, StoreLost; NotTaken and Unconfirmed after settling every known outcome.
        """
        stuck: list[str] = []
        for portion in self._portions(len(publications)):
            stuck += await self._publish(publications[portion], acks, due_ms[portion])
        if stuck:
            text = f"{len(stuck)} of {len(publications)} messages were not taken; the first by {stuck[0]}"
            raise NotTaken(text, advice=OWN_QUEUE)

    async def hold(self, objections: Sequence[Objection], acks: AckTracker) -> None:
        """Hold messages, and accept the deliveries of the held ones. Raises BrokerLost, StoreLost; NotTaken if the
        cascade or the strays queue does not take one."""
        if objections and self.live.holds_in_store:
            await self._hold_in_store(objections, acks)
        elif objections:
            for portion in self._portions(len(objections)):
                await self._hold_in_broker(objections[portion], acks)

    async def refuse(self, delivery: Delivery, rejected: str, acks: AckTracker) -> None:
        """Refuse a delivery that the store's database rejects for the reason ``rejected``."""
        reason = f"the database of the store rejects it: {rejected}"
        await self.publish([to_refused(delivery, reason, self.live.names(), self.new_id())], acks)

    def _portions(self, count: int) -> Iterator[slice]:
        """The publisher may change its recommended size after each portion."""
        begin = 0
        while begin < count:
            end = begin + self.publisher.batch_limit
            yield slice(begin, end)
            begin = end

    async def _publish(self, publications: Sequence[Publication], acks: AckTracker, due_ms: Sequence[int]) -> list[str]:
        """Publish one batch. Returns the destinations that did not take a message although they must."""
        began = perf_counter()
        schedule = Pace(due_ms, self.live.now_lower_ms)
        try:
            outgoing = [publication.outgoing for publication in publications]
            outcomes = await self.publisher.publish(outgoing, schedule if due_ms else None)
        except Unconfirmed as late:
            # Settle the known outcomes, so that an unanswered message does not repeat the rest.
            await self._settle(publications, late.outcomes, schedule, acks)
            raise
        reach("intake.confirmed")
        if not due_ms:
            self.counters.took("publish", perf_counter() - began)
        self.counters.batch("publish", len(publications))
        return await self._settle(publications, outcomes, schedule, acks)

    async def _settle(
        self, publications: Sequence[Publication], outcomes: Sequence[Outcome | None], schedule: Pace, acks: AckTracker
    ) -> list[str]:
        through: list[Publication] = []
        objections: list[Objection] = []
        stuck: list[str] = []
        now_ms = self.live.now_lower_ms()
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
        self.counters.settled([one.counted for one in publications], outcomes, schedule, now_ms)
        self.counters.sent(one.parcel.target for one in through if one.parcel is not None)
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

    async def _hold_in_store(self, objections: Sequence[Objection], acks: AckTracker) -> None:
        async def hold(some: Sequence[Objection]) -> None:
            await self.backlog.hold([(one.parcel, one.whole_hold) for one in some])
            self._accept_held(some, acks)

        await halved(objections, hold, lambda one, reason: self.refuse(one.delivery, reason, acks))

    async def _hold_in_broker(self, objections: Sequence[Objection], acks: AckTracker) -> None:
        batch = self._build_retries(objections)
        lost: Unconfirmed | None = None
        outcomes: Sequence[Outcome | None]
        try:
            outcomes = await self.publisher.publish(batch)
        except Unconfirmed as late:
            lost, outcomes = late, late.outcomes
        each = list(zip(objections, batch, outcomes, strict=True))
        self._accept_held([one for one, _, outcome in each if isinstance(outcome, Confirmed)], acks)
        if lost is not None:
            raise lost
        for _, outgoing, outcome in each:
            if outcome is not None and not isinstance(outcome, Confirmed):
                exchange = outgoing.exchange.decode()
                text = f"exchange {exchange} did not take a message to hold: {outcome.text}"
                raise NotTaken(text, advice=OWN_QUEUE)

    def _build_retries(self, objections: Sequence[Objection]) -> list[Outgoing]:
        """Build the envelopes that wait in the cascade for another attempt, or in the strays queue for an operator."""
        now_ms, names = self.live.now_lower_ms(), self.live.names()
        batch: list[Outgoing] = []
        for one in objections:
            token, attempts, hold = one.parcel.token or self.new_id(), one.attempts + 1, one.whole_hold
            if hold.for_a_person or attempts >= MAX_ATTEMPTS:
                batch.append(to_strays(one.parcel, token, HoldNote(hold, attempts, None), names))
                continue
            retry_ms = now_ms + self.pause_ms(attempts, int.from_bytes(token[-8:], "big"))
            note, seconds = HoldNote(hold, attempts, retry_ms), whole_seconds_until(retry_ms, now_ms)
            batch.append(into_broker(one.parcel, token, retry_ms, seconds, names, held=note))
        return batch

    def _accept_held(self, objections: Sequence[Objection], acks: AckTracker) -> None:
        """Accept and report messages that the store or the broker holds, so that no later failure repeats them."""
        acks.accept(one.delivery.tag for one in objections)
        report_held([(one.parcel.token, one.parcel, one.hold, one.attempts) for one in objections], self.counters)
