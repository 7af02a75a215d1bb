"""Sources that are queues, read one by one. They recognize messages that they have read before."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final, Protocol

from delayer.amqp.errors import BrokerLost
from delayer.amqp.properties import Properties, parsed
from delayer.amqp.values import Delivery
from delayer.broker.addresses import addresses_of
from delayer.broker.admin import Admin
from delayer.broker.connection import ReconnectingConnection
from delayer.broker.consumer import AmqpConsumer, AmqpSubscription
from delayer.core.importing import ImportBatch, ImportItem, ImportSelection, Left, Run, Survey
from delayer.core.marks import X_DEATH
from delayer.core.message import Target
from delayer.core.readable import counted, instant
from delayer.format.headers import COUNTED, DEATHS
from delayer.imports.brokers import HEARTBEAT, NAME, address_of, admin_of, translate_broker_errors
from delayer.imports.state_machine import SourceLost


def was_dead_lettered(properties: Properties | None) -> bool:
    """Whether another queue has dead-lettered the message before."""
    return properties is not None and properties.get(X_DEATH) is not None


def fingerprint(delivery: Delivery, properties: Properties | None, *, falling: bool = False) -> str:
    """Identify a message by its bytes, without the broker's delivery count; "" if it has neither a message id nor
    Celery's header ``id``. ``falling``: it may have moved to another queue of its cascade, with the broker's notes."""
    if properties is None or ("message_id" not in properties.places and properties.get(b"id") is None):
        return ""
    digest = hashlib.sha256()
    for part in (b"" if falling else delivery.exchange, delivery.routing_key, delivery.body):
        digest.update(len(part).to_bytes(8, "big") + part)
    for name, (start, end) in properties.spans.items():
        if name != "headers":
            digest.update(name.encode() + properties.raw[start:end])
    for field in properties.headers_items():
        noted = falling and (field.name == X_DEATH or field.name.startswith(DEATHS))
        if field.name not in COUNTED and not noted:
            digest.update(len(field.name).to_bytes(1, "big") + field.name + field.type_and_value)
    return digest.hexdigest()[:32]


class DoubtfulMessages:
    """Digests of messages that may be delivered again. ``falling``: whether messages move between the queues."""

    def __init__(self, *, falling: bool) -> None:
        self._falling = falling
        self._known: Counter[str] = Counter()
        self._in_doubt: deque[str] = deque()

    def read(self, note: str) -> None:
        """Read another run's note."""
        self._known.update(json.loads(note)["digests"])

    def total(self) -> int:
        """Count the digests of the note whose messages were not met yet."""
        return self._known.total()

    def recognize(self, delivery: Delivery, properties: Properties | None) -> tuple[str, bool]:
        """Return a message's digest, and whether the message is committed but still in its queue. Forgets it then."""
        digest = fingerprint(delivery, properties, falling=self._falling)
        again = delivery.redelivered or (self._falling and was_dead_lettered(properties))
        if not again or not digest or self._known[digest] <= 0:
            return digest, False
        self._known[digest] -= 1
        return digest, True

    def note(self, queue: str, digests: Sequence[str], prefetch: int) -> str:
        """Write a batch's note: its queue, and digests of messages that may be delivered again. These are the digests
        of this batch, those that another run committed and this run has not met, and those acknowledged before. The
        broker has processed all acknowledgements but the last ``prefetch``, because it has sent new messages since."""
        self._in_doubt.extend(digests)
        while len(self._in_doubt) > prefetch:
            self._in_doubt.popleft()
        return json.dumps({"queue": queue, "digests": sorted(filter(None, [*self._in_doubt, *self._known.elements()]))})

    def over(self) -> None:
        """Forget acknowledged messages: the broker processed their acknowledgements before it closed the consumer."""
        self._in_doubt.clear()


BATCH: Final = 1_000
END_SECONDS: Final = 10.0
"""Seconds for the broker to close a consumer. Its answer proves that it has processed all acknowledgements."""
_UNHEARD: Final = "the connection broke, and committed messages may still be in it"


class Reader(Protocol):
    """Reads the messages of one queue."""

    @property
    def queue(self) -> str: ...

    @property
    def target(self) -> Target | None:
        """The target of all its messages; None if each has its own."""

    def latest_ms(self, now_ms: int) -> int | None:
        """The latest due instant that a message in it can have; None if only its messages say."""

    def item(self, delivery: Delivery, properties: Properties | None, now_ms: int) -> ImportItem:
        """Convert a message. ``properties``: None if their bytes are broken."""


@dataclass(eq=False, repr=False, kw_only=True)
class Queues(ABC):
    """Satisfies state_machine.ImportSource by reading the queues of ``readers`` one by one. ``now``: the store's clock,
    epoch ms. ``prefetch``: messages, in addition to ``most_unacknowledged``."""

    falling: ClassVar[bool] = False
    """Whether messages move between the queues by themselves."""
    name: ClassVar[str]
    url: str
    meant: ImportSelection
    now: Callable[[], Awaitable[int]]
    management_url: str | None = None
    prefetch: int = 2 * BATCH
    most_unacknowledged: int = 50_000
    """Maximum number of messages left unacknowledged while reading on. The broker gets them back at the end."""

    def __post_init__(self) -> None:
        self._doubt = DoubtfulMessages(falling=self.falling)
        self._readers: list[Reader] | None = None
        self._at = 0
        self._reconnecting: ReconnectingConnection | None = None
        self._subscription: AmqpSubscription | None = None
        self._acknowledged = False
        self._kept = 0
        """Messages that this subscription leaves unacknowledged."""
        self._unread = 0
        self._left: dict[str, Counter[str]] = {}
        """By queue: the messages that stay, by reason."""
        self._tags: list[int] = []
        """Delivery tags of the last batch, including messages that were met again."""
        self._count = 0

    @property
    def besides(self) -> Sequence[str]:
        """Unread queues that may contain messages of the source that their broker delays."""
        return ()

    @abstractmethod
    async def readers(self, admin: Admin) -> list[Reader]:
        """List the queues in reading order. Raises ImportImpossible."""

    @abstractmethod
    def more_parameters(self) -> Mapping[str, object]:
        """Parameters, other than the broker, that choose the messages."""

    @property
    def parameters(self) -> dict[str, object]:
        return {"broker": str(address_of(self.url)), **self.more_parameters(), **self.meant.as_dict()}

    async def survey(self, unfinished: Run | None = None) -> Survey:
        """See ImportSource. Only counts, because reading from a queue would count as a delivery."""
        survey = Survey()
        now_ms = await self.now()
        async with await admin_of(self.url) as admin:
            readers = {reader.queue: reader for reader in await self._all_readers(admin)}
            depths = await translate_broker_errors(admin.depths(readers))
        for why, count in (await self._delayed(readers, fresh=False)).items():
            survey.leave(why, count)
        for name, depth in depths.items():
            if not depth:
                continue
            if self._none_meant(readers[name], now_ms):
                survey.leave(Left.BEFORE_CUTOFF, depth)
                continue
            survey.messages += depth
            latest_ms = readers[name].latest_ms(now_ms)
            until = "" if latest_ms is None else f", due {instant(latest_ms)} at the latest"
            survey.remarks.append(f"{name}: {counted(depth, 'message')}{until}")
            if (target := readers[name].target) is not None:
                survey.expect(self.meant.retargeted(target), depth)
        if self.meant.limit is not None:
            survey.messages = min(survey.messages, self.meant.limit)
        missing = [name for name, depth in depths.items() if depth is None]
        if missing:
            survey.remarks.append(f"{counted(len(missing), 'missing queue')}, such as {missing[0]}")
        survey.remarks.append("only a run sees destinations and due instants in messages")
        return survey

    async def stage(self, run: Run) -> None:
        """See ImportSource. Stages nothing, because the run reads the queues themselves."""
        return

    async def resume(self, run: Run) -> None:
        self._count = run.committed
        if run.progress is not None:
            self._doubt.read(run.progress)
        if self._full():
            await self._remove_known(run)  # No later batch would meet them.

    async def next_batch(self) -> ImportBatch | None:
        self._tags = []
        while not self._full():
            subscription = await self._next_subscription()
            if subscription is None:
                return None
            deliveries = await self._deliveries(subscription)
            if deliveries and (batch := await self._batch(deliveries, subscription.prefetch)):
                return batch
        return None

    async def _batch(self, deliveries: Sequence[Delivery], prefetch: int) -> ImportBatch | None:
        """Pick the new messages to import. The rest stay unacknowledged."""
        reader = self._reader
        now_ms = await self.now()
        items: list[ImportItem] = []
        digests: list[str] = []
        for delivery in deliveries:
            properties = parsed(delivery.properties)
            digest, again = self._doubt.recognize(delivery, properties)
            if not again:
                item = self.meant.redirected(reader.item(delivery, properties, now_ms))
                if not self.meant.includes(item.parcel.due_ms):
                    self._keep(Left.BEFORE_CUTOFF)
                    continue
                if self._full(len(items)):
                    self._keep(Left.BEYOND_LIMIT)
                    continue
                items.append(item)
            self._tags.append(delivery.tag)
            digests.append(digest)
        self._count += len(items)
        items.sort(key=lambda item: item.parcel.due_ms)
        if not digests:
            return None
        return ImportBatch(items, self._doubt.note(reader.queue, digests, prefetch), len(digests) - len(items))

    async def remove(self, batch: ImportBatch) -> None:
        subscription = self._subscription
        assert subscription is not None
        for tag in self._tags:
            self._acknowledge(subscription, tag)
        if subscription.lost:
            raise SourceLost(f"queue {self._reader.queue}: {_UNHEARD}")

    async def finish(self) -> dict[str, int]:
        await self._leave()
        delayed = await self._delayed(self._left, fresh=True)
        return dict(sum(self._left.values(), delayed))

    async def _delayed(self, queues: Collection[str], *, fresh: bool) -> Counter[str]:
        """Count the messages in these queues that their broker delays itself, and the queues that may contain some."""
        async with await admin_of(self.url, self.management_url) as admin:
            counts = (await translate_broker_errors(admin.delayed([*queues, *self.besides], fresh=fresh))).values()
        found: Counter[str] = Counter()
        found[Left.DELAYED] = sum(filter(None, counts))
        found[Left.UNSEEN] = list(counts).count(None)
        return +found  # The sign drops zeros.

    async def put_back(self, run: Run) -> None:
        """See ImportSource. Uncommitted messages are already in their queue; removes committed messages still there."""
        await self.resume(run)
        await self._remove_known(run)

    async def _remove_known(self, run: Run) -> None:
        """Acknowledge the committed messages still in the queue that was read last."""
        if not self._doubt.total():
            return
        queue = str(json.loads(str(run.progress))["queue"])
        async with await admin_of(self.url) as admin:
            self._readers = self.reached_from(queue, await self._all_readers(admin))
        while self._doubt.total() and (subscription := await self._next_subscription()) is not None:
            for delivery in await self._deliveries(subscription):
                _, again = self._doubt.recognize(delivery, parsed(delivery.properties))
                if again:
                    self._acknowledge(subscription, delivery.tag)
        await self._leave()

    def reached_from(self, queue: str, readers: Sequence[Reader]) -> list[Reader]:
        """List the readers of queues that a message of ``queue`` may have moved to."""
        return [reader for reader in readers if reader.queue == queue]

    async def close(self) -> None:
        subscription, self._subscription = self._subscription, None
        try:
            if subscription is not None:
                await subscription.close()
        finally:
            reconnecting, self._reconnecting = self._reconnecting, None
            if reconnecting is not None:
                await reconnecting.close()

    async def _all_readers(self, admin: Admin) -> list[Reader]:
        """List the readers of all queues, queried once."""
        if self._readers is None:
            self._readers = await self.readers(admin)
        return self._readers

    @property
    def _reader(self) -> Reader:
        """The reader of the current queue."""
        assert self._readers is not None
        return self._readers[self._at]

    def _none_meant(self, reader: Reader, now_ms: int) -> bool:
        """Whether all messages of the queue are due before the cutoff, so that it need not be read."""
        latest_ms = reader.latest_ms(now_ms)
        # The clocks of the broker's host and of the store may differ by a minute.
        return latest_ms is not None and not self.meant.includes(latest_ms + 60_000)

    def _keep(self, why: str) -> None:
        """Leave a message unacknowledged, and count the reason."""
        self._kept += 1
        self._left[self._reader.queue][why] += 1

    def _acknowledge(self, subscription: AmqpSubscription, tag: int) -> None:
        self._acknowledged = True
        subscription.ack(tag, multiple=False)

    async def _next_subscription(self) -> AmqpSubscription | None:
        """Return the subscription to the current queue; None if no queue is left."""
        if self._subscription is not None:
            return self._subscription
        now_ms = await self.now()
        async with await admin_of(self.url) as admin:
            readers = await self._all_readers(admin)
            while self._at < len(readers):
                reader = readers[self._at]
                depth = (await translate_broker_errors(admin.depths([reader.queue])))[reader.queue] or 0
                # A second visit to a queue meets the messages left there again, so it replaces the first visit's list.
                self._left[reader.queue] = Counter()
                if depth and not self._none_meant(reader, now_ms):
                    # Messages that a dead run had prefetched may be on their way back into the queue.
                    self._unread = depth + self._doubt.total()
                    break
                self._left[reader.queue] += Counter({Left.BEFORE_CUTOFF: depth})
                self._at += 1
            else:
                return None
        try:
            if self._reconnecting is None:
                self._reconnecting = ReconnectingConnection(partial(addresses_of, self.url), NAME, heartbeat=HEARTBEAT)
                self._reconnecting.start()
            prefetch = self.prefetch + (self.most_unacknowledged if self.meant.cutoff_ms is not None else 0)
            self._subscription = await AmqpConsumer(self._reconnecting).subscribe(self._reader.queue, prefetch)
        except BrokerLost as lost:
            raise SourceLost(str(lost)) from lost
        return self._subscription

    async def _deliveries(self, subscription: AmqpSubscription) -> list[Delivery]:
        """Fetch the next messages. Leaves the queue at its end, and returns []. Raises SourceLost."""
        try:
            # After three empty answers, a second each, another consumer must hold the rest of the queue.
            for _ in range(3 if self._unread > 0 else 0):
                if some := await subscription.next_batch(min(BATCH, self._unread), 0.05):
                    self._unread -= len(some)
                    return some
                if self._kept >= self.most_unacknowledged or not await self._ready():
                    break
        except BrokerLost as lost:
            raise SourceLost(str(lost)) from lost
        if self._unread > 0 and (unseen := min(await self._ready(), self._unread)):
            reason = Left.BEHIND if self._kept >= self.most_unacknowledged else Left.UNGIVEN
            self._left[self._reader.queue][reason] += unseen
        await self._leave()
        self._at += 1
        return []

    async def _ready(self) -> int:
        """Count the messages waiting in the current queue, without those that a consumer holds."""
        async with await admin_of(self.url) as admin:
            return (await translate_broker_errors(admin.depths([self._reader.queue])))[self._reader.queue] or 0

    async def _leave(self) -> None:
        """Stop reading, which requeues unacknowledged messages. Raises SourceLost if acknowledgements may be lost."""
        subscription, self._subscription = self._subscription, None
        self._kept = 0
        if subscription is None:
            return
        await subscription.close(END_SECONDS)
        if self._acknowledged and not subscription.is_settled:
            raise SourceLost(f"queue {self._reader.queue}: {_UNHEARD}")
        self._acknowledged = False
        self._doubt.over()

    def _full(self, more: int = 0) -> bool:
        return self.meant.limit is not None and self._count + more >= self.meant.limit
