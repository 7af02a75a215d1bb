"""The handlers of the intake queue and of the due queue: each carries batches out, and accepts what is safe."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from delayer.core.cascade import MAX_SECONDS
from delayer.core.delay import seconds_until
from delayer.core.errors import StoreLost
from delayer.core.hold import Hold, Limits, too_late
from delayer.core.message import Delivery, Outgoing
from delayer.core.plan import Refuse, has_key
from delayer.core.values import TakenOut
from delayer.services import edits, replies
from delayer.services.classify import Work, classify, to_refused, work_for
from delayer.services.consume import AckTracker
from delayer.services.counting import Counters
from delayer.services.dispatch import Dispatch, Objection, Publication
from delayer.services.envelopes import Envelope, Names, NoEnvelope, into_cascade, opened
from delayer.services.ports import Live, Parking
from delayer.services.retry import raise_first
from delayer.wire.properties import MalformedProperties, MalformedTable, Properties

MOMENT_MS: Final = 1000
"""A message that comes out of the cascade early by less than this waits here; by more, it goes back in."""

Before = asyncio.Future[bool] | None
"""The turn before, if it is not over yet: done with whether it went well."""


class Turns:
    """The order of batches with keys, while several batches are parked at a time.

    "A later message with the same key replaces the waiting one" is about the order in the intake queue. Batches without
    keys need no order; those with keys park one after another.
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
    """Return when the turn before is over. Raises StoreLost if it failed: its messages come again, and those of this
    turn have to come after them."""
    if before is not None and not await asyncio.shield(before):
        raise StoreLost("an earlier batch with keys could not be parked: this one is given back too, to keep the order")


class IntakeHandler:
    """Carries out batches of the intake queue. Safe to call for several batches at a time."""

    def __init__(
        self, live: Live, dispatch: Dispatch, parking: Parking, counters: Counters, new_id: Callable[[], bytes]
    ) -> None:
        self._live = live
        self._dispatch = dispatch
        self._parking = parking
        self._counters = counters
        self._new_id = new_id
        self._turns = Turns()

    async def __call__(self, batch: Sequence[Delivery], acks: AckTracker) -> None:
        """Settle every delivery of the batch. Raises BrokerLost, StoreLost: then some are not settled."""
        policy, names = self._live.policy(), self._live.names()
        self._counters.batch("intake", len(batch))
        now_ms, sure_ms = self._live.now_ms(), self._live.sure_ms()
        plans = [classify(delivery, policy, now_ms, names.max_properties, sure_ms) for delivery in batch]
        work = work_for(plans, names, self._new_id)
        if not any(has_key(one.plan) for one in plans):
            await self._carry_out(work, acks, None)
        else:
            async with self._turns.turn() as before:
                await self._carry_out(work, acks, before)

    async def _carry_out(self, work: Work, acks: AckTracker, before: Before) -> None:
        # All run to their end even if one fails: a parked message is accepted though the broker is blocked.
        raise_first(
            await asyncio.gather(
                self._park(work, acks, before),
                self._dispatch(work.publications, acks),
                self._dispatch.hold(work.late, acks),
                return_exceptions=True,
            )
        )

    async def _park(self, work: Work, acks: AckTracker, before: Before) -> None:
        await wait(before)
        for step in work.steps:
            began = time.perf_counter()
            taken_out = await self._parking.park(step.parcels, step.cancels)
            self._counters.took("park", time.perf_counter() - began)
            self._counters.batch("park", len(step.parcels) + len(step.cancels))
            self._counters.add("parked", len(step.parcels))
            self._counters.add_routes("parked", [parcel.route for parcel in step.parcels])
            acks.accept(delivery.tag for delivery in step.deliveries)
            if step.asked:
                await self._reply(step.asked, taken_out)

    async def _reply(self, asked: Sequence[replies.Asked], taken_out: TakenOut) -> None:
        """Answer cancels. No answer goes to delayer's own queues, where nobody reads it."""
        policy, names = self._live.policy(), self._live.names()
        ours = policy.own_queues | {policy.intake_queue, names.refused_exchange}
        counted = [(ask, replies.outcome(ask, taken_out)) for ask in asked]
        await self._dispatch.reply(
            [replies.reply(ask, said, self._new_id()) for ask, said in counted if ask.reply_to not in ours]
        )


class DueHandler:
    """Carries out batches of the due queue: envelopes at the end of the cascade.

    The cascade measures durations, by the broker's clock; a daemon's clock computed the due instant. Where they
    disagree the later one rules: never early.
    """

    def __init__(self, live: Live, dispatch: Dispatch, new_id: Callable[[], bytes]) -> None:
        self._live = live
        self._dispatch = dispatch
        self._new_id = new_id

    async def __call__(self, batch: Sequence[Delivery], acks: AckTracker) -> None:
        """Settle every delivery of the batch. Raises BrokerLost, StoreLost: then some are not settled."""
        now_ms, names, limits = self._live.sure_ms(), self._live.names(), self._live.late_limits()
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
            parcel, hold = publication.parcel, _too_late(envelope, now_ms, limits)
            if parcel is not None and hold is not None:
                parcel = parcel._replace(token=envelope.id)
                late.append(Objection(delivery, parcel, hold, envelope.held))
                continue
            publications.append(publication)
            if envelope.next_ms - now_ms <= MOMENT_MS:
                last_ms = max(last_ms, envelope.next_ms)
        while (early_ms := last_ms - now_ms) > 0:
            await asyncio.sleep(early_ms / 1000)
            now_ms = self._live.sure_ms()  # again: event loops round sleeps to milliseconds, some of them down
            if last_ms - now_ms > MOMENT_MS:
                # The clock was set back meanwhile, perhaps by hours, and later batches must not wait for that.
                return await self(batch, acks)
        await self._dispatch.hold(late, acks)
        await self._dispatch(publications, acks)


def _next(delivery: Delivery, envelope: Envelope, now_ms: int, names: Names) -> Publication:
    """The next publish of a message: to its destination, or once more through the cascade where its instant is too far
    away. Raises MalformedProperties, MalformedTable."""
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
