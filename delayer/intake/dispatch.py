"""Publishes on behalf of deliveries: it accepts what the broker confirmed, and holds what a destination did not take.

The store holds such a message where the daemon has one. Without a store the message goes back into the cascade in its
envelope, with its attempts counted; after :data:`MOST_ATTEMPTS`, or where only a person can decide, it goes to the
strays queue (``delayer strays``).
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final, NamedTuple

import structlog

from delayer.amqp.envelopes import Held, into_cascade, to_strays
from delayer.broker.ports import Holder, Live, Publisher
from delayer.core.counters import Counters
from delayer.core.delay_headers import seconds_until
from delayer.core.errors import BrokerLost, NotTaken, Unconfirmed
from delayer.core.faultpoint import reach
from delayer.core.hold import Hold, hold_for
from delayer.core.message import Confirmed, Delivery, Outcome, Outgoing, Parcel
from delayer.intake.consume import AckTracker

log = structlog.get_logger(__name__)

MOST_ATTEMPTS: Final = 10
"""Publishes after which a message that waits in the cascade goes to the strays queue."""


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


class Objection(NamedTuple):
    """A message to hold, and why."""

    delivery: Delivery
    parcel: Parcel
    hold: Hold
    earlier: Held | None = None


class Dispatch:
    """Publishes, holds, accepts."""

    def __init__(
        self,
        publisher: Publisher,
        store: Holder,
        live: Live,
        counters: Counters,
        *,
        new_id: Callable[[], bytes],
        pause_ms: Callable[[int, int], int],
    ) -> None:
        """``pause_ms``: the pause after so many attempts, spread by a number of the message's own."""
        self._publisher = publisher
        self._store = store
        self._live = live
        self._counters = counters
        self._new_id = new_id
        self._pause_ms = pause_ms

    async def __call__(self, publications: Sequence[Publication], acks: AckTracker) -> None:
        """Accept or hold the delivery of every publication, in batches of the size that the publisher wants.

        Raises BrokerLost, StoreLost; NotTaken after everything else is settled; Unconfirmed after what is known is.
        """
        stuck: list[str] = []
        begin = 0
        while begin < len(publications):
            end = begin + self._publisher.batch_limit
            stuck += await self._publish(publications[begin:end], acks)
            begin = end
        if stuck:
            raise NotTaken(f"{len(stuck)} of {len(publications)} messages were not taken; the first by {stuck[0]}")

    async def reply(self, answers: Sequence[Outgoing]) -> None:
        """Publish replies to cancels. The daemon logs a reply that is not confirmed, and does not retry it.

        The broker may return a direct reply that its client got, so the daemon logs those too.
        """
        if not answers:
            return
        failed, reason = len(answers), "the broker takes no publishes"
        if self._publisher.ready:
            try:
                outcomes = await self._publisher.publish(answers)
            except BrokerLost as lost:
                reason = str(lost)
            else:
                unhappy = [hold_for(outcome).text for outcome in outcomes if not isinstance(outcome, Confirmed)]
                failed, reason = len(unhappy), unhappy[0] if unhappy else ""
        if failed:
            log.info("reply not confirmed", replies=failed, reason=reason)

    async def hold(self, objections: Sequence[Objection], acks: AckTracker) -> None:
        """Hold messages: in the store, or in the broker. Raises BrokerLost, StoreLost."""
        if not objections:
            return
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
        acks.accept(one.delivery.tag for one in objections)
        self._count_held(objections)

    async def _back_into_cascade(self, objections: Sequence[Objection]) -> None:
        """Raises NotTaken: the cascade or the strays queue does not take them."""
        now_ms, names = self._live.sure_ms(), self._live.names()
        batch: list[Outgoing] = []
        for one in objections:
            token = one.parcel.token or self._new_id()
            note = self._note(one, token, now_ms)
            if note.retry_ms is None:
                batch.append(to_strays(one.parcel, token, note, names))
            else:
                batch.append(into_cascade(one.parcel, token, seconds_until(note.retry_ms, now_ms), names, note))
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

    async def _publish(self, publications: Sequence[Publication], acks: AckTracker) -> list[str]:
        """Returns the destinations that did not take a message that they must take."""
        began = perf_counter()
        try:
            outcomes = await self._publisher.publish([publication.outgoing for publication in publications])
        except Unconfirmed as late:
            # The known outcomes are true: those messages are not repeated because another one was not answered.
            pairs = zip(publications, late.outcomes, strict=True)
            await self._settle([(one, outcome) for one, outcome in pairs if outcome is not None], acks)
            raise
        reach("intake.confirmed")
        self._counters.took("publish", perf_counter() - began)
        self._counters.batch("publish", len(publications))
        return await self._settle(list(zip(publications, outcomes, strict=True)), acks)

    async def _settle(self, answered: Sequence[tuple[Publication, Outcome]], acks: AckTracker) -> list[str]:
        through: list[Publication] = []
        objections: list[Objection] = []
        stuck: list[str] = []
        for publication, outcome in answered:
            if isinstance(outcome, Confirmed):
                through.append(publication)
                continue
            self._counters.objected(outcome, _route(publication))
            if publication.parcel is not None:
                parcel = publication.parcel._replace(token=publication.outgoing.token)
                objections.append(Objection(publication.delivery, parcel, hold_for(outcome), publication.earlier))
            else:
                exchange = publication.outgoing.exchange.decode("utf-8", "replace")
                stuck.append(f"exchange {exchange!r}: {hold_for(outcome).text}")
        acks.accept(publication.delivery.tag for publication in through)
        self._count(through)
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
        # Of a message that was held its destination was late, not the daemon.
        out = [
            (one.parcel.due_ms, one.parcel.route)
            for one in through
            if one.parcel is not None and not one.refusal and one.earlier is None
        ]
        self._counters.delivered(out, self._live.sure_ms())


def _attempts(earlier: Held | None) -> int:
    return 0 if earlier is None else earlier.attempts


def _kind(publication: Publication) -> str:
    if publication.refusal:
        return "refused"
    return "cascaded" if publication.parcel is None else "released"


def _route(publication: Publication) -> bytes:
    return publication.delivery.exchange if publication.parcel is None else publication.parcel.route
