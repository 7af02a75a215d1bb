"""The plan of a batch: what it writes to the store (parcels, cancels), and what it publishes (cascade, destination,
refused queue). Pure but for the ids that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from delayer.core.forms import CONSULTED
from delayer.core.message import Delivery, Outgoing, Parcel, Target
from delayer.core.plan import AtOnce, Cancel, Cascade, Park, Plan, Policy, Refuse, TooLate, decide
from delayer.core.retrying import CONSULTED as RETRY_CONSULTED
from delayer.core.values import KeyGroup
from delayer.services import edits, replies
from delayer.services.dispatch import Objection, Publication
from delayer.services.envelopes import Names, into_cascade
from delayer.wire.properties import MalformedProperties, MalformedTable, Properties


class Sorted(NamedTuple):
    """A delivery, its properties (None where they cannot be used), and the plan for it."""

    delivery: Delivery
    properties: Properties | None
    plan: Plan


@dataclass(slots=True)
class Step:
    """One transaction of the store: its cancels act before its parcels. ``deliveries`` are what its commit accepts."""

    deliveries: list[Delivery] = field(default_factory=list)
    parcels: list[Parcel] = field(default_factory=list)
    cancels: list[bytes] = field(default_factory=list)
    keys: set[bytes] = field(default_factory=set)
    asked: list[replies.Asked] = field(default_factory=list)
    """Cancels that want to hear what became of them."""


@dataclass(slots=True)
class Work:
    """All that one batch asks for. ``steps`` one after another; nearly always there is one at most."""

    steps: list[Step] = field(default_factory=list)
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
        """A cancel that follows a parcel of its key is for the next step: within one it would act first."""
        step = self._step()
        if key in step.keys or (isinstance(key, KeyGroup) and any(one.startswith(key) for one in step.keys)):
            step = Step()
            self.steps.append(step)
        step.deliveries.append(delivery)
        step.cancels.append(key)
        if ask is not None:
            step.asked.append(ask)

    def _step(self) -> Step:
        if not self.steps:
            self.steps.append(Step())
        return self.steps[-1]


def classify(
    delivery: Delivery, policy: Policy, now_ms: int, max_properties: int, sure_ms: int | None = None
) -> Sorted:
    """Read what the message asks for and decide. Broken bytes are a reason to refuse, never an exception."""
    if len(delivery.properties) + edits.ROOM > max_properties:
        return _unusable(
            delivery,
            f"the properties are too long to carry: expected at most {max_properties - edits.ROOM} bytes, "
            f"found {len(delivery.properties)}",
        )
    route = policy.routes.get(delivery.exchange)
    consulted = CONSULTED if route is None or route.retry is None else RETRY_CONSULTED
    try:
        properties = Properties.parse(delivery.properties)
        ask = edits.asked(delivery, properties, consulted)
    except MalformedProperties as broken:
        return _unusable(delivery, f"malformed properties: {broken}")
    except MalformedTable as broken:
        return _unusable(delivery, f"malformed header table: {broken}")
    plan = decide(ask, policy, now_ms, sure_ms)
    if isinstance(plan, Park | Cascade | AtOnce) and plan.failed is not None:
        noted = edits.failed(properties, plan.failed, max_properties)
        return Sorted(delivery._replace(properties=noted), Properties.parse(noted), plan)
    return Sorted(delivery, properties, plan)


def _unusable(delivery: Delivery, reason: str) -> Sorted:
    return Sorted(delivery, None, Refuse(reason))


def work_for(batch: Sequence[Sorted], names: Names, new_id: Callable[[], bytes]) -> Work:
    """What the plans of a batch amount to."""
    work = Work()
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
            case Cascade() if properties is not None:
                carried = parcel(delivery, plan.due_ms, plan.target)
                outgoing = into_cascade(carried, new_id(), plan.seconds, names)
                work.publications.append(Publication(delivery, outgoing))
            case _:
                raise AssertionError(f"a plan without usable properties: {plan}")
    return work


def parcel(delivery: Delivery, due_ms: int, target: Target, key: bytes | None = None) -> Parcel:
    """The delivery as it was received, and what was decided. A route is known by the exchange it is from."""
    route = delivery.exchange
    return Parcel(
        due_ms, route, delivery.exchange, delivery.routing_key, target, delivery.properties, delivery.body, key
    )


def to_target(delivery: Delivery, due: Parcel, token: bytes, released: bytes) -> Publication:
    """Publish to the destination; hold it if that fails."""
    return Publication(delivery, Outgoing(due.target.exchange, due.target.routing_key, released, due.body, token), due)


def to_refused(delivery: Delivery, plan: Refuse, names: Names, token: bytes) -> Publication:
    """Set aside in the refused queue."""
    properties, carried = edits.refused(delivery, plan.reason, token, names.max_properties)
    outgoing = Outgoing(names.refused_exchange, delivery.routing_key, properties, delivery.body, carried)
    return Publication(delivery, outgoing, refusal=plan.reason)
