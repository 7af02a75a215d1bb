"""The handlers of the intake queue and of the due queue.

The intake handler plans each delivery when it arrives. It collects parcels and cancels for up to 50 ms, so that they
share a commit. It publishes other messages to the cascade, their destination or the refused queue, and keeps those due
soon in memory. It accepts a delivery after the store's commit or the broker's confirm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from time import monotonic, perf_counter
from typing import Final
from zlib import crc32

import structlog

from delayer.amqp.errors import MalformedProperties, MalformedTable
from delayer.amqp.properties import Properties, splice, value_at
from delayer.amqp.values import Delivery, Outgoing
from delayer.core.cascade import MAX_SECONDS
from delayer.core.counters import Counters
from delayer.core.delay_headers import DELAY, DelayRequest, is_mark, whole_seconds_until
from delayer.core.delay_sources import CONSULTED, routing_keys_of
from delayer.core.faultpoint import reach
from delayer.core.hold import too_late
from delayer.core.marks import LAST_DUE, X_DEATH, LoopWatch
from delayer.core.message import COPY_HEADERS, REPLACE, WINDOW_MS, KeyGroup, KeyMode, Parcel, Target
from delayer.core.operations import Applied, Cancel, Operation
from delayer.core.plan import AtOnce, EnterCascade, Park, Plan, Policy, Refuse, Retry, Soon, TooLate, decide
from delayer.core.publisher import Isolated
from delayer.format.envelope import Endpoints, Envelope, InvalidEnvelope, into_broker, into_cascade, read_envelope
from delayer.format.headers import ROOM
from delayer.format.reading import message_id
from delayer.format.release import Unpublishable, note_failure, released_properties
from delayer.intake.consume import Handler
from delayer.intake.dispatch import Dispatch, Objection, Publication, to_refused
from delayer.intake.ports import Backlog, IntakeSettings
from delayer.intake.replies import build_reply, send_replies
from delayer.intake.session import KEPT_BYTES, Session, write_by_halves

log = structlog.get_logger(__name__)

GATHER_MS: Final = 50
"""The longest time until a message is parked. A commit costs the same for one message as for many."""
URGENT_MS: Final = 10
"""The longest time until a park if ENOUGH_MESSAGES are collected, or if a message has a key, is a cancel, or is due
soon."""
ENOUGH_MESSAGES: Final = 400
"""With this many messages, the cost of a commit is well shared."""
KEEP_MS: Final = WINDOW_MS + GATHER_MS
"""In store mode a message that is due sooner is kept in memory. A claim takes rows WINDOW_MS before they are due, and a
message waits up to GATHER_MS to be parked. A message that is due within KEEP_MS and GATHER_MS is urgent."""
SLOT_MS: Final = 50
"""Messages that are due within one slot are published by one call."""
SLOT_LEAD_MS: Final = 10
"""The call begins this long before its slot, because a busy machine may delay it."""
PARK_MESSAGES: Final = 2000
PARK_BYTES: Final = 8 << 20
"""With this many messages, or bytes of them, a park begins immediately."""


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
    if too_long := _too_long(delivery.properties, max_properties):
        return _unusable(delivery, too_long)
    route = policy.routes.get(delivery.exchange)
    try:
        properties = Properties.parse(delivery.properties)
        request = read_request(delivery, properties, CONSULTED if route is None else route.consulted)
        plan, edited = decide(request, route, policy, now_ms, now_lower_ms), b""
        if isinstance(plan, Retry):
            edited, plan = note_failure(properties, plan.failed, max_properties), plan.plan
        elif route is not None and route.named and not isinstance(plan, Refuse):
            edited = splice(properties, remove=route.named)
        if too_long := _too_long(edited, max_properties):  # A noted failure may make a nearly full frame longer.
            return _unusable(delivery, too_long)
        if edited:
            delivery, properties = delivery._replace(properties=edited), Properties.parse(edited)
    except MalformedProperties as broken:
        return _unusable(delivery, f"malformed properties: {broken}")
    except MalformedTable as broken:
        return _unusable(delivery, f"malformed header table: {broken}")
    return delivery, properties, plan


def _too_long(properties: bytes, max_properties: int) -> str:
    longest = max_properties - ROOM
    if len(properties) <= longest:
        return ""
    return f"the properties are too long to carry: expected at most {longest} bytes, found {len(properties)}"


def read_request(delivery: Delivery, properties: Properties, consulted: frozenset[bytes] = CONSULTED) -> DelayRequest:
    """Read the delay request from a message's headers, limited to ``consulted``. If a header is repeated, the first
    wins, as for the broker, unless it is an ``x-delay`` that is a mark. Collects all ``CC`` and ``BCC``. Raises
    MalformedTable."""
    raw = properties.raw
    headers: dict[bytes, object] = {}
    copies: set[bytes] = set()
    for name, type_at, stop in properties.entries(consulted):
        if name in COPY_HEADERS:
            value = value_at(raw, type_at, stop)
            copies |= routing_keys_of(value)
            headers.setdefault(name, value)
        elif name not in headers or (name == DELAY and is_mark(headers[name])):
            headers[name] = value_at(raw, type_at, stop)
    # The chance spreads retries. Failed messages without an id can be equal byte for byte, but their tags differ.
    chance = crc32(delivery.tag.to_bytes(8, "big"), crc32(raw)) / (1 << 32) if X_DEATH in headers else 0.0
    _, _, exchange, routing_key, _, body, _ = delivery
    return DelayRequest(exchange, routing_key, headers, properties, body, frozenset(copies), chance)


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
                try:
                    released = released_properties(properties, token, plan.due_ms, names.max_properties)
                except Unpublishable as wrong:
                    work.publications.append(to_refused(delivery, str(wrong), names, token, properties))
                    continue
                outgoing = Outgoing(exchange, routing_key, released, delivery.body, token)
                carried = parcel(delivery, plan.due_ms, plan.target)
                at_once = isinstance(plan, AtOnce)
                publication = Publication(delivery, outgoing, carried, at_once=at_once)
                if at_once:
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


class KeepingHandler(Handler):
    """Keeps publications in memory, in slots of time, until shortly before they are due. A Pace then publishes each
    message of a slot on time."""

    def __init__(self, live: IntakeSettings, dispatch: Dispatch) -> None:
        self._live = live
        self._dispatch = dispatch
        self._new_id = dispatch.new_id
        self._slots: dict[int, list[tuple[int, Publication]]] = {}

    @property
    def is_waiting(self) -> bool:
        return bool(self._slots)

    def end(self) -> None:
        self._slots.clear()

    def _keep(self, due_ms: int, publication: Publication) -> None:
        self._session.acks.keep(publication.delivery)
        slot = due_ms // SLOT_MS
        if slot not in self._slots:
            self._slots[slot] = []
            wait_ms = max(0, slot * SLOT_MS - SLOT_LEAD_MS - self._live.now_lower_ms())
            asyncio.get_running_loop().call_later(wait_ms / 1000, self._publish_slot, slot)
        self._slots[slot].append((due_ms, publication))

    def _publish_slot(self, slot: int) -> None:
        kept = sorted(self._slots.pop(slot, ()), key=itemgetter(0))
        if kept:  # The end of a session empties the slots, but leaves their timers.
            publications, due_ms = [one for _, one in kept], [due_ms for due_ms, _ in kept]
            self._session.start(self._dispatch.publish(publications, self._session.acks, due_ms), punctual=True)

    def _publish(self, publications: Sequence[Publication]) -> None:
        if publications:
            self._session.start(self._dispatch.publish(publications, self._session.acks))

    def _hold(self, late: Sequence[Objection]) -> None:
        if late:
            self._session.start(self._dispatch.hold(late, self._session.acks))


class IntakeHandler(KeepingHandler):
    """Handles the deliveries of the intake queue, and gathers those for the store.

    Operations on one key take effect in the order of the queue. So one batch with keys is applied at a time while the
    next one gathers. Batches without keys have no order, so several are applied at the same time."""

    def __init__(self, live: IntakeSettings, dispatch: Dispatch, backlog: Backlog, counters: Counters) -> None:
        super().__init__(live, dispatch)
        self._backlog = backlog
        self._counters = counters
        self._applying_keys = self._term_begun = False
        self._gathered: list[Classified] = []
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._loops = LoopWatch()

    def begin(self, session: Session) -> None:
        super().begin(session)
        self._applying_keys = self._term_begun = False

    def handle(self, batch: Sequence[Delivery]) -> None:
        if not self._term_begun:
            self._term_begun = True
            self._begin_term()
        policy, names = self._policy(), self._live.names()
        self._counters.batch("intake", len(batch))
        clock = monotonic()  # Read first: a pause before the other clocks makes a delay longer, not shorter.
        now_ms, now_lower_ms = self._live.now_upper_ms(), self._live.now_lower_ms()
        stored: list[Classified] = []
        others: list[Classified] = []
        undelayed: list[bytes] = []
        size, urgent = 0, False
        for delivery in batch:
            # 999.5 ms for each second, because the two clocks may drift apart by 0.5 ms in it.
            read_ms = now_ms - int((clock - delivery.read_at) * 999.5) if delivery.read_at else now_ms
            one = classify(delivery, policy, read_ms, names.max_properties, now_lower_ms)
            plan = one[2]
            if plan.undelayed:
                undelayed.append(delivery.exchange)
            if LAST_DUE in delivery.properties:
                self._watch(one, now_ms)
            if isinstance(plan, Park):
                stored.append(one)
                size += _size(delivery)
                urgent = urgent or plan.key is not None or plan.due_ms - now_ms < KEEP_MS + GATHER_MS
            elif isinstance(plan, Cancel):
                stored.append(one)
                size += _size(delivery)
                urgent = True
            else:
                others.append(one)
        self._counters.add("undelayed", undelayed)
        if others:
            work = batch_plan(others, names, self._new_id)
            self._publish(work.publications)
            self._hold(work.late)
            for due_ms, publication in work.kept:
                self._keep(due_ms, publication)
            if work.kept:
                reach("intake.kept")
        if stored:
            self._gather(stored, size, urgent=urgent)

    def _watch(self, one: Classified, now_ms: int) -> None:
        """Log a message that loops through its route, once for each route."""
        delivery, properties, plan = one
        if properties is None or properties.get(LAST_DUE) is None or isinstance(plan, Cancel | Refuse):
            return
        message = properties.short("message_id") or delivery.body
        if self._loops.returned(delivery.exchange, message, plan.due_ms, now_ms):
            log.warning(
                "message loops",
                route=delivery.exchange,
                routing_key=delivery.routing_key,
                message_id=message_id(delivery.properties),
                next_step="delay what comes back: set default_delay, or retry with a limit, on this route",
            )

    def _policy(self) -> Policy:
        """Return the policy of the next batch. If kept messages fill half of the prefetch or of KEPT_BYTES, no more are
        kept."""
        policy, acks = self._live.policy(), self._session.acks
        crowded = acks.kept * 2 > self._session.prefetch or acks.kept_bytes * 2 > KEPT_BYTES
        return replace(policy, keep_ms=0) if crowded and policy.keep_ms else policy

    def _gather(self, stored: list[Classified], size: int, *, urgent: bool) -> None:
        if len(self._gathered) + len(stored) > PARK_MESSAGES or self._bytes + size > PARK_BYTES:
            self.flush()
        self._gathered += stored
        self._bytes += size
        loop = asyncio.get_running_loop()
        full = len(self._gathered) >= PARK_MESSAGES or self._bytes >= PARK_BYTES
        urgent = urgent or len(self._gathered) >= ENOUGH_MESSAGES
        if full or self._session.acks.outstanding >= self._session.prefetch:
            self.flush()
        elif self._timer is None or (urgent and self._timer.when() > loop.time() + URGENT_MS / 1000):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later((URGENT_MS if urgent else GATHER_MS) / 1000, self.flush)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        gathered, self._gathered = self._gathered, []
        while gathered:
            batch, gathered = _cut(gathered)
            if self._applying_keys:  # Messages with keys wait for the end of that batch (_apply).
                self._gathered += [one for one in batch if has_key(one)]
                batch = [one for one in batch if not has_key(one)]
            if batch:
                keyed = any(map(has_key, batch))
                self._applying_keys = self._applying_keys or keyed
                self._session.start(self._apply(batch, keyed=keyed))
        self._bytes = sum(_size(delivery) for delivery, _, _ in self._gathered)

    @property
    def is_full(self) -> bool:
        """Whether a whole batch waits until the current batch with keys is applied."""
        return len(self._gathered) >= PARK_MESSAGES or self._bytes >= PARK_BYTES

    def end(self) -> None:
        super().end()
        self._gathered = []
        self.flush()

    async def _apply(self, batch: Sequence[Classified], *, keyed: bool) -> None:
        """Apply a batch. If a batch with keys fails, no other begins in this session, because the broker redelivers it
        and later batches must follow it."""
        await write_by_halves(
            batch, self._write, lambda one, rejected: self._dispatch.refuse(one[0], rejected, self._session.acks)
        )
        if keyed:
            self._applying_keys = False
            if self._gathered:
                self.flush()

    def _begin_term(self) -> None:
        self._backlog.begin_term()

    async def _commit(self, operations: Sequence[Operation], _tags: Sequence[int]) -> Applied:
        """Apply the operations of the deliveries ``tags`` in one transaction."""
        return await self._backlog.apply(operations)

    async def _write(self, batch: Sequence[Classified]) -> None:
        """Apply a batch in one transaction, accept its deliveries, and answer its cancels."""
        operations = operations_of(batch)
        began = perf_counter()
        try:
            applied = await self._commit(operations, [delivery.tag for delivery, _, _ in batch])
        finally:
            self._counters.took("park", perf_counter() - began)
        self._counters.batch("park", len(operations))
        self._counters.add("parked", [one.route for one in operations if isinstance(one, Parcel)])
        self._session.acks.accept(delivery.tag for delivery, _, _ in batch)
        if answers := replies_to(batch, applied.cancelled, self._live.policy().own_queues, self._new_id):
            # In a separate task, so that an unconfirmed reply does not delay a batch.
            self._session.start(send_replies(self._dispatch.publisher, answers), punctual=True)


def _size(delivery: Delivery) -> int:
    return len(delivery.body) + len(delivery.properties)


def _cut(gathered: list[Classified]) -> tuple[list[Classified], list[Classified]]:
    """Split off one batch. Returns it and the rest."""
    size = 0
    for at, (delivery, _, _) in enumerate(gathered):
        size += _size(delivery)
        if at and (size > PARK_BYTES or at >= PARK_MESSAGES):
            return gathered[:at], gathered[at:]
    return gathered, []


class DueHandler(KeepingHandler):
    """Handles the deliveries of the due queue: envelopes from the end of the cascade, or delayed by the broker.

    The cascade measures whole seconds by the broker's clock, and a daemon's clock computed the due instant. A message
    leaves at the later of the two, so it is never early.
    """

    def handle(self, batch: Sequence[Delivery]) -> None:
        now_ms, names, limits = self._live.now_lower_ms(), self._live.names(), self._live.late_limits()
        publications: list[Publication] = []
        late: list[Objection] = []
        kept = False
        for delivery in batch:
            try:
                envelope = read_envelope(Properties.parse(delivery.properties), delivery.body, names.max_properties)
                publication = _next_publication(delivery, envelope, now_ms, names)
            except (InvalidEnvelope, MalformedProperties, MalformedTable, Unpublishable) as broken:
                said = "" if isinstance(broken, Unpublishable) else "not a message of the cascade: "
                reason = f"{said}{broken}"
                publications.append(to_refused(delivery, reason, names, self._new_id()))
                continue
            parcel, held, limit_ms = publication.parcel, envelope.held, limits.get(envelope.parcel.route)
            hold = too_late(envelope.parcel.due_ms, now_ms, limit_ms, held and held.hold) if limits else None
            if parcel is not None and hold is not None:
                parcel = parcel._replace(token=envelope.id)
                late.append(Objection(delivery, parcel, hold, held))
            elif parcel is not None and (at_ms := _publish_at_ms(envelope, now_ms)) > now_ms:
                self._keep(at_ms, publication)
                kept = True
            else:
                publications.append(publication)
        self._hold(late)
        self._publish(publications)
        if kept:
            reach("intake.kept")


def _publish_at_ms(envelope: Envelope, now_ms: int) -> int:
    """Return when to publish a delivered envelope. If its time has passed, it waits for the rest of its delay from now,
    because it is late or the clock was set forward, and the daemon cannot distinguish these."""
    return envelope.next_ms if envelope.next_ms > now_ms else now_ms + envelope.rest_ms


def _next_publication(delivery: Delivery, envelope: Envelope, now_ms: int, names: Endpoints) -> Publication:
    """Build the next publish of a message: to its destination, or through the cascade if it is due in a second or more.
    It never goes straight into the due queue again, because a broker whose clock is ahead, or that no longer delays,
    would return it immediately, forever. Raises MalformedProperties, MalformedTable, Unpublishable."""
    id, parcel, held, _ = envelope
    released = released_properties(Properties.parse(parcel.properties), id, parcel.due_ms, names.max_properties)
    seconds = min(whole_seconds_until(envelope.next_ms, now_ms), MAX_SECONDS)
    if seconds:
        rest_ms = (envelope.next_ms - now_ms) % 1000
        return Publication(delivery, into_cascade(parcel, id, seconds, names, held=held, rest_ms=rest_ms))
    form = Isolated if held is not None and held.hold.isolated else Outgoing
    outgoing = form(*parcel.target, released, parcel.body, id)
    return Publication(delivery, outgoing, parcel, earlier=held)
