"""Outcomes of publishes become acknowledgements, held messages, or returned deliveries. Messages from the due queue are
on time, early by a moment, early by much, late, or junk."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from delayer.amqp.errors import BrokerLost
from delayer.amqp.properties import Properties, encode_headers, entry, int64, long_string
from delayer.amqp.values import CONFIRMED, Delivery
from delayer.core.cascade import MAX_SECONDS, Cascade, routing_key
from delayer.core.counters import Counters
from delayer.core.errors import NotTaken, StoreLost, Unconfirmed
from delayer.core.hold import NACKED, Hold, HoldKind, Outcome, closed_channel, returned, too_late, unanswered
from delayer.core.marks import LAST_DUE
from delayer.core.message import BROKER_LEAD_MS, Parcel, Target
from delayer.core.publisher import Isolated
from delayer.core.units import LATEST_MS
from delayer.format.envelope import Envelope, HoldNote, envelope_properties, read_envelope
from delayer.format.release import released_properties
from delayer.intake.dispatch import MAX_ATTEMPTS, Dispatch, Objection, Publication
from delayer.intake.handle import SLOT_MS, DueHandler
from delayer.intake.session import AckTracker, Session
from tests.support.fakes import NOW, WHY, ScriptedLive, ScriptedPublisher, ScriptedSubscription, delivery, ids, outgoing
from tests.support.memory_store import MemoryBacklog, MemoryStore

INNER = encode_headers(entry(b"mine", long_string(b"kept")))
PARCEL = Parcel(NOW, b"r", b"e", b"k", Target(b"orders.out", b"k"), b"\0\0", b"body")
NO_ROUTE = returned(312, "NO_ROUTE")
Answers = dict[bytes, Outcome | BaseException]


def failing(failure: Exception) -> Callable[[], Awaitable[None]]:
    async def fail() -> None:
        raise failure

    return fail


class Scene:
    def __init__(self, answers: Answers | None = None, failure: Exception | None = None) -> None:
        self.publisher = ScriptedPublisher(answers)
        self.store = MemoryStore(lambda: NOW)
        self.backlog = MemoryBacklog(self.store)
        self.backlog.look()
        if failure is not None:
            self.store.travel = failing(failure)
        self.counters = Counters()
        self.live = ScriptedLive()
        self.dispatch = Dispatch(
            self.publisher, self.backlog, self.live, self.counters, new_id=ids(), pause_ms=lambda n, _: 10_000 * n
        )
        self.acks = ScriptedSubscription()
        self.session = Session(self.acks, lambda: None, 3)
        self.tracker = self.session.acks

    async def run(self, *publications: Publication) -> None:
        self.tracker.add([publication.delivery for publication in publications])
        await self.dispatch.publish(publications, self.tracker)

    async def carry(self, *batch: Delivery) -> None:
        """Handle a batch of the due queue."""
        handler = DueHandler(self.live, self.dispatch)
        handler.begin(self.session)
        self.tracker.add(batch)
        handler.handle(batch)
        await self.session.wait_until_idle()

    @property
    def held(self) -> list[tuple[Parcel, Hold | None]]:
        return [(one.parcel, one.hold) for one in self.store.messages.values()]

    @property
    def instants(self) -> list[int]:
        """The instants of the scheduled publishes, as differences to now."""
        return [due_ms - NOW for pace in self.publisher.paces for due_ms in pace.due_ms]

    @property
    def accepted(self) -> list[int]:
        """Accepted tags, including those after a tag that is not accepted."""
        self.tracker.flush()
        return [tag for tag, _ in self.acks.acked]

    def counted(self) -> dict[str, int]:
        return {kind: count for kind, count in self.counters.as_dict().items() if count}


def publication(tag: int, key: bytes = b"k", *, parcel: Parcel | None = PARCEL, refusal: str = "") -> Publication:
    message = outgoing(b"%d" % tag)._replace(routing_key=key)
    return Publication(delivery(tag), message, None if refusal else parcel, refusal)


# Outcomes of publishes.


async def test_confirmed_publishes_are_accepted_and_counted() -> None:
    it = Scene()
    await it.run(publication(1), publication(2, parcel=None), publication(3, refusal="why"))
    assert it.acks.acked == [(3, True)]
    assert it.counted() == {"released": 1, "cascaded": 1, "refused": 1}
    assert [message.token for message in it.publisher.published] == [b"1", b"2", b"3"]


async def test_returned_messages_are_held_and_accepted() -> None:
    it = Scene({b"gone": NO_ROUTE, b"full": NACKED})
    await it.run(publication(1, b"gone"), publication(2), publication(3, b"full"))
    assert it.held == [(PARCEL._replace(token=b"1"), NO_ROUTE), (PARCEL._replace(token=b"3"), NACKED)]
    assert it.acks.acked == [(3, True)]
    assert it.tracker.outstanding == 0


@pytest.mark.parametrize("answer", [NO_ROUTE, NACKED, closed_channel(404, "no exchange")])
async def test_messages_that_the_cascade_does_not_take_return_to_the_queue(answer: Outcome) -> None:
    """The dispatch first settles the other messages of the batch."""
    it = Scene({b"level": answer, b"gone": NO_ROUTE})
    with pytest.raises(NotTaken, match=r"1 of 4 messages were not taken; the first by exchange 'orders\.out'") as told:
        await it.run(publication(1, b"level", parcel=None), publication(2), publication(3, b"gone"), publication(4))
    assert "is full: empty it" in told.value.advice
    assert it.accepted == [2, 3, 4]
    assert it.tracker.outstanding == 1
    assert len(it.held) == 1


async def test_a_publish_in_doubt_does_not_accept_deliveries() -> None:
    it = Scene({b"lost": BrokerLost("in doubt")})
    with pytest.raises(BrokerLost):
        await it.run(publication(1), publication(2, b"lost"))
    assert it.accepted == []
    assert it.counted() == {}


async def test_known_outcomes_of_an_unconfirmed_batch_are_settled() -> None:
    """An unanswered message does not cause the rest to be repeated."""
    known = [CONFIRMED, None, NO_ROUTE, unanswered(8, b"orders.out", b"k"), None, CONFIRMED]
    it = Scene({b"late": Unconfirmed("2 are missing", known)})
    with pytest.raises(BrokerLost, match="2 are missing"):
        await it.run(*(publication(tag, b"late") for tag in range(1, 7)))
    assert it.accepted == [1, 3, 4, 6]
    assert it.tracker.outstanding == 2
    assert [reason for _, reason in it.held] == [NO_ROUTE, unanswered(8, b"orders.out", b"k")]
    assert it.counted() == {"released": 2, "held": 2, "returned": 1}


async def test_publishes_have_batches_of_the_publishers_size() -> None:
    """Each portion is settled before the next publish, so a later doubt does not repeat it."""
    it = Scene({b"gone": NO_ROUTE, b"level": NACKED, b"lost": BrokerLost("in doubt")})
    it.publisher.batch_limit = 2
    with pytest.raises(BrokerLost, match="in doubt"):
        await it.run(publication(1), publication(2, b"gone"), publication(3), publication(4), publication(5, b"lost"))
    assert it.acks.acked == [(1, True), (2, True), (4, True)]
    assert it.publisher.batches == 3
    assert len(it.held) == 1


async def test_messages_that_cannot_be_held_return_to_the_queue() -> None:
    it = Scene({b"gone": NO_ROUTE}, StoreLost("out of reach"))
    with pytest.raises(StoreLost):
        await it.run(publication(1), publication(2, b"gone"), publication(3))
    assert it.accepted == [1, 3]
    assert it.tracker.outstanding == 1


async def test_holds_have_batches_of_the_publishers_size() -> None:
    it = Scene()
    it.live.holds_in_store = False
    it.publisher.batch_limit = 2
    it.tracker.add([delivery(tag) for tag in range(1, 6)])
    await it.dispatch.hold([Objection(delivery(tag), PARCEL, WHY) for tag in range(1, 6)], it.tracker)
    assert it.publisher.batches == 3
    assert len(it.publisher.published) == it.counted()["held"] == 5
    assert it.acks.acked == [(2, True), (4, True), (5, True)]


@pytest.mark.parametrize("answer", [NACKED, Unconfirmed("no answer", [CONFIRMED, None, CONFIRMED])])
async def test_a_failed_hold_does_not_repeat_the_others(answer: Outcome | Unconfirmed) -> None:
    it = Scene({b"stray": answer})
    it.live.holds_in_store = False
    it.tracker.add([delivery(tag) for tag in range(1, 4)])
    first, last = (Objection(delivery(tag), PARCEL, WHY) for tag in (1, 3))
    stray = Objection(delivery(2), PARCEL._replace(routing_key=b"stray"), Hold(HoldKind.LATE, "why"))
    with pytest.raises(BrokerLost):
        await it.dispatch.hold([first, stray, last], it.tracker)
    assert it.accepted == [1, 3]
    assert it.counted()["held"] == 2


@pytest.mark.parametrize("kind", [HoldKind.LATE, HoldKind.UNFIT])
async def test_messages_for_an_operator_go_to_the_strays_at_once(kind: HoldKind) -> None:
    it = Scene()
    it.live.holds_in_store = False
    await it.dispatch.hold([Objection(delivery(1), PARCEL, Hold(kind, "why"))], it.tracker)
    [stray] = it.publisher.published
    assert stray.exchange == b"delayer.delay-strays"
    held = read_envelope(Properties.parse(stray.properties), stray.body, 10_000).held
    assert held == HoldNote(Hold(kind, "why"), 1, None)


async def test_a_refusal_by_the_cascade_returns_the_delivery_to_the_queue() -> None:
    it = Scene({b"gone": NO_ROUTE, routing_key(10, b"delays.due"): NACKED})
    it.live.holds_in_store = False
    with pytest.raises(NotTaken, match=r"exchange delayer\.delay-level-03 did not take a message to hold"):
        await it.run(publication(1, b"gone"))
    assert (it.accepted, it.counted()) == ([], {"returned": 1})
    assert it.acks.events == ["postponed [1]"]


async def test_each_publish_of_a_batch_is_progress() -> None:
    """Each publish of a large batch feeds the watchdog, although the batch is not acknowledged yet."""
    it = Scene()
    beats: list[int] = []
    it.tracker = AckTracker(it.acks, lambda: beats.append(1))
    it.publisher.batch_limit = 1
    await it.run(publication(1), publication(2), publication(3))
    assert len(beats) == 3


# Messages from the due queue.


def carried(tag: int, due_ms: int, key: bytes = b"k", held: HoldNote | None = None, *, rest_ms: int = 0) -> Delivery:
    parcel = Parcel(due_ms, b"orders.in", b"orders.in", b"k", Target(b"orders.out", key), INNER, b"")
    return delivery(tag, body=b"body")._replace(
        properties=envelope_properties(parcel, b"id", held, rest_ms), exchange=b"delayer.delivery"
    )


@pytest.mark.words
async def test_a_due_message_that_would_close_the_channel_is_refused_for_that() -> None:
    """It is a message of the cascade, and its properties are well-formed."""
    it = Scene()
    parcel = Parcel(NOW, b"orders.in", b"orders.in", b"k", Target(b"orders.out", b"k"), b"\x01\x00\x04soon", b"")
    envelope = delivery(1)._replace(properties=envelope_properties(parcel, b"id"), exchange=b"delayer.delivery")
    await it.carry(envelope)
    [message] = it.publisher.published
    reason = Properties.parse(message.properties).get(b"x-delayer-refused")
    assert reason is not None
    assert reason.content.startswith(b"the broker would close the channel: expiration: ")


@pytest.mark.parametrize("late_ms", [0, 1, 10**10])
async def test_a_due_envelope_goes_to_its_destination(late_ms: int) -> None:
    it = Scene()
    await it.carry(carried(1, NOW - late_ms))
    [message] = it.publisher.published
    assert message[:2] == (b"orders.out", b"k")
    assert message.properties == released_properties(Properties.parse(INNER), b"id", NOW - late_ms, 10_000)
    assert (message.body, message.token) == (b"body", b"id")
    assert it.acks.acked == [(1, True)]
    assert it.instants == []
    assert it.counters.as_dict()["released"] == 1


@pytest.mark.parametrize("early_ms", [1, 500, 999])
async def test_an_envelope_early_by_a_moment_waits_in_memory(early_ms: int) -> None:
    it = Scene()
    await it.carry(carried(1, NOW + early_ms), carried(2, NOW))
    assert it.instants == [early_ms]
    assert [message.exchange for message in it.publisher.published] == [b"orders.out"] * 2


async def test_a_message_waits_for_the_rest_of_its_delay_after_a_clock_is_set_forward() -> None:
    """The cascade counted whole seconds, rounded down; by the clock the message seems due already."""
    it = Scene()
    await it.carry(carried(1, NOW - 3600_000, rest_ms=700))
    assert it.instants == [700]
    assert len(it.publisher.published) == 1


async def test_messages_of_one_slot_share_a_publish_in_the_order_of_their_instants() -> None:
    it = Scene()
    it.publisher.batch_limit = 2
    begin = -NOW % SLOT_MS
    await it.carry(*(carried(tag, NOW + begin + early) for tag, early in enumerate((40, SLOT_MS, 20, 30), 1)))
    assert it.instants == [begin + early for early in (20, 30, 40, SLOT_MS)]
    assert [len(pace.due_ms) for pace in it.publisher.paces] == [2, 1, 1]
    assert sorted(it.accepted) == [1, 2, 3, 4]


async def test_the_lateness_of_a_scheduled_message_is_that_of_its_write() -> None:
    it = Scene()
    it.publisher.written_ms = {0: NOW + 7.0}
    await it.carry(carried(1, NOW + 1))
    assert it.counters.lateness[b"orders.in"].total == pytest.approx(0.006)


@pytest.mark.parametrize(
    ("early_ms", "seconds"),
    [(1000, 1), (2999, 2), (3600_000, 3600), (MAX_SECONDS * 1000 + 1, MAX_SECONDS), (LATEST_MS - NOW, MAX_SECONDS)],
)
async def test_an_envelope_early_by_more_returns_to_the_cascade(early_ms: int, seconds: int) -> None:
    it = Scene()
    # Never into the due queue: a broker whose clock is ahead would keep returning it immediately.
    it.live.places = replace(it.live.places, broker_delays=True)
    await it.carry(carried(1, NOW + early_ms), carried(2, NOW))
    again, released = it.publisher.published
    assert again.exchange == Cascade().entry(seconds).encode()
    assert again.routing_key == routing_key(seconds, b"delays.due")
    assert again.properties == carried(1, NOW + early_ms, rest_ms=early_ms % 1000).properties
    assert released.exchange == b"orders.out"
    assert it.instants == []


JUNK = [
    b"",
    b"\0\0",
    b"\xff\xff",
    encode_headers(b"\x03bad"),
    encode_headers(entry(b"x-delayer-envelope", int64(2))),
    envelope_properties(Parcel(NOW, b"", b"", b"", Target(b"", b""), b"\xff", b""), b"id"),
    envelope_properties(Parcel(NOW, b"", b"", b"", Target(b"", b""), encode_headers(b"\x03bad"), b""), b"id"),
    envelope_properties(Parcel(1 << 62, b"", b"", b"", Target(b"", b""), b"\0\0", b""), b"id"),
    envelope_properties(Parcel(NOW, b"", b"", b"", Target(b"x" * 256, b""), b"\0\0", b""), b"id"),
    envelope_properties(Parcel(NOW, b"", b"", b"", Target(b"", b""), bytes(9_000), b""), b"id"),
]


@pytest.mark.parametrize("raw", JUNK)
async def test_junk_is_refused_and_the_other_messages_continue(raw: bytes) -> None:
    it = Scene()
    await it.carry(carried(1, NOW), delivery(2)._replace(properties=raw), carried(3, NOW))
    assert [message.exchange for message in it.publisher.published] == [b"orders.out", b"delays.refused", b"orders.out"]
    assert it.acks.acked == [(3, True)]
    assert it.counters.as_dict()["refused"] == 1


def opened(raw: bytes) -> Envelope:
    return read_envelope(Properties.parse(raw), b"body", 10_000)


async def test_an_attempt_waits_in_the_due_queue_if_the_broker_delays() -> None:
    it = Scene({b"gone": NACKED})
    it.live.holds_in_store = False
    it.live.places = replace(it.live.places, broker_delays=True)
    await it.carry(carried(1, NOW - 60_000, b"gone"))
    _, again = it.publisher.published
    timer = Properties.parse(again.properties).get(b"x-opt-delivery-time")
    assert (again.exchange, timer and timer.value) == (Cascade().delivery.encode(), NOW + 10_000 - BROKER_LEAD_MS)
    kept = opened(again.properties)
    # The remaining delay is measured from the delivery, so setting the clock forward makes nothing early.
    assert (kept.next_ms, kept.rest_ms) == (NOW + 10_000, BROKER_LEAD_MS)


@pytest.mark.parametrize("attempts", range(MAX_ATTEMPTS))
async def test_the_cascade_counts_attempts_without_a_store(attempts: int) -> None:
    it = Scene({b"gone": NACKED})
    it.live.holds_in_store = False
    earlier = HoldNote(WHY, attempts, NOW - 1) if attempts else None
    await it.carry(carried(1, NOW - 60_000, b"gone", earlier))
    _, again = it.publisher.published
    envelope = opened(again.properties)
    assert (envelope.id, envelope.parcel.due_ms, envelope.held and envelope.held.attempts) == (
        b"id", NOW - 60_000, attempts + 1,
    )  # fmt: skip
    if attempts + 1 < MAX_ATTEMPTS:
        seconds = 10 * (attempts + 1)
        assert (again.exchange, again.routing_key) == (
            Cascade().entry(seconds).encode(), routing_key(seconds, b"delays.due"),
        )  # fmt: skip
        assert envelope.next_ms == NOW + seconds * 1000
    else:
        assert again.exchange == Cascade().strays.encode()
        assert envelope.held is not None
        assert envelope.held.retry_ms is None
    assert it.acks.acked == [(1, True)]
    assert it.counters.as_dict()["held"] == (0 if attempts else 1)


async def test_an_attempt_waits_for_its_instant() -> None:
    it = Scene()
    early = carried(1, NOW - 60_000, held=HoldNote(WHY, 3, NOW + 5_000))
    await it.carry(early, carried(2, NOW - 60_000, held=HoldNote(WHY, 3, NOW + 700)))
    again, released = it.publisher.published
    assert (again.exchange, again.properties) == (Cascade().entry(5).encode(), early.properties)
    assert (released.exchange, it.instants) == (b"orders.out", [700])
    found = Properties.parse(released.properties).get(LAST_DUE)
    assert found is not None
    assert found.value == NOW - 60_000


async def test_the_notes_of_earlier_attempts_stay() -> None:
    """A message that closed a connection stays isolated, and one that may be delivered keeps that flag."""
    it = Scene({b"gone": NACKED})
    it.live.holds_in_store = False
    before = replace(WHY, may_be_delivered=True, isolated=True)
    await it.carry(carried(1, NOW, b"gone", HoldNote(before, 2, NOW)))
    sent, again = it.publisher.published
    held = opened(again.properties).held
    assert isinstance(sent, Isolated)
    assert held is not None
    assert (held.hold.kind, held.hold.may_be_delivered, held.hold.isolated) == ("nacked", True, True)


async def test_a_late_message_is_stray_until_an_operator_retries_it() -> None:
    it = Scene()
    it.live.holds_in_store = False
    it.live.limits = {b"orders.in": 60_000}
    late = too_late(NOW - 70_000, NOW, 60_000)
    assert late is not None
    await it.carry(carried(1, NOW - 70_000), carried(2, NOW - 70_000, held=HoldNote(late, 0, NOW)))
    stray, delivered = it.publisher.published
    assert (stray.exchange, opened(stray.properties).held) == (Cascade().strays.encode(), HoldNote(late, 1, None))
    assert delivered.exchange == b"orders.out"
