"""From deliveries to what has to be done about them, without doing any of it. Pure but for the ids it is given.

A batch is sorted into what goes to the store (parcels, cancels) and what is published (cascade, destination, refused
queue). Each publication remembers its delivery, and what to hold if the broker will not route it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from delayer.core import cascade
from delayer.core.message import Delivery, Outgoing, Parcel, Target
from delayer.core.plan import AtOnce, Cancel, Cascade, Finish, Park, Plan, Policy, Refuse, decide
from delayer.services import edits
from delayer.wire.properties import MalformedProperties, MalformedTable, Properties


class Sorted(NamedTuple):
    """A delivery, its properties (None where they are broken bytes), and the plan for it."""

    delivery: Delivery
    properties: Properties | None
    plan: Plan


class Publication(NamedTuple):
    """A publish on behalf of a delivery. ``parcel`` is what to hold if the broker will not route it; None where it
    must get through (cascade, refused queue), and the delivery is given back otherwise."""

    delivery: Delivery
    outgoing: Outgoing
    parcel: Parcel | None = None
    refusal: str = ""


@dataclass(slots=True)
class Work:
    """All that one batch asks for. ``parked`` are the deliveries that the store's commit accepts."""

    parked: list[Delivery] = field(default_factory=list)
    parcels: list[Parcel] = field(default_factory=list)
    cancels: list[bytes] = field(default_factory=list)
    publications: list[Publication] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Names:
    """The places that a publication may go to, and how long its properties may be."""

    levels: cascade.Cascade
    due_queue: bytes
    refused_exchange: bytes
    max_properties: int


def sort(delivery: Delivery, policy: Policy, now_ms: int, max_properties: int) -> Sorted:
    """Read what the message asks for and decide. Broken bytes are a reason to refuse, never an exception."""
    try:
        properties = Properties.parse(delivery.properties)
    except MalformedProperties as broken:
        return Sorted(delivery, None, Refuse(f"malformed properties: {broken}"))
    try:
        ask = edits.asked(delivery, properties)
    except MalformedTable as broken:
        return Sorted(delivery, None, Refuse(f"malformed header table: {broken}"))
    if len(delivery.properties) + edits.ROOM > max_properties:
        return Sorted(
            delivery,
            None,
            Refuse(
                f"the properties are too long to carry: expected at most {max_properties - edits.ROOM} bytes, "
                f"found {len(delivery.properties)}"
            ),
        )
    return Sorted(delivery, properties, decide(ask, policy, now_ms))


def work_for(batch: Sequence[Sorted], names: Names, new_id: Callable[[], bytes]) -> Work:
    """What the plans of a batch amount to."""
    work = Work()
    for delivery, properties, plan in batch:
        match plan:
            case Park():
                work.parked.append(delivery)
                work.parcels.append(_parcel(delivery, plan.due_ms, plan.target, plan.key))
            case Cancel():
                work.parked.append(delivery)
                work.cancels.append(plan.key)
            case Refuse():
                work.publications.append(_refusal(delivery, plan.reason, names, new_id()))
            case AtOnce() if properties is not None:
                work.publications.append(_at_once(delivery, properties, plan, new_id()))
            case Cascade() if properties is not None:
                work.publications.append(_into_cascade(delivery, properties, plan, names, new_id()))
            case _:
                raise AssertionError(f"a plan without readable properties: {plan}")
    return work


def _parcel(delivery: Delivery, due_ms: int, target: Target, key: bytes | None = None) -> Parcel:
    return Parcel(
        due_ms,
        delivery.exchange,
        delivery.exchange,
        delivery.routing_key,
        target,
        delivery.properties,
        delivery.body,
        key,
    )


def _at_once(delivery: Delivery, properties: Properties, plan: AtOnce, token: bytes) -> Publication:
    outgoing = Outgoing(*plan.target, edits.released(properties, token, plan.due_ms), delivery.body, token)
    return Publication(delivery, outgoing, _parcel(delivery, plan.due_ms, plan.target))


def _into_cascade(
    delivery: Delivery, properties: Properties, plan: Cascade, names: Names, token: bytes
) -> Publication:
    if plan.finish is Finish.BROKER:
        address = plan.target.routing_key
        carried = edits.for_the_broker(properties, token, plan.due_ms)
    else:
        address = names.due_queue
        carried = edits.enveloped(_parcel(delivery, plan.due_ms, plan.target), token)
    entry = names.levels.entry(plan.seconds).encode()
    return Publication(
        delivery, Outgoing(entry, cascade.routing_key(plan.seconds, address), carried, delivery.body, token)
    )


def _refusal(delivery: Delivery, reason: str, names: Names, token: bytes) -> Publication:
    properties, token = edits.refused(delivery, reason, token, names.max_properties)
    outgoing = Outgoing(names.refused_exchange, delivery.routing_key, properties, delivery.body, token)
    return Publication(delivery, outgoing, refusal=reason)
