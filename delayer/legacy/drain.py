"""Sources that are queues: messages are read from one after the other, and acknowledged when they are committed.

A kill, or a broken connection, between the commit and the acknowledgements leaves messages both here and in their
queue. They are known again by a digest of each in the note that was committed with them: one that the broker delivers
again (it says so), that has an identity of its own and the very bytes of one in the note, is acknowledged and not
parked a second time. A message without an identity is parked again: a duplicate is allowed, a merged pair is a loss.

Nobody confirms an acknowledgement. So the note has every batch that the broker may not have heard of (doubt.py). And a
queue is done with only when the broker has ended the consumer, in order behind its acknowledgements; else the run
stops, to be run again.

A queue can be read from its head only, and what is read and not taken counts as a delivery. So the order is one of
queues, and within a batch one of due instants; what is not reached in time its own system lets out, on time. And a
visit takes what stood there when it began, or it would not end while somebody publishes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime

from delayer.broker.admin import Admin
from delayer.core.importing import Batch, Item, Meant, Rewrite, Run, Survey, redirected, retargeted, rewriting
from delayer.core.message import Delivery
from delayer.legacy.brokers import address_of, admin_of, asked
from delayer.legacy.doubt import Doubt, Taken, queue_of
from delayer.legacy.known import fingerprint, parsed
from delayer.legacy.visiting import BEFORE_CUTOFF, Reader, Visits


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
        self._doubt = Doubt(falling=self.falling)
        self._visits = Visits(url, meant, now, self.readers, self._doubt)
        self._taken: list[Taken] = []
        self._repeated: list[Taken] = []
        self._count = 0
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

    async def survey(self, unfinished: Run | None = None, *, thorough: bool = False) -> Survey:
        """See the port. Looking into a queue counts as a delivery, so only the numbers are asked for, always."""
        survey = Survey()
        now_ms = await self._now()
        async with await admin_of(self._url) as admin:
            readers = {reader.queue: reader for reader in await self._visits.readers(admin)}
            depths = await asked(admin.depths(readers))
        for name, depth in depths.items():
            if not depth:
                continue
            if self._visits.none_meant(readers[name], now_ms):
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

    async def stage(self, run: Run) -> None:
        """See the port. The queues are read as they are."""
        return

    async def resume(self, run: Run) -> None:
        """See the port."""
        self._count = run.committed
        if run.progress is not None:
            self._doubt.read(run.progress)
        if self._full():
            await self._remove_known(run)  # no batch comes any more that would meet them

    async def next_batch(self) -> Batch | None:
        """See the port."""
        self._taken, self._repeated = [], []
        while not self._full():
            subscription = await self._visits.next_subscription()
            if subscription is None:
                return None
            deliveries = await self._visits.deliveries(subscription)
            if deliveries:
                items = await self._items(deliveries)
                if items or self._repeated:
                    return Batch(items, self._note(), len(self._repeated))
        return None

    async def _items(self, deliveries: Sequence[Delivery]) -> list[Item]:
        """Those that are meant, and new. What is not meant stays unacknowledged."""
        reader = self._visits.reader
        now_ms = await self._now()
        items: list[Item] = []
        for delivery in deliveries:
            properties = parsed(delivery.properties)
            digest = fingerprint(delivery, properties, falling=self.falling)
            if self._doubt.met_again(delivery, properties, digest):
                self._repeated.append(Taken(delivery.tag, digest))
                continue
            item = redirected(reader.item(delivery, properties, now_ms), self._rewrites)
            if not self._meant.includes(item.parcel.due_ms):
                self._visits.keep(BEFORE_CUTOFF)
            elif self._full(len(items)):
                self._visits.keep("beyond the limit")
            else:
                items.append(item)
                self._taken.append(Taken(delivery.tag, digest))
        self._count += len(items)
        items.sort(key=_due_ms)
        return items

    async def remove(self, batch: Batch) -> None:
        """See the port."""
        subscription = self._visits.subscription
        assert subscription is not None
        for taken in (*self._taken, *self._repeated):
            self._visits.acknowledge(subscription, taken.tag)
        self._visits.check()

    async def finish(self) -> dict[str, int]:
        """See the port."""
        await self._visits.leave()
        passed_over = (Counter({why: depth}) for why, depth in self.passed_over.values())
        return dict(sum([*self._visits.left.values(), *passed_over], Counter()))

    async def put_back(self, run: Run) -> None:
        """See the port. What is not committed is in its queue; what is committed and still there goes now."""
        await self.resume(run)
        await self._remove_known(run)

    async def _remove_known(self, run: Run) -> None:
        """Acknowledge what is committed and still in the queue that was read last."""
        if not self._doubt.total():
            return
        queue = queue_of(str(run.progress))
        async with await admin_of(self._url) as admin:
            self._visits.only(self.reached_from(queue, await self._visits.readers(admin)))
        while self._doubt.total() and (subscription := await self._visits.next_subscription()) is not None:
            for delivery in await self._visits.deliveries(subscription):
                properties = parsed(delivery.properties)
                digest = fingerprint(delivery, properties, falling=self.falling)
                if self._doubt.met_again(delivery, properties, digest):
                    self._visits.acknowledge(subscription, delivery.tag)
        await self._visits.leave()

    def reached_from(self, queue: str, readers: Sequence[Reader]) -> list[Reader]:
        """Where a message may be by now that stood in ``queue``."""
        return [reader for reader in readers if reader.queue == queue]

    async def close(self) -> None:
        """See the port."""
        await self._visits.close()

    def _full(self, more: int = 0) -> bool:
        return self._meant.limit is not None and self._count + more >= self._meant.limit

    def _note(self) -> str:
        both = [*self._taken, *self._repeated]
        return self._doubt.note(self._visits.reader.queue, both, self._visits.heard())


def _due_ms(item: Item) -> int:
    return item.parcel.due_ms


def _until(latest_ms: int | None) -> str:
    if latest_ms is None:
        return ""
    return f", due {datetime.fromtimestamp(latest_ms // 1000, UTC):%Y-%m-%dT%H:%M:%SZ} at the latest"
