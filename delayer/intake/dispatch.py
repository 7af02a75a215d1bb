"""Publishes on behalf of deliveries, and holds the messages that their destinations did not take.

Held messages go to the store if this process has a lane. Without one they return to the cascade, in an envelope that
counts the attempts. After :data:`MAX_ATTEMPTS`, or if only an operator can decide, they go to the strays queue
(``delayer strays``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final, NamedTuple

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
from delayer.intake.ports import Backlog, IntakeSettings
from delayer.intake.session import AckTracker, write_by_halves

log = structlog.get_logger(__name__)
MAX_ATTEMPTS: Final = 10
"""Attempts after which a message in the cascade goes to the strays queue."""
OWN_QUEUE: Final = (
    "if it was nacked, the queue behind that exchange is full: empty it (`delayer refused`, `delayer strays`), or lift "
    "its limit (a policy with max-length and reject-publish). Or a queue there has no majority: "
    "`rabbitmq-queues quorum_status QUEUE`. If the channel closed with 406, the message is larger than the broker's "
    "max_message_size"
)


def new_id() -> bytes:
    """Return an ``x-delayer-id`` for a message that no store has numbered."""
    return os.urandom(16).hex().encode()


class Publication(NamedTuple):
    """A publish on behalf of a delivery.

    ``parcel``: the message to hold if its destination does not take it. None for the cascade and the refused queue,
    which must take it: if they do not, the delivery returns to its queue. ``refusal``: the reason, of a refused
    message. ``earlier``: the note of earlier attempts. ``at_once``: whether the message was due already
    when it was read, so that it says nothing about the lateness of this process.
    """

    delivery: Delivery
    outgoing: Outgoing
    parcel: Parcel | None = None
    refusal: str = ""
    earlier: HoldNote | None = None
    at_once: bool = False

    @property
    def counted(self) -> Counted:
        if self.parcel is None:
            return "refused" if self.refusal else "cascaded", self.delivery.exchange, None
        has_lateness = self.earlier is None and not self.at_once
        return "released", self.parcel.route, self.parcel.due_ms if has_lateness else None


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
        """The hold, with the flags of earlier attempts."""
        return self.hold.after(self.earlier and self.earlier.hold)


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
        """Hold messages, and accept the deliveries of those held. Raises BrokerLost, StoreLost; NotTaken if the cascade
        or the strays queue does not take a message."""
        if objections and self.live.holds_in_store:
            await self._hold_in_store(objections, acks)
        elif objections:
            for portion in self._portions(len(objections)):
                await self._hold_in_broker(objections[portion], acks)

    async def refuse(self, delivery: Delivery, rejected: Rejected, acks: AckTracker) -> None:
        """Refuse a delivery that the store's database rejects."""
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
        finally:
            if due_ms:
                self.counters.took_to_confirm(schedule)
            else:
                self.counters.took("publish", perf_counter() - began)
        reach("intake.confirmed")
        self.counters.batch("publish", len(publications))
        return await self._settle(publications, outcomes, schedule, acks)

    async def _settle(
        self, publications: Sequence[Publication], outcomes: Sequence[Outcome | None], schedule: Pace, acks: AckTracker
    ) -> list[str]:
        through: list[Publication] = []
        objections: list[Objection] = []
        stuck: list[str] = []
        postponed: list[int] = []
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
                postponed.append(publication.delivery.tag)
        acks.postpone(postponed)
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

        await write_by_halves(objections, hold, lambda one, rejected: self.refuse(one.delivery, rejected, acks))

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
        acks.postpone([one.delivery.tag for one, _, outcome in each if not isinstance(outcome, Confirmed)])
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
