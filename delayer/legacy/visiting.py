"""Queues, visited one after the other: a visit takes what stood there when it began."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from delayer.broker.admin import Admin
from delayer.broker.consumer import RelayConsumer, RelaySubscription
from delayer.broker.relay import Relay
from delayer.core.errors import BrokerLost
from delayer.core.importing import BEHIND, UNGIVEN, Item, Meant
from delayer.core.message import Delivery, Target
from delayer.legacy.brokers import HEARTBEAT, NAME, address_of, admin_of, asked
from delayer.legacy.doubt import Doubt
from delayer.legacy.ports import SourceLost
from delayer.wire.properties import Properties

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
BEFORE_CUTOFF: Final = "due before the cutoff"
_UNHEARD: Final = "the connection broke, and what was committed of it may not be removed there"


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


class Visits:
    """``readers``: the queues, asked once; ``doubt``: what may come back into them."""

    def __init__(
        self,
        url: str,
        meant: Meant,
        now: Callable[[], Awaitable[int]],
        readers: Callable[[Admin], Awaitable[list[Reader]]],
        doubt: Doubt,
    ) -> None:
        self._url = url
        self._meant = meant
        self._now = now
        self._ask = readers
        self._doubt = doubt
        self._readers: list[Reader] | None = None
        self._at = 0
        self._relay: Relay | None = None
        self.subscription: RelaySubscription | None = None
        self._acknowledged = False
        self._kept = 0
        self._unread = 0
        self.left: dict[str, Counter[str]] = {}
        """By queue: what was left there, and why."""

    async def readers(self, admin: Admin) -> list[Reader]:
        """All of them."""
        if self._readers is None:
            self._readers = await self._ask(admin)
        return self._readers

    def only(self, readers: list[Reader]) -> None:
        """Visit these instead."""
        self._readers = readers

    @property
    def reader(self) -> Reader:
        """Of the queue that is read."""
        assert self._readers is not None
        return self._readers[self._at]

    def none_meant(self, reader: Reader, now_ms: int) -> bool:
        """Nothing in the queue can be due as late as the cutoff, so it need not be touched."""
        latest_ms = reader.latest_ms(now_ms)
        return latest_ms is not None and not self._meant.includes(latest_ms + CLOCKS_MS)

    def keep(self, why: str) -> None:
        """A message stays unacknowledged."""
        self._kept += 1
        self.left[self.reader.queue][why] += 1

    def acknowledge(self, subscription: RelaySubscription, tag: int) -> None:
        """It is committed."""
        self._acknowledged = True
        subscription.ack(tag, multiple=False)

    def heard(self) -> int:
        """How many acknowledgements the broker must have heard of."""
        assert self.subscription is not None
        return self.subscription.received - self.subscription.prefetch

    def check(self) -> None:
        """Raises SourceLost where acknowledgements may have gone nowhere."""
        assert self.subscription is not None
        if self.subscription.lost:
            raise SourceLost(f"queue {self.reader.queue}: {_UNHEARD}")

    async def next_subscription(self) -> RelaySubscription | None:
        """The subscription of the queue that is read; None when there is no queue left."""
        if self.subscription is not None:
            return self.subscription
        now_ms = await self._now()
        async with await admin_of(self._url) as admin:
            readers = await self.readers(admin)
            while self._at < len(readers):
                reader = readers[self._at]
                depth = (await asked(admin.depths([reader.queue])))[reader.queue] or 0
                # Of two visits to a queue the second one counts: it meets again what the first one left.
                self.left[reader.queue] = Counter()
                if depth and not self.none_meant(reader, now_ms):
                    # What is known may be on its way back into the queue, from whoever died.
                    self._unread = depth + self._doubt.total()
                    break
                self.left[reader.queue] += Counter({BEFORE_CUTOFF: depth})
                self._at += 1
            else:
                return None
        try:
            if self._relay is None:
                self._relay = Relay(address_of(self._url), NAME, heartbeat=HEARTBEAT)
                self._relay.start()
            prefetch = PREFETCH + (KEPT if self._meant.cutoff_ms is not None else 0)
            self.subscription = await RelayConsumer(self._relay).subscribe(self.reader.queue, prefetch)
        except BrokerLost as lost:
            raise SourceLost(str(lost)) from lost
        return self.subscription

    async def deliveries(self, subscription: RelaySubscription) -> list[Delivery]:
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
            self.left[self.reader.queue][BEHIND if self._kept >= KEPT else UNGIVEN] += unseen
        await self.leave()
        self._at += 1
        return []

    async def _ready(self) -> int:
        """How many messages wait in the queue that is read, and nobody has in hand."""
        async with await admin_of(self._url) as admin:
            return (await asked(admin.depths([self.reader.queue])))[self.reader.queue] or 0

    async def leave(self) -> None:
        """What was not acknowledged is back in the queue; what was is out of it, or it is said that nobody knows."""
        subscription, self.subscription = self.subscription, None
        self._kept = 0
        if subscription is None:
            return
        await subscription.close(END_SECONDS)
        if self._acknowledged and not subscription.in_order:
            raise SourceLost(f"queue {self.reader.queue}: {_UNHEARD}")
        self._acknowledged = False
        self._doubt.over()

    async def close(self) -> None:
        """The connection too."""
        subscription, self.subscription = self.subscription, None
        try:
            if subscription is not None:
                await subscription.close()
        finally:
            relay, self._relay = self._relay, None
            if relay is not None:
                await relay.close()
