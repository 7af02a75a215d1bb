"""The handlers of the intake queue and of the due queue.

The intake handler classifies a batch first. Then it writes parcels and cancels to the store, and publishes the other
messages to the cascade, their destination or the refused queue. A delivery is accepted after the commit or the confirm.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final, NamedTuple

import structlog

from delayer.amqp import edits
from delayer.amqp.edits import Endpoints, Envelope, Held, NoEnvelope, into_cascade, opened
from delayer.amqp.errors import MalformedProperties, MalformedTable
from delayer.amqp.properties import Properties
from delayer.broker.ports import Live, Parking, Publisher
from delayer.broker.retry import raise_first
from delayer.core.cascade import MAX_SECONDS
from delayer.core.counters import Counters
from delayer.core.delay_headers import seconds_until
from delayer.core.errors import NotTaken, StoreLost, Unconfirmed
from delayer.core.faultpoint import reach
from delayer.core.hold import Hold, Limits, hold_for, too_late
from delayer.core.message import Confirmed, Delivery, KeyGroup, Outcome, Outgoing, Parcel, Target
from delayer.core.plan import AtOnce, Cancel, EnterCascade, Park, Plan, Policy, Refuse, TooLate, decide, has_key
from delayer.intake import replies
from delayer.intake.consume import AckTracker
from delayer.intake.holding import Holding, Objection

log = structlog.get_logger(__name__)

MOMENT_MS: Final = 1000
"""A message that comes out of the cascade early by less than this waits here; by more, it goes back in."""


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


class Classified(NamedTuple):
    """A delivery, its properties (None where they cannot be used), and the plan for it."""

    delivery: Delivery
    properties: Properties | None
    plan: Plan


@dataclass(slots=True)
class StoreTransaction:
    """One transaction of the store: its cancels act before its parcels. ``deliveries`` are what its commit accepts."""

    deliveries: list[Delivery] = field(default_factory=list)
    parcels: list[Parcel] = field(default_factory=list)
    cancels: list[bytes] = field(default_factory=list)
    keys: set[bytes] = field(default_factory=set)
    asked: list[replies.Asked] = field(default_factory=list)
    """Cancels with a ``reply_to``."""


@dataclass(slots=True)
class BatchPlan:
    """The work of one batch. ``steps`` run one after another; nearly every batch has one at most."""

    steps: list[StoreTransaction] = field(default_factory=list)
    publications: list[Publication] = field(default_factory=list)
    late: list[Objection] = field(default_factory=list)
    """Messages to hold without a publish."""

    def park(self, delivery: Delivery, parcel: Parcel) -> None:
        step = self._step()
        step.deliveries.append(delivery)
        step.parcels.append(parcel)
        if parcel.key is not None:
            step.keys.add(parcel.key)

    def cancel(self, delivery: Delivery, key: bytes, ask: replies.Asked | None = None) -> None:
        """Add a cancel. Behind a parcel of its key it begins a new step, because cancels of a step act first."""
        step = self._step()
        if key in step.keys or (isinstance(key, KeyGroup) and any(one.startswith(key) for one in step.keys)):
            step = StoreTransaction()
            self.steps.append(step)
        step.deliveries.append(delivery)
        step.cancels.append(key)
        if ask is not None:
            step.asked.append(ask)

    def _step(self) -> StoreTransaction:
        if not self.steps:
            self.steps.append(StoreTransaction())
        return self.steps[-1]


def classify(
    delivery: Delivery, policy: Policy, now_ms: int, max_properties: int, now_lower_ms: int | None = None
) -> Classified:
    """Read the request of a message and plan it. The daemon refuses broken bytes; they raise nothing."""
    raw = delivery.properties
    if len(raw) + edits.ROOM > max_properties:
        return _unusable(
            delivery,
            f"the properties are too long to carry: expected at most {max_properties - edits.ROOM} bytes, "
            f"found {len(delivery.properties)}",
        )
    route = policy.routes.get(delivery.exchange)
    dead = route is not None and route.retry is not None
    try:
        properties = Properties.parse(delivery.properties)
        ask = edits.asked(delivery, properties, dead=dead)
    except MalformedProperties as broken:
        return _unusable(delivery, f"malformed properties: {broken}")
    except MalformedTable as broken:
        return _unusable(delivery, f"malformed header table: {broken}")
    plan = decide(ask, policy, now_ms, now_lower_ms)
    if dead and isinstance(plan, Park | EnterCascade | AtOnce) and plan.failed is not None:
        noted = edits.failed(properties, plan.failed, max_properties)
        return Classified(delivery._replace(properties=noted), Properties.parse(noted), plan)
    return Classified(delivery, properties, plan)


def _unusable(delivery: Delivery, reason: str) -> Classified:
    return Classified(delivery, None, Refuse(reason))


def batch_plan(batch: Sequence[Classified], names: Endpoints, new_id: Callable[[], bytes]) -> BatchPlan:
    """The work that the plans of a batch ask for."""
    work = BatchPlan()
    for delivery, properties, plan in batch:
        match plan:
            case Park():
                work.park(delivery, parcel(delivery, plan.due_ms, plan.target, plan.key))
            case Cancel():
                ask = None if properties is None else replies.asked(properties, plan.key)
                work.cancel(delivery, plan.key, ask)
            case TooLate():
                work.late.append(Objection(delivery, parcel(delivery, plan.due_ms, plan.target), plan.hold))
            case Refuse():
                work.publications.append(to_refused(delivery, plan, names, new_id()))
            case AtOnce() if properties is not None:
                token = new_id()
                released = edits.released(properties, token, plan.due_ms)
                due = parcel(delivery, plan.due_ms, plan.target)
                work.publications.append(to_target(delivery, due, token, released))
            case EnterCascade() if properties is not None:
                carried = parcel(delivery, plan.due_ms, plan.target)
                outgoing = into_cascade(carried, new_id(), plan.seconds, names)
                work.publications.append(Publication(delivery, outgoing))
            case _:
                raise AssertionError(f"a plan without usable properties: {plan}")
    return work


def parcel(delivery: Delivery, due_ms: int, target: Target, key: bytes | None = None) -> Parcel:
    """The delivery as it was received, with its due instant and target. A route has the name of its exchange."""
    route = delivery.exchange
    return Parcel(
        due_ms, route, delivery.exchange, delivery.routing_key, target, delivery.properties, delivery.body, key
    )


def to_target(delivery: Delivery, due: Parcel, token: bytes, released: bytes) -> Publication:
    """Publish to the destination; hold it if that fails."""
    return Publication(delivery, Outgoing(due.target.exchange, due.target.routing_key, released, due.body, token), due)


def to_refused(delivery: Delivery, plan: Refuse, names: Endpoints, token: bytes) -> Publication:
    """Set aside in the refused queue."""
    properties, carried = edits.refused(delivery, plan.reason, token, names.max_properties)
    outgoing = Outgoing(names.refused_exchange, delivery.routing_key, properties, delivery.body, carried)
    return Publication(delivery, outgoing, refusal=plan.reason)


class Dispatch:
    """Publishes on behalf of deliveries. It accepts confirmed ones, and holds those that a destination did not take."""

    def __init__(self, publisher: Publisher, holding: Holding, live: Live, counters: Counters) -> None:
        self.publisher = publisher
        self.new_id = holding.new_id
        self._holding = holding
        self._live = live
        self._counters = counters

    async def __call__(self, publications: Sequence[Publication], acks: AckTracker) -> None:
        """Accept or hold the delivery of every publication, in batches of the size that the publisher wants.

        Raises BrokerLost, StoreLost; NotTaken, and Unconfirmed, after every known outcome is settled.
        """
        stuck: list[str] = []
        begin = 0
        while begin < len(publications):
            if begin:
                acks.progress()  # A batch may take many publishes.
            end = begin + self.publisher.batch_limit
            stuck += await self._publish(publications[begin:end], acks)
            begin = end
        if stuck:
            raise NotTaken(f"{len(stuck)} of {len(publications)} messages were not taken; the first by {stuck[0]}")

    async def hold(self, objections: Sequence[Objection], acks: AckTracker) -> None:
        """Hold messages, and accept their deliveries. Raises BrokerLost, StoreLost."""
        if objections:
            await self._holding.hold(objections)
            acks.accept(one.delivery.tag for one in objections)

    async def _publish(self, publications: Sequence[Publication], acks: AckTracker) -> list[str]:
        """Returns the destinations that did not take a message that they must take."""
        began = perf_counter()
        try:
            outcomes = await self.publisher.publish([publication.outgoing for publication in publications])
        except Unconfirmed as late:
            # Settle the known outcomes: an unanswered message must not repeat the others.
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
        # A held message was delayed by its destination: its lateness is not the daemon's.
        out = [
            (one.parcel.due_ms, one.parcel.route)
            for one in through
            if one.parcel is not None and not one.refusal and one.earlier is None
        ]
        self._counters.delivered(out, self._live.now_lower_ms())


def _kind(publication: Publication) -> str:
    if publication.refusal:
        return "refused"
    return "cascaded" if publication.parcel is None else "released"


def _route(publication: Publication) -> bytes:
    return publication.delivery.exchange if publication.parcel is None else publication.parcel.route


Before = asyncio.Future[bool] | None
"""The turn before, if it is not over yet: done with whether it went well."""


class Turns:
    """The order of batches with keys, while several batches are parked at a time.

    A later message with the same key replaces the waiting one, in the order of the intake queue. So batches with keys
    park one after another. Batches without keys need no order.
    """

    def __init__(self) -> None:
        self._last: Before = None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Before]:
        """Take a turn at once, synchronously with the caller; wait for it with :func:`wait`."""
        before = self._last if self._last is not None and not self._last.done() else None
        mine: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._last = mine
        done = False
        try:
            yield before
            done = True
        finally:
            mine.set_result(done)


async def wait(before: Before) -> None:
    """Return when the turn before is over. Raises StoreLost if it failed, because its messages come again, and the
    messages of this turn must come after them."""
    if before is not None and not await asyncio.shield(before):
        raise StoreLost("an earlier batch with keys could not be parked: this one is given back too, to keep the order")


class IntakeHandler:
    """Carries out batches of the intake queue. Safe to call for several batches at a time."""

    def __init__(self, live: Live, dispatch: Dispatch, parking: Parking, counters: Counters) -> None:
        self._live = live
        self._dispatch = dispatch
        self._parking = parking
        self._counters = counters
        self._new_id = dispatch.new_id
        self._turns = Turns()

    async def __call__(self, batch: Sequence[Delivery], acks: AckTracker) -> None:
        """Settle every delivery of the batch. Raises BrokerLost, StoreLost: then some are not settled."""
        policy, names = self._live.policy(), self._live.names()
        self._counters.batch("intake", len(batch))
        now_ms, now_lower_ms = self._live.now_upper_ms(), self._live.now_lower_ms()
        plans = [classify(delivery, policy, now_ms, names.max_properties, now_lower_ms) for delivery in batch]
        work = batch_plan(plans, names, self._new_id)
        if not any(has_key(one.plan) for one in plans):
            await self._carry_out(work, acks, None)
        else:
            async with self._turns.turn() as before:
                await self._carry_out(work, acks, before)

    async def _carry_out(self, work: BatchPlan, acks: AckTracker, before: Before) -> None:
        # All three run to their end even if one fails: a parked message is accepted though the broker is blocked.
        failures = await asyncio.gather(
            self._park(work, acks, before),
            self._dispatch(work.publications, acks),
            self._dispatch.hold(work.late, acks),
            return_exceptions=True,
        )
        try:
            if any(failures):
                raise_first(failures)
        finally:
            del failures  # A failure must not be in a frame of its own traceback (see retry.py).

    async def _park(self, work: BatchPlan, acks: AckTracker, before: Before) -> None:
        await wait(before)
        for step in work.steps:
            began = perf_counter()
            taken_out = await self._parking.park(step.parcels, step.cancels)
            self._counters.took("park", perf_counter() - began)
            self._counters.batch("park", len(step.parcels) + len(step.cancels))
            self._counters.add("parked", len(step.parcels))
            self._counters.add_routes("parked", [parcel.route for parcel in step.parcels])
            acks.accept(delivery.tag for delivery in step.deliveries)
            if step.asked:
                await self._reply(step.asked, taken_out)

    async def _reply(self, asked: Sequence[replies.Asked], taken_out: frozenset[bytes]) -> None:
        """Answer cancels, except into delayer's own queues."""
        policy, names = self._live.policy(), self._live.names()
        ours = policy.own_queues | {policy.intake_queue, names.refused_exchange}
        counted = [(ask, replies.outcome(ask, taken_out)) for ask in asked]
        answers = [replies.reply(ask, outcome, self._new_id()) for ask, outcome in counted if ask.reply_to not in ours]
        await replies.send(self._dispatch.publisher, answers)


class DueHandler:
    """Carries out batches of the due queue: envelopes at the end of the cascade.

    The cascade measures durations by the broker's clock. A daemon's clock computed the due instant. The later of both
    decides, so no message is early.
    """

    def __init__(self, live: Live, dispatch: Dispatch) -> None:
        self._live = live
        self._dispatch = dispatch
        self._new_id = dispatch.new_id

    async def __call__(self, batch: Sequence[Delivery], acks: AckTracker) -> None:
        """Settle every delivery of the batch. Raises BrokerLost, StoreLost: then some are not settled."""
        now_ms, names, limits = self._live.now_lower_ms(), self._live.names(), self._live.late_limits()
        last_ms = now_ms
        publications: list[Publication] = []
        late: list[Objection] = []
        for delivery in batch:
            try:
                envelope = opened(Properties.parse(delivery.properties), delivery.body, names.max_properties)
                publication = _next(delivery, envelope, now_ms, names)
            except (NoEnvelope, MalformedProperties, MalformedTable) as broken:
                refuse = Refuse(f"not a message of the cascade: {broken}")
                publications.append(to_refused(delivery, refuse, names, self._new_id()))
                continue
            parcel, hold = publication.parcel, _too_late(envelope, now_ms, limits) if limits else None
            if parcel is not None and hold is not None:
                parcel = parcel._replace(token=envelope.id)
                late.append(Objection(delivery, parcel, hold, envelope.held))
                continue
            publications.append(publication)
            if envelope.next_ms - now_ms <= MOMENT_MS:
                last_ms = max(last_ms, envelope.next_ms)
        while (early_ms := last_ms - now_ms) > 0:
            await asyncio.sleep(early_ms / 1000)
            now_ms = self._live.now_lower_ms()  # Event loops round sleeps to milliseconds, some of them down.
            if last_ms - now_ms > MOMENT_MS:
                # The clock was set back, perhaps by hours. Later batches must not wait for that.
                return await self(batch, acks)
        await self._dispatch.hold(late, acks)
        await self._dispatch(publications, acks)


def _next(delivery: Delivery, envelope: Envelope, now_ms: int, names: Endpoints) -> Publication:
    """The next publish of a message: to its destination, or through the cascade again if its instant is too far away.
    Raises MalformedProperties, MalformedTable."""
    id, parcel, held = envelope
    released = edits.released(Properties.parse(parcel.properties), id, parcel.due_ms)
    if envelope.next_ms - now_ms > MOMENT_MS:
        seconds = min(seconds_until(envelope.next_ms, now_ms), MAX_SECONDS)
        return Publication(delivery, into_cascade(parcel, id, seconds, names, held))
    isolated = held is not None and held.hold.isolated
    target = parcel.target
    outgoing = Outgoing(target.exchange, target.routing_key, released, parcel.body, id, isolated)
    return Publication(delivery, outgoing, parcel, earlier=held)


def _too_late(envelope: Envelope, now_ms: int, limits: Limits) -> Hold | None:
    """The Hold of a message that is too late for its route. A message that waited for a person is here only because an
    operator retried it, so the daemon delivers it."""
    if envelope.held is not None and envelope.held.hold.for_a_person:
        return None
    return too_late(envelope.parcel.due_ms, now_ms, limits.get(envelope.parcel.route))
