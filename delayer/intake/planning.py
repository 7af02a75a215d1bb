"""From a delivery to its plan, and from planned deliveries to the work of their batch. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from delayer.amqp.errors import MalformedProperties, MalformedTable
from delayer.amqp.properties import Properties, splice, value_at
from delayer.amqp.values import Delivery, Outgoing
from delayer.core.delay_headers import DELAY, DelayRequest, is_mark
from delayer.core.delay_sources import CONSULTED, COPY_HEADERS, routing_keys_of
from delayer.core.marks import X_DEATH
from delayer.core.message import REPLACE, KeyGroup, KeyMode, Parcel, Target
from delayer.core.operations import Cancel, Operation
from delayer.core.plan import AtOnce, EnterCascade, Park, Plan, Policy, Refuse, Retry, Soon, TooLate, decide
from delayer.format.envelope import Endpoints, into_broker
from delayer.format.headers import ROOM
from delayer.format.release import note_failure, released_properties
from delayer.intake.dispatch import Objection, Publication, to_refused
from delayer.intake.replies import build_reply

Classified = tuple[Delivery, Properties | None, Plan]
"""A delivery, its properties (None if unusable), and the plan for it."""


@dataclass(slots=True)
class BatchPlan:
    """The publishes and holds of a batch."""

    publications: list[Publication] = field(default_factory=list)
    kept: list[tuple[int, Publication]] = field(default_factory=list)
    """Publications to keep in memory, and when they are due, in epoch milliseconds."""
    late: list[Objection] = field(default_factory=list)
    """Messages that are too late, and are held without a publish."""


def classify(
    delivery: Delivery, policy: Policy, now_ms: int, max_properties: int, now_lower_ms: int | None = None
) -> Classified:
    """Read a message's request and plan it. Malformed properties lead to a refusal, never to an exception."""
    raw = delivery.properties
    if len(raw) + ROOM > max_properties:
        return _unusable(
            delivery,
            f"the properties are too long to carry: expected at most {max_properties - ROOM} bytes, "
            f"found {len(delivery.properties)}",
        )
    route = policy.routes.get(delivery.exchange)
    try:
        properties = Properties.parse(delivery.properties)
        request = read_request(delivery, properties, CONSULTED if route is None else route.consulted)
        plan, edited = decide(request, route, policy, now_ms, now_lower_ms), b""
        if isinstance(plan, Retry):
            edited, plan = note_failure(properties, plan.failed, max_properties), plan.plan
        elif route is not None and route.named and not isinstance(plan, Refuse):
            edited = splice(properties, remove=route.named)
        if edited:
            delivery, properties = delivery._replace(properties=edited), Properties.parse(edited)
    except MalformedProperties as broken:
        return _unusable(delivery, f"malformed properties: {broken}")
    except MalformedTable as broken:
        return _unusable(delivery, f"malformed header table: {broken}")
    return delivery, properties, plan


def read_request(delivery: Delivery, properties: Properties, consulted: frozenset[bytes] = CONSULTED) -> DelayRequest:
    """Read the delay request from a message's headers, limited to ``consulted``. If a header is repeated, the first
    wins, as for the broker, unless it is an ``x-delay`` that is a mark. Collects all ``CC`` and ``BCC``. Raises
    MalformedTable."""
    raw = properties.raw
    headers: dict[bytes, object] = {}
    copies: frozenset[bytes] = frozenset()
    for name, type_at, stop in properties.entries(consulted):
        if name in COPY_HEADERS:
            copies |= routing_keys_of(value_at(raw, type_at, stop))
        elif name not in headers or (name == DELAY and is_mark(headers[name])):
            headers[name] = value_at(raw, type_at, stop)
    # The chance spreads retries. Failed messages without an id can be equal byte for byte, but their tags differ.
    chance = crc32(delivery.tag.to_bytes(8, "big"), crc32(raw)) / (1 << 32) if X_DEATH in headers else 0.0
    _, _, exchange, routing_key, _, body, _ = delivery
    return DelayRequest(exchange, routing_key, headers, properties, body, copies, chance)


def _unusable(delivery: Delivery, reason: str) -> Classified:
    return delivery, None, Refuse(reason)


def batch_plan(batch: Sequence[Classified], names: Endpoints, new_id: Callable[[], bytes]) -> BatchPlan:
    """Build the work of a batch, except for the store's (:func:`operations_of`)."""
    work = BatchPlan()
    for delivery, properties, plan in batch:
        match plan:
            case TooLate():
                work.late.append(Objection(delivery, parcel(delivery, plan.due_ms, plan.target), plan.hold))
            case Refuse():
                work.publications.append(to_refused(delivery, plan.reason, names, new_id(), properties))
            case AtOnce() | Soon() if properties is not None:
                token, (exchange, routing_key) = new_id(), plan.target
                released = released_properties(properties, token, plan.due_ms)
                outgoing = Outgoing(exchange, routing_key, released, delivery.body, token)
                carried = parcel(delivery, plan.due_ms, plan.target)
                undelayed = plan.undelayed and isinstance(plan, AtOnce)  # A default_delay is a delay too.
                publication = Publication(delivery, outgoing, carried, undelayed=undelayed)
                if isinstance(plan, AtOnce):
                    work.publications.append(publication)
                else:
                    work.kept.append((plan.due_ms, publication))
            case EnterCascade() if properties is not None:
                carried = parcel(delivery, plan.due_ms, plan.target)
                outgoing = into_broker(carried, new_id(), plan.due_ms, plan.seconds, names, rest_ms=plan.rest_ms)
                work.publications.append(Publication(delivery, outgoing))
            case _:
                raise AssertionError(f"a plan without usable properties: {plan}")
    return work


def operations_of(batch: Sequence[Classified]) -> list[Operation]:
    """Return the store's operation for each parcel and cancel, in their order."""
    return [
        parcel(delivery, plan.due_ms, plan.target, plan.key, plan.mode) if isinstance(plan, Park) else plan
        for delivery, _, plan in batch
        if isinstance(plan, Park | Cancel)
    ]


def replies_to(
    batch: Sequence[Classified], cancelled: frozenset[int], own_queues: frozenset[bytes], new_id: Callable[[], bytes]
) -> list[Outgoing]:
    """Build the replies to the cancels with a ``reply_to``, except into delayer's own queues. ``cancelled``: the places
    in the batch of the cancels that met a message."""
    # NServiceBus always sets reply_to, and does not expect an answer when it cancels a saga's timeouts.
    return [
        reply
        for at, (_, properties, plan) in enumerate(batch)
        if isinstance(plan, Cancel) and properties is not None and not isinstance(plan.key, KeyGroup)
        if (reply := build_reply(properties, plan.key, new_id(), cancelled=at in cancelled)) is not None
        if reply.routing_key not in own_queues
    ]


def has_key(one: Classified) -> bool:
    """Whether the order of this operation matters."""
    plan = one[2]
    return isinstance(plan, Cancel) or (isinstance(plan, Park) and plan.key is not None)


def parcel(
    delivery: Delivery, due_ms: int, target: Target, key: bytes | None = None, mode: KeyMode = REPLACE
) -> Parcel:
    """Build the parcel of a delivery. Its route has the name of its exchange, even if none is configured."""
    _, _, exchange, routing_key, properties, body, _ = delivery
    return Parcel(due_ms, exchange, exchange, routing_key, target, properties, body, key, mode=mode)
