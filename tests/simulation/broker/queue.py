"""A queue: its messages, its consumers, and the log through which every change of them goes.

A quorum queue applies a change once a majority has it, and answers then. So :meth:`Queue.submit` applies changes in
order, after the broker's delay; a node's death loses some of the last. Classic queues use the same log."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from tests.simulation.broker.declared import plain
from tests.simulation.broker.message import Death, Message
from tests.support.raw import Value

if TYPE_CHECKING:
    from tests.simulation.broker.vhost import VirtualHost

HASHED: Final = 32
"""RabbitMQ 3.10 returns more nacked messages than that in the order of a hash."""


@dataclass(eq=False, slots=True)
class Entry:
    """A message at its ``place``. ``returns``: how often it came back."""

    place: int
    message: Message
    expires_at: float | None
    returns: int = 0


class Receiver(Protocol):
    """The channel of a consumer."""

    def deliver(self, consumer: Consumer, entry: Entry) -> None: ...

    def cancelled(self, consumer: Consumer) -> None:
        """The queue is gone."""


@dataclass(eq=False, slots=True)
class Consumer:
    """``prefetch`` 0 means no limit. ``ended``: it gets no more messages, but its channel holds some."""

    channel: Receiver
    tag: bytes
    prefetch: int
    no_ack: bool
    unacked: dict[int, Entry] = field(default_factory=dict)
    ended: bool = False

    @property
    def has_room(self) -> bool:
        return not self.ended and (not self.prefetch or len(self.unacked) < self.prefetch)


class Queue:
    """``exclusive``: the connection that owns it."""

    def __init__(
        self,
        vhost: VirtualHost,
        name: str,
        arguments: Mapping[str, Value],
        *,
        durable: bool = True,
        auto_delete: bool = False,
        exclusive: object | None = None,
    ) -> None:
        self.vhost = vhost
        self.name = name
        self.arguments = dict(arguments)
        self.durable, self.auto_delete, self.exclusive = durable, auto_delete, exclusive
        self.values = {key: plain(value) for key, value in arguments.items()}
        self.quorum = self.values.get("x-queue-type") == "quorum"
        self.single_active = self.values.get("x-single-active-consumer") is True
        self.ready: deque[Entry] = deque()
        self.returned: deque[Entry] = deque()
        """Messages that came back; they are next."""
        self.consumers: list[Consumer] = []
        self.available = True
        """Whether a majority of its members answers."""
        self.gone = False
        self._log: deque[Callable[[], None]] = deque()
        self._places = 0
        self._commit: object = None
        self._expiry: object = None
        self._expiry_at = float("inf")
        self._unused_since = vhost.broker.now()
        self._unused: object = None
        self.touch()

    # The log.

    def submit(self, change: Callable[[], None]) -> None:
        """Apply a change once the queue's members have it."""
        delay = self.vhost.broker.commit_seconds() if self.quorum else 0.0
        if not delay and not self._log and self.available:
            change()
            return
        self._log.append(change)
        self._commit_later(delay)

    def resume(self) -> None:
        """The members answer again."""
        self.available = True
        self._commit_later(0.0)
        self._deliver()  # some messages may have expired

    def _commit_later(self, delay: float) -> None:
        if self._commit is None and self._log and self.available:
            self._commit = self.vhost.broker.after(delay, self._apply)

    def _apply(self) -> None:
        self._commit = None
        for _ in range(len(self._log)):
            if not self.available or not self._log:
                break
            self._log.popleft()()
        self._commit_later(self.vhost.broker.commit_seconds())

    def die(self, survivors: Callable[[int], int]) -> None:
        """The node dies: some of the last changes are lost, and every delivery returns at the node's start."""
        for timer in (self._commit, self._expiry):
            self.vhost.broker.cancel(timer)
        self._commit, self._expiry, self._expiry_at = None, None, float("inf")
        self.available = False
        self._log = deque(list(self._log)[: survivors(len(self._log))])
        self._log.extend(partial(self._leave, consumer) for consumer in self.consumers)
        if not self.quorum:
            self._log.append(self._lose_transient)

    def start(self) -> None:
        """The node is back, and so are the members."""
        self.available = True
        log, self._log = self._log, deque()
        for change in log:
            change()
        self._deliver()

    def _lose_transient(self) -> None:
        self.ready = deque(entry for entry in self.ready if entry.message.persistent)

    # Messages.

    def counts(self) -> tuple[int, int]:
        """Messages ready, and consumers. Of those that stand by, a quorum queue counts none; of those that ended, it
        counts each that holds messages."""
        consumers = [one for one in self.consumers if one.tag]
        live = sum(not one.ended for one in consumers)
        count = (min(live, 1) if self.single_active else live) + len(consumers) - live if self.quorum else live
        return len(self.ready) + len(self.returned), count

    def publish(self, message: Message, answer: Callable[[bool], object]) -> None:
        """Add a message; ``answer`` gets whether the queue took it."""
        self.submit(lambda: self._enqueue(message, answer))

    def _enqueue(self, message: Message, answer: Callable[[bool], object]) -> None:
        if self.gone:
            answer(True)
            return
        limit = self.values.get("x-max-length")
        full = isinstance(limit, int) and len(self.ready) + len(self.returned) >= limit
        overflow = self.values.get("x-overflow", "drop-head")
        if full and str(overflow).startswith("reject-publish"):
            answer(False)
            return
        ttls = [ttl for ttl in (self.values.get("x-message-ttl"), message.ttl_ms) if isinstance(ttl, int)]
        expires_at = self.vhost.broker.now() + min(ttls) / 1000 if ttls else None
        self._places += 1
        self.ready.append(Entry(self._places, message, expires_at))
        answer(True)
        self._deliver()
        if full and len(self.ready) + len(self.returned) > int(str(limit)):
            self._give_up([self._pop()], b"maxlen")

    def _pop(self) -> Entry:
        return self.returned.popleft() if self.returned else self.ready.popleft()

    def _deliver(self) -> None:
        while self.ready or self.returned:
            self._expire()
            consumer = self._next_consumer()
            if consumer is None or not (self.ready or self.returned):
                break
            entry = self._pop()
            if not consumer.no_ack:
                consumer.unacked[entry.place] = entry
            consumer.channel.deliver(consumer, entry)
        self._expect_expiry()

    def _next_consumer(self) -> Consumer | None:
        """The next in turn; with a single active consumer only the first."""
        live = [one for one in self.consumers if not one.ended and one.tag]
        for consumer in live[:1] if self.single_active else live:
            if consumer.has_room:
                if not self.single_active and len(live) > 1:
                    self.consumers.remove(consumer)
                    self.consumers.append(consumer)
                return consumer
        return None

    # Time.

    def _expire(self) -> None:
        """Give up messages at the head whose time is over."""
        now = self.vhost.broker.now()
        expired = []
        for waiting in (self.returned, self.ready):
            while waiting and (at := waiting[0].expires_at) is not None and at <= now:
                expired.append(waiting.popleft())
            if waiting:
                break
        if expired:
            self._give_up(expired, b"expired")

    def _expect_expiry(self) -> None:
        head = self.returned[0] if self.returned else self.ready[0] if self.ready else None
        at = float("inf") if head is None or head.expires_at is None else head.expires_at
        if at == self._expiry_at:
            return
        self.vhost.broker.cancel(self._expiry)
        self._expiry, self._expiry_at = None, at
        if at < float("inf"):
            self._expiry = self.vhost.broker.after(at - self.vhost.broker.now(), self._on_expiry)

    def _on_expiry(self) -> None:
        self._expiry, self._expiry_at = None, float("inf")
        if self.available and not self.gone and self.vhost.broker.running:
            self._deliver()

    def touch(self) -> None:
        """Somebody uses the queue, so ``x-expires`` begins anew."""
        self._unused_since = self.vhost.broker.now()
        limit = self.values.get("x-expires")
        if isinstance(limit, int) and self._unused is None:
            self._unused = self.vhost.broker.after(limit / 1000, self._on_unused)

    def _on_unused(self) -> None:
        self._unused = None
        left = int(str(self.values["x-expires"])) / 1000 - (self.vhost.broker.now() - self._unused_since)
        if self.gone:
            return
        if self.consumers or left > 0:
            self._unused = self.vhost.broker.after(max(left, 0.001), self._on_unused)
        else:
            self.vhost.delete_queue(self)

    # Settling.

    def settle(self, consumer: Consumer, places: Sequence[int]) -> None:
        self.submit(lambda: self._settle(consumer, places))

    def _settle(self, consumer: Consumer, places: Sequence[int]) -> None:
        for place in places:
            consumer.unacked.pop(place, None)
        self._forget_if_done(consumer)
        self._deliver()

    def reject(self, consumer: Consumer, places: Sequence[int], *, requeue: bool) -> None:
        if requeue and self.quorum and len(places) > HASHED:
            places = self.vhost.broker.shuffled(places)
        self.submit(lambda: self._reject(consumer, places, requeue))

    def _reject(self, consumer: Consumer, places: Sequence[int], requeue: bool) -> None:
        entries = [entry for place in places if (entry := consumer.unacked.pop(place, None)) is not None]
        if requeue and self.quorum and self.delivery_limit is None:
            self._append_again(entries)
        elif requeue:
            self._return(entries)
        else:
            self._give_up(entries, b"rejected")
        self._forget_if_done(consumer)
        self._deliver()

    def _return(self, entries: Iterable[Entry]) -> None:
        limit = self.delivery_limit
        kept, over = [], []
        for entry in entries:
            entry.returns += 1
            (over if limit is not None and entry.returns > limit else kept).append(entry)
        if self.quorum:
            self.returned.extend(kept)
        else:
            self.ready = deque(sorted([*kept, *self.ready], key=lambda entry: entry.place))
        self._give_up(over, b"delivery_limit")

    def _append_again(self, entries: Iterable[Entry]) -> None:
        """Without a delivery limit a quorum queue puts nacked messages at its end, so that its log does not grow."""
        for entry in sorted(entries, key=lambda one: one.place):
            self._places += 1
            self.ready.append(Entry(self._places, entry.message, entry.expires_at, entry.returns + 1))

    @property
    def delivery_limit(self) -> int | None:
        found = self.values.get("x-delivery-limit") if self.quorum else None
        return found if isinstance(found, int) else None

    def _forget_if_done(self, consumer: Consumer) -> None:
        if consumer.ended and not consumer.unacked and consumer in self.consumers:
            self.consumers.remove(consumer)

    # Consumers.

    def consume(self, consumer: Consumer, started: Callable[[], object]) -> None:
        def start() -> None:
            self.consumers.append(consumer)
            started()
            self._deliver()

        self.submit(start)

    def end(self, consumer: Consumer, ended: Callable[[], object]) -> None:
        """The consumer gets no more messages; its channel can still settle those it has."""

        def stop() -> None:
            consumer.ended = True
            self._forget_if_done(consumer)
            ended()
            if self.quorum:  # a classic queue waits for another event
                self._deliver()
            self._delete_if_unused()

        self.submit(stop)

    def leave(self, consumer: Consumer) -> None:
        """The channel is gone: what the consumer holds returns."""
        self.submit(lambda: self._leave(consumer))

    def _leave(self, consumer: Consumer) -> None:
        if consumer not in self.consumers:
            return
        consumer.ended = True
        entries = list(consumer.unacked.values())  # in the order of their deliveries
        consumer.unacked.clear()
        self.consumers.remove(consumer)
        self._return(entries)
        self._deliver()
        self._delete_if_unused()

    def _delete_if_unused(self) -> None:
        if self.auto_delete and not self.gone and not [one for one in self.consumers if one.tag]:
            self.vhost.delete_queue(self)

    def get(self, consumer: Consumer, answer: Callable[[Entry | None, int], object]) -> None:
        """Take the next message for a channel without a consumer, whose messages ``consumer`` holds."""

        def take() -> None:
            self._expire()
            entry = self._pop() if self.ready or self.returned else None
            if entry is not None and not consumer.no_ack:
                consumer.unacked[entry.place] = entry
                if consumer not in self.consumers:
                    self.consumers.append(consumer)
            answer(entry, len(self.ready) + len(self.returned))
            self._expect_expiry()

        self.submit(take)

    # The end of a message, and of the queue.

    def _give_up(self, entries: Sequence[Entry], reason: bytes) -> None:
        exchange = self.values.get("x-dead-letter-exchange")
        if not entries or exchange is None:
            return
        key = self.values.get("x-dead-letter-routing-key")
        death = Death(
            reason,
            self.name.encode(),
            str(exchange).encode(),
            None if key is None else str(key).encode(),
            self.vhost.broker.epoch(),
        )
        self.vhost.dead_letters(self).take([entry.message for entry in entries], death)

    def purge(self) -> int:
        count = len(self.ready) + len(self.returned)
        self.ready.clear()
        self.returned.clear()
        self._expect_expiry()
        return count

    def drop(self) -> None:
        """The queue is deleted, and its consumers are cancelled."""
        self.gone = True
        for timer in (self._expiry, self._unused):
            self.vhost.broker.cancel(timer)
        self.purge()
        consumers, self.consumers = self.consumers, []
        for consumer in consumers:
            if consumer.tag and not consumer.ended:
                consumer.channel.cancelled(consumer)
