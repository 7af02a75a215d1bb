"""Publishes on behalf of deliveries: to the cascade, to destinations, to the refused queue. Holds messages that a
destination did not take: in the store where the daemon has one.

Without a store such a message goes back into the cascade in its envelope, with its attempts counted. After
:data:`MOST_ATTEMPTS`, or where only a person can decide, it goes to the strays queue (``delayer strays``).
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final, NamedTuple

import structlog

from delayer.amqp.edits import Held, into_broker, to_strays
from delayer.broker.ports import Holder, Live, Publisher
from delayer.core.backoff import pause_ms
from delayer.core.counters import Counters
from delayer.core.delay_headers import seconds_until
from delayer.core.errors import NotTaken, Unconfirmed
from delayer.core.faultpoint import reach
from delayer.core.hold import Hold, hold_for
from delayer.core.message import Confirmed, Delivery, Outcome, Outgoing, Parcel, Schedule
from delayer.intake.consume import AckTracker

log = structlog.get_logger(__name__)

MOST_ATTEMPTS: Final = 10
"""Publishes after which a message that waits in the cascade goes to the strays queue."""


class Objection(NamedTuple):
    """A message to hold, and why."""

    delivery: Delivery
    parcel: Parcel
    hold: Hold
    earlier: Held | None = None


class Holding:
    """Holds messages in the store, or in the broker."""

    def __init__(
        self,
        publisher: Publisher,
        store: Holder,
        live: Live,
        counters: Counters,
        *,
        new_id: Callable[[], bytes],
        pause_ms: Callable[[int, int], int] = pause_ms,
    ) -> None:
        """``pause_ms``: the pause after so many attempts, spread by a number of the message's own."""
        self._publisher = publisher
        self._store = store
        self._live = live
        self._counters = counters
        self.new_id = new_id
        self._pause_ms = pause_ms

    async def hold(self, objections: Sequence[Objection]) -> None:
        """Hold these. Raises BrokerLost, StoreLost."""
        if self._live.holds_in_store:
            await self._store.hold(
                [(one.parcel, one.hold.after(one.earlier and one.earlier.hold)) for one in objections]
            )
        else:
            begin = 0
            while begin < len(objections):
                end = begin + self._publisher.batch_limit
                await self._back_into_cascade(objections[begin:end])
                begin = end
        self._count_held(objections)

    async def _back_into_cascade(self, objections: Sequence[Objection]) -> None:
        """Raises NotTaken: the cascade or the strays queue does not take them."""
        now_ms, names = self._live.now_lower_ms(), self._live.names()
        batch: list[Outgoing] = []
        for one in objections:
            token = one.parcel.token or self.new_id()
            note = self._note(one, token, now_ms)
            if note.retry_ms is None:
                batch.append(to_strays(one.parcel, token, note, names))
            else:
                seconds = seconds_until(note.retry_ms, now_ms)
                batch.append(into_broker(one.parcel, token, note.retry_ms, seconds, names, held=note))
        for outgoing, outcome in zip(batch, await self._publisher.publish(batch), strict=True):
            if not isinstance(outcome, Confirmed):
                exchange = outgoing.exchange.decode()
                raise NotTaken(f"exchange {exchange} did not take a message to hold: {hold_for(outcome).text}")

    def _note(self, one: Objection, token: bytes, now_ms: int) -> Held:
        """The note of one attempt more."""
        attempts = _attempts(one.earlier) + 1
        hold = one.hold.after(one.earlier and one.earlier.hold)
        if hold.for_a_person or attempts >= MOST_ATTEMPTS:
            return Held(hold, attempts, None)
        return Held(hold, attempts, now_ms + self._pause_ms(attempts, int.from_bytes(token[-8:], "big")))

    def _count_held(self, objections: Sequence[Objection]) -> None:
        first = [one.parcel.route for one in objections if not _attempts(one.earlier)]
        self._counters.add("held", len(first))
        self._counters.add_routes("held", first)
        for _, parcel, hold, earlier in objections:
            log.warning(
                "message held",
                id=parcel.token,
                kind=hold.kind,
                reason=hold.text,
                attempts=_attempts(earlier) + 1,
                exchange=parcel.target.exchange,
                routing_key=parcel.target.routing_key,
                route=parcel.route,
            )


def _attempts(earlier: Held | None) -> int:
    return 0 if earlier is None else earlier.attempts


def new_id() -> bytes:
    """An ``x-delayer-id`` for a message that no store has numbered."""
    return uuid.uuid4().hex.encode()


class Publication(NamedTuple):
    """A publish on behalf of a delivery.

    ``parcel`` is the message to hold if its destination does not take it; None where the publish must succeed (cascade,
    refused queue): the delivery returns to the queue otherwise. ``refusal``: the reason, of a refused message.
    ``earlier``: the note of earlier attempts.
    """

    delivery: Delivery
    outgoing: Outgoing
    parcel: Parcel | None = None
    refusal: str = ""
    earlier: Held | None = None


class Dispatch:
    """Publishes on behalf of deliveries. It accepts confirmed ones, and holds those that a destination did not take."""

    def __init__(self, publisher: Publisher, holding: Holding, live: Live, counters: Counters) -> None:
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
        """Hold messages, and accept their deliveries. Raises BrokerLost, StoreLost."""
        if objections:
            await self._holding.hold(objections)
            acks.accept(one.delivery.tag for one in objections)

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
        late: list[tuple[float, bytes]] = []
        now_ms = self._live.now_lower_ms()
        for index, (publication, outcome) in enumerate(zip(publications, outcomes, strict=True)):
            parcel = publication.parcel
            if outcome is None:
                continue
            if isinstance(outcome, Confirmed):
                through.append(publication)
                # A held message was delayed by its destination: its lateness is not the daemon's.
                if parcel is not None and publication.earlier is None:
                    late.append((schedule.written_ms.get(index, now_ms) - parcel.due_ms, parcel.route))
                continue
            self._counters.objected(outcome, _route(publication))
            if parcel is not None:
                parcel = parcel._replace(token=publication.outgoing.token)
                objections.append(Objection(publication.delivery, parcel, hold_for(outcome), publication.earlier))
            else:
                exchange = publication.outgoing.exchange.decode("utf-8", "replace")
                stuck.append(f"exchange {exchange!r}: {hold_for(outcome).text}")
        acks.accept(publication.delivery.tag for publication in through)
        self._count(through)
        self._counters.delivered(late)
        await self.hold(objections, acks)
        return stuck

    def _count(self, through: Sequence[Publication]) -> None:
        for publication in through:
            if publication.refusal:
                log.warning(
                    "message refused",
                    reason=publication.refusal,
                    exchange=publication.delivery.exchange,
                    routing_key=publication.delivery.routing_key,
                )
        kinds = [_kind(publication) for publication in through]
        for kind, count in Counter(kinds).items():
            self._counters.add(kind, count)
            self._counters.add_routes(
                kind, [_route(one) for one, its in zip(through, kinds, strict=True) if its == kind]
            )


def _kind(publication: Publication) -> str:
    if publication.refusal:
        return "refused"
    return "cascaded" if publication.parcel is None else "released"


def _route(publication: Publication) -> bytes:
    return publication.delivery.exchange if publication.parcel is None else publication.parcel.route
