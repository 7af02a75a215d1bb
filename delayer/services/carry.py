"""Carrying a batch out: park, publish, hold what cannot be routed, and accept what is safe."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from delayer.core.errors import BrokerLost
from delayer.core.message import Confirmed, Delivery, Nacked, Outcome, Parcel, Returned
from delayer.core.plan import Cascade, Finish, Policy
from delayer.faultpoint import reach
from delayer.services.counting import Counters
from delayer.services.ports import Bindings, Holder, Parking, Publisher
from delayer.services.settle import Settler
from delayer.services.sorting import Names, Publication, Sorted, Work, sort, work_for

log = structlog.get_logger(__name__)


class NotTaken(BrokerLost):
    """The cascade or the refused queue did not take a message that it must take. The delivery is given back."""


class Carrier:
    """Carries batches of the intake queue. Safe to call for several batches at a time."""

    def __init__(
        self,
        *,
        policy: Callable[[], Policy],
        now_ms: Callable[[], int],
        names: Callable[[], Names],
        publisher: Publisher,
        parking: Parking,
        holder: Holder,
        bindings: Bindings,
        new_id: Callable[[], bytes],
        counters: Counters,
    ) -> None:
        self._policy = policy
        self._now_ms = now_ms
        self._names = names
        self._publisher = publisher
        self._parking = parking
        self._holder = holder
        self._bindings = bindings
        self._new_id = new_id
        self._counters = counters

    async def __call__(self, batch: Sequence[Delivery], settler: Settler) -> None:
        """Settle every delivery of the batch. Raises BrokerLost, StoreLost: then some are not settled."""
        policy, names, now_ms = self._policy(), self._names(), self._now_ms()
        plans = [sort(delivery, policy, now_ms, names.max_properties) for delivery in batch]
        work = work_for(await self._finishable(plans), names, self._new_id)
        # Both run to their end even if one fails: what is parked is accepted though the broker is blocked.
        results = await asyncio.gather(
            self._park(work, settler), self._publish(work.publications, settler), return_exceptions=True
        )
        for result in results:
            if result is not None:
                raise result

    async def _finishable(self, plans: list[Sorted]) -> list[Sorted]:
        """The broker can finish only into a queue that is there to be bound. Where it is not there (yet), the daemon
        finishes: it is asked again when the message is due."""
        addresses = {
            plan.plan.target.routing_key
            for plan in plans
            if isinstance(plan.plan, Cascade) and plan.plan.finish is Finish.BROKER
        }
        missing = {address for address in addresses if not await self._bindings.bound(address)}
        if not missing:
            return plans
        for address in sorted(missing):
            log.warning("queue missing", queue=address, consequence="the daemon will finish these messages itself")
        return [
            one._replace(plan=replace(one.plan, finish=Finish.DAEMON))
            if isinstance(one.plan, Cascade) and one.plan.target.routing_key in missing
            else one
            for one in plans
        ]

    async def _park(self, work: Work, settler: Settler) -> None:
        if not work.parked:
            return
        await self._parking.park(work.parcels, work.cancels)
        self._counters.add("parked", len(work.parcels))
        settler.accept(delivery.tag for delivery in work.parked)

    async def _publish(self, publications: Sequence[Publication], settler: Settler) -> None:
        if not publications:
            return
        outcomes = await self._publisher.publish([publication.outgoing for publication in publications])
        reach("intake.confirmed")
        confirmed: list[int] = []
        to_hold: list[tuple[Delivery, Parcel, str]] = []
        stuck: list[str] = []
        for publication, outcome in zip(publications, outcomes, strict=True):
            if isinstance(outcome, Confirmed):
                confirmed.append(publication.delivery.tag)
                self._note(publication)
            elif publication.parcel is not None:
                to_hold.append((publication.delivery, publication.parcel, why(outcome)))
            else:
                stuck.append(f"{publication.outgoing.exchange.decode('utf-8', 'replace')}: {why(outcome)}")
        settler.accept(confirmed)
        if to_hold:
            await self._holder.hold([(parcel, reason) for _, parcel, reason in to_hold])
            settler.accept(delivery.tag for delivery, _, _ in to_hold)
        if stuck:
            raise NotTaken(f"{len(stuck)} messages were not taken; the first by exchange {stuck[0]}")

    def _note(self, publication: Publication) -> None:
        if publication.refusal:
            self._counters.add("refused", 1)
            log.warning(
                "message refused",
                reason=publication.refusal,
                exchange=publication.delivery.exchange,
                routing_key=publication.delivery.routing_key,
            )
        elif publication.parcel is not None:
            self._counters.add("released", 1)
        else:
            self._counters.add("cascaded", 1)


def why(outcome: Outcome) -> str:
    """An unhappy outcome in words, as a reason for holding."""
    match outcome:
        case Returned(code, text):
            return f"returned: {code} {text}"
        case Nacked():
            return "nacked: the destination would not take it"
        case Confirmed():
            raise AssertionError("a confirmed message needs no reason")
