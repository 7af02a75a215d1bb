"""Trying strays again: messages that their destination would not take, where no store holds them.

They stand in the strays queue. Those that a daemon put there say in their envelope how often they were tried and when
they are tried again; what the broker itself found no queue for at the end of the cascade is tried when it is first
seen. A *look* reads the queue from its head to its end: what is not due for another try is left unacknowledged, and
given back at the end of the look, where it stood; what is due is published. What is taken is acknowledged; what is not
goes to the end of the queue, with one attempt more and a longer pause. So a stray is in the queue all the time, and
whatever dies in the middle leaves it there, or leaves it there once more under the same ``x-delayer-id``.

The queue has a delivery limit of a million, after which the broker deletes a message. A look adds one to the count of
those that it gives back; there are at most some hundred looks within the longest pause, and what is tried begins anew
with 0. What is none of ours is never tried, so it must not be given back for ever either: it goes to the refused queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import structlog

from delayer.core.backoff import Sparing
from delayer.core.cascade import leads_to, strip_prefix
from delayer.core.hold import Hold, hold_for, unfit
from delayer.core.message import Confirmed, Delivery, Outcome, Outgoing, Parcel, Target
from delayer.core.plan import Refuse
from delayer.services import edits, envelopes
from delayer.services.counting import Counters
from delayer.services.dispatch import NotTaken
from delayer.services.failures import LOSSES
from delayer.services.holding import Notes
from delayer.services.ports import Consumer, Publisher, Pulse, Subscription
from delayer.services.retry import Retry
from delayer.services.sorting import Names, to_refused
from delayer.wire.properties import MalformedProperties, MalformedTable, Properties

log = structlog.get_logger(__name__)

AT_ONCE: Final = 65_535
"""The most that AMQP lets one consumer leave unacknowledged. Strays behind so many that all wait for their next try
come to their turn when those before them have had theirs."""
BATCH: Final = 500
GATHER: Final = 0.005
LONGEST_REST: Final = 10.0
"""Seconds between two looks at most, unless looking takes long: what others put there is to be seen as well."""
SHARE: Final = 20
"""A look that takes a second is followed by a rest of so many."""
LONGEST_LOOK: Final = 120.0
"""Seconds after which what has been read is given back, long before the broker takes a consumer for dead."""


class Stray(NamedTuple):
    """A message in the strays queue. ``held``: what a daemon noted on it; None where the broker put it there."""

    delivery: Delivery
    id: bytes
    parcel: Parcel
    held: envelopes.Held | None = None

    @property
    def attempts(self) -> int:
        return 0 if self.held is None else self.held.attempts

    @property
    def retry_ms(self) -> int | None:
        """When the daemon publishes it, epoch milliseconds; None: a person decides."""
        return self.parcel.due_ms if self.held is None else self.held.retry_ms


class Reader(NamedTuple):
    """What makes a stray of a delivery. ``delivery_exchange``: where the cascade ends. ``due_queue``: the daemon's own
    at its end. ``addressed``: whether the queue of that name may be the end of a cascade that the broker finishes."""

    delivery_exchange: bytes
    due_queue: bytes
    addressed: Callable[[bytes], bool]
    max_properties: Callable[[], int]

    def stray(self, delivery: Delivery) -> Stray | str:
        """Or why it is none: it cannot be read, or it is not there because of us.

        What came out of the cascade for another address than the due queue is a publisher's own message, whose headers
        may look like an envelope's: the way it took says what it is, never its headers.
        """
        try:
            properties = Properties.parse(delivery.properties)
            if delivery.exchange == self.delivery_exchange and not leads_to(delivery.routing_key, self.due_queue):
                return self._finished_by_the_broker(delivery, properties) or (
                    f"not a stray of ours: expected one that the broker was to bring to its queue, found "
                    f"{delivery.routing_key.decode('utf-8', 'backslashreplace')!r} without the headers of one"
                )
            envelope = envelopes.opened(properties, delivery.body, self.max_properties())
            return Stray(delivery, envelope.id, envelope.parcel, envelopes.held(properties))
        except (envelopes.NoEnvelope, MalformedProperties, MalformedTable) as broken:
            return f"not a stray of ours: {broken}"

    def _finished_by_the_broker(self, delivery: Delivery, properties: Properties) -> Stray | None:
        """It came out of the cascade when nothing was bound for its address any more."""
        address = strip_prefix(delivery.routing_key)
        if address == delivery.routing_key:
            return None
        id = properties.get(edits.ID)
        due = properties.get(edits.DUE)
        if id is None or due is None or len(id.content) > envelopes.ID_BYTES or not self.addressed(address):
            return None
        due_ms = int.from_bytes(due.content[:8], "big", signed=True)
        # Without the broker's notes of every level: an envelope around them might fit no frame.
        kept = edits.released(properties, id.content, due_ms)
        parcel = Parcel(
            due_ms,
            b"",
            delivery.exchange,
            delivery.routing_key,
            Target(b"", address),
            kept,
            delivery.body,
        )
        return Stray(delivery, id.content, parcel)


class Strays:
    """Runs until ``stopping`` is set."""

    def __init__(
        self,
        queue: str,
        consumer: Consumer,
        publisher: Publisher,
        reader: Reader,
        *,
        names: Callable[[], Names],
        new_id: Callable[[], bytes],
        notes: Notes,
        counters: Counters,
        pulse: Pulse,
    ) -> None:
        self._queue = queue
        self._consumer = consumer
        self._publisher = publisher
        self._reader = reader
        self._names = names
        self._new_id = new_id
        self._notes = notes
        self._now_ms = notes.now_ms
        self._counters = counters
        self._pulse = pulse
        self._soonest_ms: int | None = None

    async def run(self, stopping: asyncio.Event) -> None:
        """Look, rest until there is something to do, look again."""
        retry, sparing = Retry(stopping, self._beat), Sparing()
        try:
            while not stopping.is_set():
                self._beat()
                if not self._publisher.ready:
                    await retry.wait(1.0)  # what a look reads now could not be tried
                    continue
                interrupted = False
                try:
                    took = await self._look(stopping)
                except LOSSES as lost:
                    if sparing.worth(str(lost), asyncio.get_running_loop().time()):
                        log.warning("strays not tried", queue=self._queue, reason=str(lost))
                    interrupted = True
                if interrupted:
                    await retry.pause()
                    continue
                retry.succeeded()
                sparing.over()
                await retry.wait(self._rest(took))
        finally:
            self._pulse.forget("strays")
            await self._publisher.close()

    def _beat(self) -> None:
        self._pulse.beat("strays")

    def _rest(self, took: float) -> float:
        """Seconds until there is something to try, as far as this look has seen; longer where looking takes long."""
        until = LONGEST_REST if self._soonest_ms is None else (self._soonest_ms - self._now_ms()) / 1000
        return max(min(until, LONGEST_REST), took * SHARE, 0.0)

    async def _look(self, stopping: asyncio.Event) -> float:
        """Wait until there is a stray, and go through all of them. How many seconds that took, without the waiting."""
        loop = asyncio.get_running_loop()
        subscription = await self._consumer.subscribe(self._queue, AT_ONCE)
        began: float | None = None
        worked = 0.0
        self._soonest_ms = None
        try:
            while not stopping.is_set() and (began is None or loop.time() - began < LONGEST_LOOK):
                self._beat()
                batch = await subscription.next_batch(BATCH, GATHER)
                if not batch and began is not None:
                    break
                if batch:
                    began = began or loop.time()
                    await self._try(batch, subscription)
                    worked = loop.time() - began
            await subscription.stop_deliveries()
        finally:
            await subscription.close()
        return worked

    async def _try(self, batch: Sequence[Delivery], subscription: Subscription) -> None:
        now_ms = self._now_ms()
        due: list[Stray] = []
        foreign: list[tuple[Delivery, str]] = []
        for delivery in batch:
            stray = self._reader.stray(delivery)
            if isinstance(stray, str):
                foreign.append((delivery, stray))
            elif stray.retry_ms is not None and stray.retry_ms <= now_ms:
                due.append(stray)
            else:
                self._expect(stray.retry_ms)
        await self._refuse(foreign, subscription)
        begin = 0
        while begin < len(due):
            end = begin + self._publisher.batch_limit
            await self._publish(due[begin:end], subscription)
            begin = end

    def _expect(self, retry_ms: int | None) -> None:
        if retry_ms is not None:
            self._soonest_ms = min(self._soonest_ms or retry_ms, retry_ms)

    async def _refuse(self, foreign: Sequence[tuple[Delivery, str]], subscription: Subscription) -> None:
        """To the refused queue. Raises NotTaken: they stay where they are."""
        names = self._names()
        refused = [to_refused(delivery, Refuse(reason), names, self._new_id()) for delivery, reason in foreign]
        outcomes = await self._publisher.publish([one.outgoing for one in refused])
        through = [one for one, outcome in zip(refused, outcomes, strict=True) if isinstance(outcome, Confirmed)]
        for one in through:
            subscription.ack(one.delivery.tag, multiple=False)
            log.warning(
                "message refused",
                reason=one.refusal,
                exchange=one.delivery.exchange,
                routing_key=one.delivery.routing_key,
            )
        self._counters.add("refused", len(through))
        if len(through) < len(refused):
            raise NotTaken(f"{len(refused) - len(through)} strays were not taken by the refused queue")

    async def _publish(self, strays: Sequence[Stray], subscription: Subscription) -> None:
        prepared = [self._prepared(stray) for stray in strays]
        outcomes = iter(await self._publisher.publish([one for one in prepared if isinstance(one, Outgoing)]))
        through: list[Stray] = []
        failed: list[tuple[Stray, Hold]] = []
        for stray, one in zip(strays, prepared, strict=True):
            outcome: Outcome | Hold = next(outcomes) if isinstance(one, Outgoing) else one
            if isinstance(outcome, Confirmed):
                subscription.ack(stray.delivery.tag, multiple=False)
                through.append(stray)
            elif isinstance(outcome, Hold):
                failed.append((stray, outcome))
            else:
                self._counters.objected(outcome, stray.parcel.route)
                failed.append((stray, hold_for(outcome)))
        self._counters.add("released", len(through))
        self._counters.add_routes("released", [stray.parcel.route for stray in through])
        self._counters.delivered([(stray.parcel.due_ms, stray.parcel.route) for stray in through], self._now_ms())
        await self._hold(failed, subscription)

    def _prepared(self, stray: Stray) -> Outgoing | Hold:
        """The message as it leaves, or the Hold of a message that cannot be published as it stands."""
        parcel = stray.parcel
        try:
            properties = edits.released(Properties.parse(parcel.properties), stray.id, parcel.due_ms)
        except (MalformedProperties, MalformedTable) as broken:
            return unfit(f"malformed properties: {broken}")
        most = self._reader.max_properties()
        if len(properties) > most:
            return unfit(f"the properties are too long: expected at most {most} bytes, found {len(properties)}")
        isolated = stray.held is not None and stray.held.hold.isolated
        return Outgoing(parcel.target.exchange, parcel.target.routing_key, properties, parcel.body, stray.id, isolated)

    async def _hold(self, failed: Sequence[tuple[Stray, Hold]], subscription: Subscription) -> None:
        """To the end of the queue, before they are acknowledged where they were. Raises NotTaken: they stay there."""
        batch, notes = [], []
        for stray, hold in failed:
            earlier = None if stray.held is None else stray.held.hold
            note = self._notes.note(stray.id, hold.after(earlier), stray.attempts + 1)
            properties = envelopes.enveloped(stray.parcel, stray.id, note)
            batch.append(
                Outgoing(self._queue.encode(), stray.parcel.target.routing_key, properties, stray.parcel.body, stray.id)
            )
            notes.append(note)
        stuck = 0
        outcomes = await self._publisher.publish(batch)
        for (stray, _), note, outcome in zip(failed, notes, outcomes, strict=True):
            if not isinstance(outcome, Confirmed):
                stuck += 1
                continue
            subscription.ack(stray.delivery.tag, multiple=False)
            self._expect(note.retry_ms)
            log.warning(
                "message held",
                id=stray.id,
                kind=note.hold.kind,
                reason=note.hold.text,
                attempts=note.attempts,
                exchange=stray.parcel.target.exchange,
                routing_key=stray.parcel.target.routing_key,
                route=stray.parcel.route,
            )
        if stuck:
            raise NotTaken(f"{stuck} of {len(failed)} strays were not taken by their own queue")
