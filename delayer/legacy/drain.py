"""Sources that are queues: messages are read from one after the other, and acknowledged when they are committed.

A kill, or a broken connection, between the commit and the acknowledgements leaves messages both here and in their
queue. They are known again by a digest of each in the note that was committed with them: one that the broker delivers
again (it says so), that has an identity of its own and the very bytes of one in the note, is acknowledged and not
parked a second time. A message without an identity is parked again: a duplicate is allowed, a merged pair is a loss.

Nobody confirms an acknowledgement. So the note has every batch that the broker may not have heard of: it sends no more
than the prefetch unacknowledged, and what it sent beyond that shows how much it has heard. And a queue is done with
only when the broker has ended the consumer, in order behind its acknowledgements; else the run stops, to be run again.

A queue can be read from its head only, and what is read and not taken counts as a delivery. So the order is one of
queues, and within a batch one of due instants; what is not reached in time its own system lets out, on time. And a
visit takes what stood there when it began, or it would not end while somebody publishes.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple, Protocol, TypeVar

from delayer.broker.admin import Admin
from delayer.broker.consumer import RelayConsumer, RelaySubscription
from delayer.broker.errors import BrokerRefused
from delayer.broker.relay import Relay
from delayer.core.errors import BrokerLost
from delayer.core.importing import (
    BEHIND,
    UNGIVEN,
    Batch,
    Item,
    Meant,
    Rewrite,
    Run,
    Survey,
    redirected,
    retargeted,
    rewriting,
)
from delayer.core.message import Delivery, Target
from delayer.legacy.known import fell, fingerprint, parsed
from delayer.legacy.ports import BadSource, SourceLost
from delayer.wire.address import Address
from delayer.wire.properties import Properties

T = TypeVar("T")
CLOCKS_MS: Final = 60_000
"""By how much clocks may differ where it is said that nothing in a queue is meant."""
BATCH: Final = 1_000
PREFETCH: Final = 2 * BATCH
KEPT: Final = 50_000
"""Messages that are not meant and stand before others, at most: they are the broker's again when we go."""
GATHER_SECONDS: Final = 0.05
PATIENCE: Final = 3
"""Empty answers, a second each, after which the rest of a queue is in somebody else's hands."""
END_SECONDS: Final = 10.0
"""How long a broker has to end a consumer: its answer is what a queue is done with."""
HEARTBEAT: Final = 20.0
BEFORE_CUTOFF: Final = "due before the cutoff"
NAME: Final = "delayer import"


class Reader(Protocol):
    """One queue, and what its messages are."""

    @property
    def queue(self) -> str: ...

    @property
    def target(self) -> Target | None:
        """Where all of its messages go; None where that is each one's own."""

    def latest_ms(self, now_ms: int) -> int | None:
        """The latest due instant that a message in it can have; None where its messages say."""

    def item(self, delivery: Delivery, properties: Properties | None, now_ms: int) -> Item:
        """The message. ``properties``: None where their bytes are broken."""


class _Taken(NamedTuple):
    tag: int
    digest: str


class _Acknowledged(NamedTuple):
    """A batch whose acknowledgements the broker may not have heard of: how many, and the digests of what has one."""

    messages: int
    digests: list[str]


class Queues(ABC):
    """Satisfies ports.Source: ``readers`` are read in their order. ``now``: the clock that rules."""

    falling = False
    """Whether messages go from one of the queues to another by themselves."""

    def __init__(
        self,
        name: str,
        url: str,
        meant: Meant,
        now: Callable[[], Awaitable[int]],
        rewrites: Sequence[Rewrite] = (),
    ) -> None:
        self.name = name
        self._url = url
        self._meant = meant
        self._now = now
        self._rewrites = rewrites
        self._readers: list[Reader] | None = None
        self._at = 0
        self._relay: Relay | None = None
        self._subscription: RelaySubscription | None = None
        self._taken: list[_Taken] = []
        self._repeated: list[_Taken] = []
        self._known: Counter[str] = Counter()
        self._in_doubt: deque[_Acknowledged] = deque()
        self._heard = 0
        self._acknowledged = False
        self._kept = 0
        self._unread = 0
        self._count = 0
        self._left: dict[str, Counter[str]] = {}
        self.passed_over: dict[str, tuple[str, int]] = {}
        """Queues that were met and are not meant: why, and how many messages stand there."""

    @abstractmethod
    async def readers(self, admin: Admin) -> list[Reader]:
        """The queues, in the order to read them. Raises ImportImpossible."""

    @abstractmethod
    def more_parameters(self) -> Mapping[str, object]:
        """What besides the broker says what is meant."""

    @property
    def parameters(self) -> dict[str, object]:
        """See the port."""
        return {
            "broker": str(address_of(self._url)),
            **self.more_parameters(),
            **rewriting(self._rewrites),
            **self._meant.as_dict(),
        }

    # ---- the port

    async def survey(self, unfinished: Run | None = None, *, thorough: bool = False) -> Survey:
        """See the port. Looking into a queue counts as a delivery, so only the numbers are asked for, always."""
        survey = Survey()
        now_ms = await self._now()
        async with await self._admin() as admin:
            readers = {reader.queue: reader for reader in await self._all(admin)}
            depths = await asked(admin.depths(readers))
        for name, depth in depths.items():
            if not depth:
                continue
            if self._none_meant(readers[name], now_ms):
                survey.leave(BEFORE_CUTOFF, depth)
                continue
            survey.messages = (survey.messages or 0) + depth
            survey.remarks.append(f"{name}: {depth:,} messages{_until(readers[name].latest_ms(now_ms))}")
            if (target := readers[name].target) is not None:
                survey.expect(retargeted(target, self._rewrites), depth)
        if self._meant.limit is not None:
            survey.messages = min(survey.messages or 0, self._meant.limit)
        for name, (why, depth) in self.passed_over.items():
            survey.leave(why, depth)
            survey.remarks.append(f"{name}: {depth:,} messages, passed over: {why}")
        missing = [name for name, depth in depths.items() if depth is None]
        if missing:
            survey.remarks.append(f"{len(missing)} queues do not exist, such as {missing[0]}")
        survey.remarks.append("what a message says of its destination and due instant is seen by a run only")
        return survey

    def _none_meant(self, reader: Reader, now_ms: int) -> bool:
        """Nothing in the queue can be due as late as the cutoff, so it need not be touched."""
        latest_ms = reader.latest_ms(now_ms)
        return latest_ms is not None and not self._meant.includes(latest_ms + CLOCKS_MS)

    async def stage(self, run: Run) -> None:
        """See the port. The queues are read as they are."""
        return

    async def resume(self, run: Run) -> None:
        """See the port."""
        self._count = run.committed
        if run.progress is not None:
            self._known.update(json.loads(run.progress)["digests"])
        if self._full():
            await self._remove_known(run)  # no batch comes any more that would meet them

    async def next_batch(self) -> Batch | None:
        """See the port."""
        self._taken, self._repeated = [], []
        while not self._full():
            subscription = await self._next_subscription()
            if subscription is None:
                return None
            deliveries = await self._deliveries(subscription)
            if deliveries:
                items = await self._items(deliveries)
                if items or self._repeated:
                    return Batch(items, self._note(), len(self._repeated))
        return None

    async def _items(self, deliveries: Sequence[Delivery]) -> list[Item]:
        """Those that are meant, and new. What is not meant stays unacknowledged."""
        reader = self._reader()
        now_ms = await self._now()
        items: list[Item] = []
        for delivery in deliveries:
            properties = parsed(delivery.properties)
            digest = fingerprint(delivery, properties, falling=self.falling)
            if self._met_again(delivery, properties, digest):
                self._repeated.append(_Taken(delivery.tag, digest))
                continue
            item = redirected(reader.item(delivery, properties, now_ms), self._rewrites)
            if not self._meant.includes(item.parcel.due_ms):
                self._keep(BEFORE_CUTOFF)
            elif self._full(len(items)):
                self._keep("beyond the limit")
            else:
                items.append(item)
                self._taken.append(_Taken(delivery.tag, digest))
        self._count += len(items)
        items.sort(key=_due_ms)
        return items

    def _met_again(self, delivery: Delivery, properties: Properties | None, digest: str) -> bool:
        """Whether it is one of those that are committed and may still be there."""
        again = delivery.redelivered or (self.falling and fell(properties))
        if not again or not digest or self._known[digest] <= 0:
            return False
        self._known[digest] -= 1
        return True

    async def remove(self, batch: Batch) -> None:
        """See the port."""
        assert self._subscription is not None
        for taken in (*self._taken, *self._repeated):
            self._acknowledge(self._subscription, taken.tag)
        if self._subscription.lost:
            raise SourceLost(f"queue {self._reader().queue}: {_UNHEARD}")

    def _acknowledge(self, subscription: RelaySubscription, tag: int) -> None:
        self._acknowledged = True
        subscription.ack(tag, multiple=False)

    async def finish(self) -> dict[str, int]:
        """See the port."""
        await self._leave()
        passed_over = (Counter({why: depth}) for why, depth in self.passed_over.values())
        return dict(sum([*self._left.values(), *passed_over], Counter()))

    async def put_back(self, run: Run) -> None:
        """See the port. What is not committed is in its queue; what is committed and still there goes now."""
        await self.resume(run)
        await self._remove_known(run)

    async def _remove_known(self, run: Run) -> None:
        """Acknowledge what is committed and still in the queue that was read last."""
        if not self._known.total():
            return
        queue = json.loads(str(run.progress))["queue"]
        async with await self._admin() as admin:
            self._readers = self.reached_from(queue, await self._all(admin))
        while self._known.total() and (subscription := await self._next_subscription()) is not None:
            for delivery in await self._deliveries(subscription):
                properties = parsed(delivery.properties)
                digest = fingerprint(delivery, properties, falling=self.falling)
                if self._met_again(delivery, properties, digest):
                    self._acknowledge(subscription, delivery.tag)
        await self._leave()

    def reached_from(self, queue: str, readers: Sequence[Reader]) -> list[Reader]:
        """Where a message may be by now that stood in ``queue``."""
        return [reader for reader in readers if reader.queue == queue]

    async def close(self) -> None:
        """See the port."""
        subscription, self._subscription = self._subscription, None
        try:
            if subscription is not None:
                await subscription.close()
        finally:
            relay, self._relay = self._relay, None
            if relay is not None:
                await relay.close()

    # ---- queues

    def _reader(self) -> Reader:
        assert self._readers is not None
        return self._readers[self._at]

    def _full(self, more: int = 0) -> bool:
        return self._meant.limit is not None and self._count + more >= self._meant.limit

    def _keep(self, why: str) -> None:
        self._kept += 1
        self._left[self._reader().queue][why] += 1

    def _note(self) -> str:
        """The digests of what may be delivered again: of this batch, of those before whose acknowledgements the broker
        may not have, and of those that another run committed and that were not met again."""
        assert self._subscription is not None
        both = [*self._taken, *self._repeated]
        self._in_doubt.append(_Acknowledged(len(both), [one.digest for one in both if one.digest]))
        heard = self._subscription.received - self._subscription.prefetch
        while len(self._in_doubt) > 1 and self._heard + self._in_doubt[0].messages <= heard:
            self._heard += self._in_doubt.popleft().messages
        digests = sorted([*(one for of in self._in_doubt for one in of.digests), *self._known.elements()])
        return json.dumps({"queue": self._reader().queue, "digests": digests})

    async def _next_subscription(self) -> RelaySubscription | None:
        """The subscription of the queue that is read; None when there is no queue left."""
        if self._subscription is not None:
            return self._subscription
        now_ms = await self._now()
        async with await self._admin() as admin:
            readers = await self._all(admin)
            while self._at < len(readers):
                reader = readers[self._at]
                depth = (await asked(admin.depths([reader.queue])))[reader.queue] or 0
                # Of two visits to a queue the second one counts: it meets again what the first one left.
                self._left[reader.queue] = Counter()
                if depth and not self._none_meant(reader, now_ms):
                    # What is known may be on its way back into the queue, from whoever died.
                    self._unread = depth + self._known.total()
                    break
                self._left[reader.queue] += Counter({BEFORE_CUTOFF: depth})
                self._at += 1
            else:
                return None
        try:
            if self._relay is None:
                self._relay = Relay(address_of(self._url), NAME, heartbeat=HEARTBEAT)
                self._relay.start()
            prefetch = PREFETCH + (KEPT if self._meant.cutoff_ms is not None else 0)
            self._subscription = await RelayConsumer(self._relay).subscribe(self._reader().queue, prefetch)
        except BrokerLost as lost:
            raise SourceLost(str(lost)) from lost
        return self._subscription

    async def _deliveries(self, subscription: RelaySubscription) -> list[Delivery]:
        """The next ones; empty where the queue is at its end, and then it is left."""
        try:
            for _ in range(PATIENCE if self._unread > 0 else 0):
                if some := await subscription.next_batch(min(BATCH, self._unread), GATHER_SECONDS):
                    self._unread -= len(some)
                    return some
                if self._kept >= KEPT or not await self._ready():
                    break
        except BrokerLost as lost:
            raise SourceLost(str(lost)) from lost
        if self._unread > 0 and (unseen := min(await self._ready(), self._unread)):
            self._left[self._reader().queue][BEHIND if self._kept >= KEPT else UNGIVEN] += unseen
        await self._leave()
        self._at += 1
        return []

    async def _ready(self) -> int:
        """How many messages wait in the queue that is read, and nobody has in hand."""
        async with await self._admin() as admin:
            return (await asked(admin.depths([self._reader().queue])))[self._reader().queue] or 0

    async def _leave(self) -> None:
        """What was not acknowledged is back in the queue; what was is out of it, or it is said that nobody knows."""
        subscription, self._subscription = self._subscription, None
        self._kept = 0
        if subscription is None:
            return
        await subscription.close(END_SECONDS)
        if self._acknowledged and not subscription.in_order:
            raise SourceLost(f"queue {self._reader().queue}: {_UNHEARD}")
        self._acknowledged = False
        self._in_doubt.clear()
        self._heard = 0

    async def _all(self, admin: Admin) -> list[Reader]:
        if self._readers is None:
            self._readers = await self.readers(admin)
        return self._readers

    async def _admin(self) -> Admin:
        address_of(self._url)
        return await asked(Admin.connect(self._url, name=NAME))


_UNHEARD: Final = "the connection broke, and what was committed of it may not be removed there"


def _due_ms(item: Item) -> int:
    return item.parcel.due_ms


def _until(latest_ms: int | None) -> str:
    if latest_ms is None:
        return ""
    return f", due {datetime.fromtimestamp(latest_ms // 1000, UTC):%Y-%m-%dT%H:%M:%SZ} at the latest"


async def asked(question: Awaitable[T]) -> T:
    """The answer, or SourceLost."""
    try:
        return await question
    except (BrokerLost, BrokerRefused) as error:
        raise SourceLost(str(error)) from error


def address_of(url: str) -> Address:
    """Where a source's broker is. Raises BadSource, never showing the URL."""
    try:
        return Address.parse(url)
    except ValueError as error:
        raise BadSource(f"the source's {error}") from None
