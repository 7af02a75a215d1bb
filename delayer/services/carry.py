"""Carrying a batch of the intake queue out: sort it, park and publish, accept what is safe."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from delayer.core.message import Delivery
from delayer.core.plan import Cascade, Finish, Policy, has_key
from delayer.core.values import TakenOut
from delayer.services import replies
from delayer.services.counting import Counters
from delayer.services.dispatch import Dispatch
from delayer.services.failures import raise_first
from delayer.services.ports import Bindings, Parking
from delayer.services.settle import Settler
from delayer.services.sorting import Names, Sorted, Work, sort, work_for
from delayer.services.turns import Before, Turns, wait

log = structlog.get_logger(__name__)


class IntakeCarrier:
    """Carries batches of the intake queue. Safe to call for several batches at a time."""

    def __init__(
        self,
        *,
        policy: Callable[[], Policy],
        now_ms: Callable[[], int],
        names: Callable[[], Names],
        dispatch: Dispatch,
        parking: Parking,
        bindings: Bindings,
        new_id: Callable[[], bytes],
        counters: Counters,
        sure_ms: Callable[[], int] | None = None,
    ) -> None:
        """``now_ms`` and ``sure_ms`` are the clock's upper and lower bound; one clock serves for both."""
        self._policy = policy
        self._now_ms = now_ms
        self._sure_ms = sure_ms or now_ms
        self._names = names
        self._dispatch = dispatch
        self._parking = parking
        self._bindings = bindings
        self._new_id = new_id
        self._counters = counters
        self._turns = Turns()

    async def __call__(self, batch: Sequence[Delivery], settler: Settler) -> None:
        """Settle every delivery of the batch. Raises BrokerLost, StoreLost: then some are not settled."""
        policy, names = self._policy(), self._names()
        self._counters.batch("intake", len(batch))
        now_ms, sure_ms = self._now_ms(), self._sure_ms()
        plans = [sort(delivery, policy, now_ms, names.max_properties, sure_ms) for delivery in batch]
        if not any(has_key(one.plan) for one in plans):
            await self._carry(plans, names, settler, None)
        else:
            async with self._turns.turn() as before:
                await self._carry(plans, names, settler, before)

    async def _carry(self, plans: list[Sorted], names: Names, settler: Settler, before: Before) -> None:
        work = work_for(await self._finishable(plans), names, self._new_id)
        # Both run to their end even if one fails: what is parked is accepted though the broker is blocked.
        raise_first(
            await asyncio.gather(
                self._park(work, settler, before),
                self._dispatch(work.publications, settler),
                self._dispatch.hold(work.late, settler),
                return_exceptions=True,
            )
        )

    async def _finishable(self, plans: list[Sorted]) -> list[Sorted]:
        """The broker can finish only into a queue that is there to be bound. Where it is not there (yet), the daemon
        finishes: the destination is asked again when the message is due."""
        addresses = {
            one.plan.target.routing_key
            for one in plans
            if isinstance(one.plan, Cascade) and one.plan.finish is Finish.BROKER
        }
        missing = {address for address in addresses if not await self._bindings.bound(address)}
        if not missing:
            return plans
        for address in sorted(missing):
            log.warning("queue missing", queue=address)
        return [
            one._replace(plan=one.plan._replace(finish=Finish.DAEMON))
            if isinstance(one.plan, Cascade) and one.plan.target.routing_key in missing
            else one
            for one in plans
        ]

    async def _park(self, work: Work, settler: Settler, before: Before) -> None:
        await wait(before)
        for step in work.steps:
            began = time.perf_counter()
            taken_out = await self._parking.park(step.parcels, step.cancels)
            self._counters.took("park", time.perf_counter() - began)
            self._counters.batch("park", len(step.parcels) + len(step.cancels))
            self._counters.add("parked", len(step.parcels))
            self._counters.add_routes("parked", [parcel.route for parcel in step.parcels])
            settler.accept(delivery.tag for delivery in step.deliveries)
            if step.asked:
                await self._reply(step.asked, taken_out)

    async def _reply(self, asked: Sequence[replies.Asked], taken_out: TakenOut) -> None:
        """Say what became of cancels. Not to delayer's own queues: what stands there is no answer to anybody."""
        policy, names = self._policy(), self._names()
        ours = policy.own_queues | {policy.intake_queue, names.refused_exchange}
        counted = [(ask, replies.outcome(ask, taken_out)) for ask in asked]
        await self._dispatch.reply(
            [replies.reply(ask, said, self._new_id()) for ask, said in counted if ask.reply_to not in ours]
        )
