"""What the broker answered, turned into acknowledgements, held messages, or a delivery given back."""

from __future__ import annotations

import pytest

from delayer.amqp import edits
from delayer.amqp.properties import Properties
from delayer.core.cascade import routing_key
from delayer.core.counters import Counters
from delayer.core.errors import BrokerLost, NotTaken, StoreLost, Unconfirmed
from delayer.core.hold import Hold, HoldKind, hold_for
from delayer.core.message import (
    CONFIRMED,
    NACKED,
    ClosedChannel,
    Confirmed,
    Outcome,
    Parcel,
    Returned,
    Target,
    Unanswered,
)
from delayer.intake.consume import AckTracker
from delayer.intake.handle import Dispatch, Publication
from delayer.intake.holding import Holding, Objection
from tests.support.fakes import NOW, WHY, Acks, ScriptedHolder, ScriptedLive, ScriptedPublisher, delivery, ids, outgoing

PARCEL = Parcel(NOW, b"r", b"e", b"k", Target(b"orders.out", b"k"), b"\0\0", b"body")
NO_ROUTE = Returned(312, "NO_ROUTE")


class Scene:
    def __init__(self, answers: dict[bytes, Outcome | BaseException] | None = None, failure: Exception | None = None):
        self.publisher = ScriptedPublisher(answers)
        self.holder = ScriptedHolder(failure)
        self.counters = Counters()
        self.live = ScriptedLive()
        holding = Holding(
            self.publisher, self.holder, self.live, self.counters, new_id=ids(), pause_ms=lambda n, _: 10_000 * n
        )
        self.dispatch = Dispatch(self.publisher, holding, self.live, self.counters)
        self.acks = Acks()
        self.tracker = AckTracker(self.acks)

    async def run(self, *publications: Publication) -> None:
        self.tracker.read([publication.delivery for publication in publications])
        await self.dispatch(publications, self.tracker)

    @property
    def accepted(self) -> list[int]:
        """Tags, with what waits behind something that is not accepted."""
        self.tracker.flush()
        return [tag for tag, _ in self.acks.acked]

    def counted(self) -> dict[str, int]:
        return {kind: count for kind, count in self.counters.as_dict().items() if count}


def publication(tag: int, key: bytes = b"k", *, parcel: Parcel | None = PARCEL, refusal: str = "") -> Publication:
    message = outgoing(b"%d" % tag)._replace(routing_key=key)
    return Publication(delivery(tag), message, None if refusal else parcel, refusal)


async def test_nothing_to_do() -> None:
    it = Scene()
    await it.run()
    assert it.publisher.batches == 0


async def test_confirmed_publishes_are_accepted_and_counted() -> None:
    it = Scene()
    await it.run(publication(1), publication(2, parcel=None), publication(3, refusal="why"))
    assert it.acks.acked == [(3, True)]
    assert it.counted() == {"released": 1, "cascaded": 1, "refused": 1}
    assert [message.token for message in it.publisher.published] == [b"1", b"2", b"3"]


async def test_returned_messages_are_held_and_accepted() -> None:
    it = Scene({b"gone": NO_ROUTE, b"full": NACKED})
    await it.run(publication(1, b"gone"), publication(2), publication(3, b"full"))
    assert it.holder.held == [
        (PARCEL._replace(token=b"1"), hold_for(NO_ROUTE)),
        (PARCEL._replace(token=b"3"), hold_for(NACKED)),
    ]
    assert it.acks.acked == [(3, True)]
    assert it.tracker.outstanding == 0


@pytest.mark.parametrize("answer", [NO_ROUTE, NACKED, ClosedChannel(404, "no exchange")])
async def test_messages_that_the_cascade_does_not_take_return_to_the_queue(answer: Outcome) -> None:
    """The cascade, the refused queue: everything else of the batch is settled first."""
    it = Scene({b"level": answer, b"gone": NO_ROUTE})
    with pytest.raises(NotTaken, match=r"1 of 4 messages were not taken; the first by exchange 'orders\.out'"):
        await it.run(publication(1, b"level", parcel=None), publication(2), publication(3, b"gone"), publication(4))
    assert it.accepted == [2, 3, 4]
    assert it.tracker.outstanding == 1
    assert len(it.holder.held) == 1


async def test_a_publish_in_doubt_accepts_nothing() -> None:
    it = Scene({b"lost": BrokerLost("in doubt")})
    with pytest.raises(BrokerLost):
        await it.run(publication(1), publication(2, b"lost"))
    assert it.accepted == []
    assert it.counted() == {}


async def test_known_outcomes_of_an_unconfirmed_batch_are_settled() -> None:
    """One that is not answered does not repeat the others."""
    known = [CONFIRMED, None, NO_ROUTE, Unanswered(8, b"orders.out", b"k"), None, CONFIRMED]
    it = Scene({b"late": Unconfirmed("2 are missing", known)})
    with pytest.raises(BrokerLost, match="2 are missing"):
        await it.run(*(publication(tag, b"late") for tag in range(1, 7)))
    assert it.accepted == [1, 3, 4, 6]
    assert it.tracker.outstanding == 2
    assert [reason for _, reason in it.holder.held] == [
        hold_for(one) for one in (NO_ROUTE, Unanswered(8, b"orders.out", b"k"))
    ]
    assert it.counted() == {"released": 2, "held": 2}


async def test_publishes_in_batches_of_the_publisher_s_size() -> None:
    """Each portion is settled before the next one is published: what is in doubt later does not repeat it."""
    it = Scene({b"gone": NO_ROUTE, b"level": NACKED, b"lost": BrokerLost("in doubt")})
    it.publisher.batch_limit = 2
    with pytest.raises(BrokerLost, match="in doubt"):
        await it.run(publication(1), publication(2, b"gone"), publication(3), publication(4), publication(5, b"lost"))
    assert it.acks.acked == [(1, True), (2, True), (4, True)]
    assert it.publisher.batches == 3
    assert len(it.holder.held) == 1


async def test_not_taken_is_raised_after_every_portion() -> None:
    it = Scene({b"level": NACKED})
    it.publisher.batch_limit = 1
    with pytest.raises(NotTaken, match="2 of 4 messages were not taken"):
        await it.run(*(publication(tag, key, parcel=None) for tag, key in enumerate([b"level", b"k"] * 2)))
    assert it.accepted == [1, 3]


async def test_messages_that_cannot_be_held_return_to_the_queue() -> None:
    it = Scene({b"gone": NO_ROUTE}, StoreLost("out of reach"))
    with pytest.raises(StoreLost):
        await it.run(publication(1), publication(2, b"gone"), publication(3))
    assert it.accepted == [1, 3]
    assert it.tracker.outstanding == 1


async def test_without_a_store_it_goes_back_into_the_cascade_in_its_envelope() -> None:
    """Under the id that it has: it may be in its queue already, and a copy must be marked as one."""
    it = Scene({b"gone": Unanswered(8.0, b"x", b"gone")})
    it.live.holds_in_store = False
    await it.run(publication(7, b"gone"))
    _, again = it.publisher.published
    assert (again.exchange, again.routing_key) == (
        it.live.places.levels.entry(10).encode(), routing_key(10, b"delays.due"),
    )  # fmt: skip
    envelope = edits.opened(Properties.parse(again.properties), again.body, 10_000)
    assert (envelope.id, envelope.parcel) == (b"7", PARCEL)
    assert envelope.held == edits.Held(hold_for(Unanswered(8.0, b"x", b"gone")), 1, NOW + 10_000)
    assert (it.acks.acked, it.counted()) == ([(7, True)], {"held": 1})


async def test_holds_in_batches_of_the_publisher_s_size() -> None:
    it = Scene()
    it.live.holds_in_store = False
    it.publisher.batch_limit = 2
    it.tracker.read([delivery(tag) for tag in range(1, 6)])
    await it.dispatch.hold([Objection(delivery(tag), PARCEL, WHY) for tag in range(1, 6)], it.tracker)
    assert it.publisher.batches == 3
    assert len(it.publisher.published) == it.counted()["held"] == 5
    assert it.acks.acked == [(5, True)]


@pytest.mark.parametrize("kind", [HoldKind.LATE, HoldKind.UNFIT])
async def test_messages_for_a_person_go_to_the_strays_at_once(kind: HoldKind) -> None:
    it = Scene()
    it.live.holds_in_store = False
    await it.dispatch.hold([Objection(delivery(1), PARCEL, Hold(kind, "why"))], it.tracker)
    [stray] = it.publisher.published
    assert stray.exchange == b"delayer.delay-strays"
    held = edits.opened(Properties.parse(stray.properties), stray.body, 10_000).held
    assert held == edits.Held(Hold(kind, "why"), 1, None)


async def test_a_cascade_that_does_not_take_it_gives_the_delivery_back() -> None:
    it = Scene({b"gone": NO_ROUTE, routing_key(10, b"delays.due"): NACKED})
    it.live.holds_in_store = False
    with pytest.raises(NotTaken, match=r"exchange delayer\.delay-level-03 did not take a message to hold"):
        await it.run(publication(1, b"gone"))
    assert (it.accepted, it.counted()) == ([], {})


def test_a_counter_that_nobody_knows() -> None:
    counters = Counters()
    with pytest.raises(KeyError, match="expected one of"):
        counters.add("lost", 1)
    assert set(counters.as_dict().values()) == {0}
    assert isinstance(CONFIRMED, Confirmed)


async def test_each_publish_of_a_batch_is_progress() -> None:
    """A batch of many publishes moves, though nothing may be acknowledged yet."""
    it = Scene()
    beats: list[int] = []
    it.tracker = AckTracker(it.acks, lambda: beats.append(1))
    it.publisher.batch_limit = 1
    await it.run(publication(1), publication(2), publication(3))
    assert len(beats) == 2
