"""What the broker answered, turned into acknowledgements, held messages, or a delivery given back."""

from __future__ import annotations

import pytest

from delayer.core.errors import BrokerLost, StoreLost, Unconfirmed
from delayer.core.hold import hold_for
from delayer.core.message import (
    CONFIRMED,
    NACKED,
    ClosedChannel,
    Confirmed,
    Delivery,
    Outcome,
    Outgoing,
    Parcel,
    Returned,
    Target,
    Unanswered,
)
from delayer.core.plan import DEFAULT_FORMS, AtOnce, Policy, Route
from delayer.services import edits, envelopes
from delayer.services.counting import Counters
from delayer.services.dispatch import Dispatch, NotTaken, Publication
from delayer.services.holding import Holding, Notes, RefusedHolder, StraysHolder
from delayer.services.refusals import Doors, again, told
from delayer.services.settle import Settler
from delayer.services.sorting import sort
from delayer.wire.properties import Properties
from tests.rig.fakes import NOW, WHY, Acks, ScriptedHolder, ScriptedPublisher, delivery, ids, outgoing
from tests.rig.raw import Header, Props, number, text

PARCEL = Parcel(NOW, b"r", b"e", b"k", Target(b"orders.out", b"k"), b"\0\0", b"body")
NO_ROUTE = Returned(312, "NO_ROUTE")
NOTES = Notes(lambda: NOW, lambda attempts, _: 10_000 * attempts)


class Scene:
    def __init__(self, answers: dict[bytes, Outcome | BaseException] | None = None, failure: Exception | None = None):
        self.publisher = ScriptedPublisher(answers)
        self.holder = ScriptedHolder(failure)
        self.counters = Counters()
        self.dispatch = Dispatch(self.publisher, self.holder, self.counters)
        self.acks = Acks()
        self.settler = Settler(self.acks)

    async def run(self, *publications: Publication) -> None:
        self.settler.read([publication.delivery for publication in publications])
        await self.dispatch(publications, self.settler)

    @property
    def accepted(self) -> list[int]:
        """Tags, with what waits behind something that is not accepted."""
        self.settler.flush()
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


async def test_what_is_confirmed_is_accepted_and_counted() -> None:
    it = Scene()
    await it.run(publication(1), publication(2, parcel=None), publication(3, refusal="why"))
    assert it.acks.acked == [(3, True)]
    assert it.counted() == {"released": 1, "cascaded": 1, "refused": 1}
    assert [message.token for message in it.publisher.published] == [b"1", b"2", b"3"]


async def test_what_its_destination_does_not_take_is_held_and_accepted() -> None:
    it = Scene({b"gone": NO_ROUTE, b"full": NACKED})
    await it.run(publication(1, b"gone"), publication(2), publication(3, b"full"))
    assert it.holder.held == [
        (PARCEL._replace(token=b"1"), hold_for(NO_ROUTE)),
        (PARCEL._replace(token=b"3"), hold_for(NACKED)),
    ]
    assert it.acks.acked == [(3, True)]
    assert it.settler.outstanding == 0


@pytest.mark.parametrize("answer", [NO_ROUTE, NACKED, ClosedChannel(404, "no exchange")])
async def test_what_must_be_taken_and_is_not_is_given_back(answer: Outcome) -> None:
    """The cascade, the refused queue: everything else of the batch is settled first."""
    it = Scene({b"level": answer, b"gone": NO_ROUTE})
    with pytest.raises(NotTaken, match=r"1 of 4 messages were not taken; the first by exchange 'orders\.out'"):
        await it.run(publication(1, b"level", parcel=None), publication(2), publication(3, b"gone"), publication(4))
    assert it.accepted == [2, 3, 4]
    assert it.settler.outstanding == 1
    assert len(it.holder.held) == 1


async def test_a_publish_in_doubt_accepts_nothing() -> None:
    it = Scene({b"lost": BrokerLost("in doubt")})
    with pytest.raises(BrokerLost):
        await it.run(publication(1), publication(2, b"lost"))
    assert it.accepted == []
    assert it.counted() == {}


async def test_what_is_known_of_a_batch_in_doubt_is_settled() -> None:
    """One that is not answered does not repeat the others."""
    known = [CONFIRMED, None, NO_ROUTE, Unanswered(8, b"orders.out", b"k"), None, CONFIRMED]
    it = Scene({b"late": Unconfirmed("2 are missing", known)})
    with pytest.raises(BrokerLost, match="2 are missing"):
        await it.run(*(publication(tag, b"late") for tag in range(1, 7)))
    assert it.accepted == [1, 3, 4, 6]
    assert it.settler.outstanding == 2
    assert [reason for _, reason in it.holder.held] == [
        hold_for(one) for one in (NO_ROUTE, Unanswered(8, b"orders.out", b"k"))
    ]
    assert it.counted() == {"released": 2}


async def test_as_many_at_a_time_as_the_publisher_wants() -> None:
    """Each portion is settled before the next one is published: what is in doubt later does not repeat it."""
    it = Scene({b"gone": NO_ROUTE, b"level": NACKED, b"lost": BrokerLost("in doubt")})
    it.publisher.batch_limit = 2
    with pytest.raises(BrokerLost, match="in doubt"):
        await it.run(publication(1), publication(2, b"gone"), publication(3), publication(4), publication(5, b"lost"))
    assert it.acks.acked == [(1, True), (2, True), (4, True)]
    assert it.publisher.batches == 3
    assert len(it.holder.held) == 1


async def test_what_must_be_taken_is_complained_of_when_every_portion_is_through() -> None:
    it = Scene({b"level": NACKED})
    it.publisher.batch_limit = 1
    with pytest.raises(NotTaken, match="2 of 4 messages were not taken"):
        await it.run(*(publication(tag, key, parcel=None) for tag, key in enumerate([b"level", b"k"] * 2)))
    assert it.accepted == [1, 3]


async def test_what_cannot_be_held_is_given_back() -> None:
    it = Scene({b"gone": NO_ROUTE}, StoreLost("out of reach"))
    with pytest.raises(StoreLost):
        await it.run(publication(1), publication(2, b"gone"), publication(3))
    assert it.accepted == [1, 3]
    assert it.settler.outstanding == 1


async def test_strays_are_held_in_their_envelope() -> None:
    publisher, counters = ScriptedPublisher(), Counters()
    holder = StraysHolder(publisher, b"delayer.delay-strays", ids(), counters, NOTES)
    await holder.hold([(PARCEL, WHY), (PARCEL, WHY)])
    assert [(one.exchange, one.token, one.body) for one in publisher.published] == [
        (b"delayer.delay-strays", b"id-0", b"body"),
        (b"delayer.delay-strays", b"id-1", b"body"),
    ]
    found = Properties.parse(publisher.published[0].properties)
    assert envelopes.opened(found, b"body", 10_000) == (b"id-0", PARCEL)
    assert envelopes.held(found) == envelopes.Held(WHY, 1, NOW + 10_000)
    assert counters.as_dict()["held"] == 2


async def test_what_was_published_is_held_under_the_id_that_it_has() -> None:
    """It may be in its queue already: tried again, it is a copy, and must be marked as one."""
    it = Scene({b"gone": Unanswered(8.0, b"x", b"gone")})
    await it.run(publication(7, b"gone"))
    [(parcel, _)] = it.holder.held
    assert parcel == PARCEL._replace(token=b"7")
    publisher = ScriptedPublisher()
    await StraysHolder(publisher, b"strays", ids(), Counters(), NOTES).hold([(parcel, WHY), (PARCEL, WHY)])
    assert [one.token for one in publisher.published] == [b"7", b"id-0"]
    envelope = envelopes.opened(Properties.parse(publisher.published[0].properties), b"body", 10_000)
    assert envelope.id == b"7"


async def test_strays_are_held_as_many_at_a_time_as_the_publisher_wants() -> None:
    publisher, counters = ScriptedPublisher(), Counters()
    publisher.batch_limit = 2
    await StraysHolder(publisher, b"strays", ids(), counters, NOTES).hold([(PARCEL, WHY)] * 5)
    assert publisher.batches == 3
    assert len(publisher.published) == counters.as_dict()["held"] == 5


async def test_where_there_are_no_strays_it_is_refused_and_can_be_tried_again() -> None:
    """Beside a shared cascade: as every refusal, with its reason and where it came in. It does not wait once more."""
    publisher, counters = ScriptedPublisher(), Counters()
    headers = (
        (b"x-delay", number("l", 5000)), (b"x-deliver-at", number("l", NOW)), (b"x-opt-delivery-delay", number("I", 7)),
        (b"x-delay-routing-key", text("k")), (b"who", text("me")),
    )  # fmt: skip
    props = Props(headers=headers, message_id=b"m", expiration=b"60000")
    parcel = PARCEL._replace(properties=props.encode(), token=b"before")
    await RefusedHolder(publisher, b"delays.refused", ids(), counters).hold([(parcel, hold_for(NO_ROUTE))] * 2)
    refused = publisher.published[0]
    assert (refused.exchange, refused.body, refused.token) == (b"delays.refused", b"body", b"before")
    stands = Delivery(1, False, b"", b"delays.refused", refused.properties, refused.body)
    doors = Doors(b"delays", frozenset({PARCEL.exchange}))
    said = told(stands, doors)
    assert said.reason == "returned: 312 NO_ROUTE"
    assert (said.exchange, said.routing_key, said.message_id) == (b"e", b"k", "m")
    back = again(stands, doors)
    assert isinstance(back, Outgoing)
    assert (back.exchange, back.routing_key) == (b"e", b"k")
    came = Props.decode(back.properties)
    assert came.expiration == b"60000"
    assert [(name, value) for name, value in came.headers or () if name != b"x-delayer-id"] == [
        (b"x-delay", number("l", -5000)), (b"x-delay-routing-key", text("k")), (b"who", text("me")),
        (b"x-opt-delivery-delay", number("l", 0)),
    ]  # fmt: skip
    assert counters.as_dict()["refused"] == 2
    assert counters.as_dict()["held"] == 0


@pytest.mark.parametrize("form", [*DEFAULT_FORMS, None])
def test_what_is_refused_so_is_due_at_once_when_it_comes_again(form: str | None) -> None:
    """However its delay was said, and where nothing said it but the route."""
    route = Route(b"e", b"orders.out", default_delay_ms=60_000)
    said: dict[str, tuple[Header, ...]] = {
        "x-delay": ((b"x-delay", number("I", 60_000)),),
        "x-deliver-at": ((b"x-deliver-at", number("l", NOW)),),
        "x-opt-delivery-time": ((b"x-opt-delivery-time", number("l", NOW)),),
        "x-opt-delivery-delay": ((b"x-opt-delivery-delay", number("l", 60_000)),),
    }
    parcel = PARCEL._replace(properties=Props(headers=said.get(form or "", ())).encode())
    properties, _ = edits.undelivered(parcel, "why", b"id", 10_000)
    policy = Policy("native", {b"e": route}, b"delays", 86_400_000)
    sorted_ = sort(Delivery(1, False, b"e", b"k", properties, b"body"), policy, NOW + 1000, 100_000)
    assert isinstance(sorted_.plan, AtOnce)


async def test_strays_that_are_not_taken() -> None:
    counters = Counters()
    holder = StraysHolder(ScriptedPublisher({b"k": NACKED}), b"strays", ids(), counters, NOTES)
    with pytest.raises(NotTaken, match="exchange strays did not take a message to hold"):
        await holder.hold([(PARCEL, WHY)])
    assert counters.as_dict()["held"] == 0


@pytest.mark.parametrize("usable", [True, False])
async def test_held_in_the_store_where_there_is_one(usable: bool) -> None:
    store, strays = ScriptedHolder(), ScriptedHolder()
    await Holding(store, lambda: usable, strays).hold([(PARCEL, WHY)])
    assert (len(store.held), len(strays.held)) == ((1, 0) if usable else (0, 1))


def test_a_counter_that_nobody_knows() -> None:
    counters = Counters()
    with pytest.raises(KeyError, match="expected one of"):
        counters.add("lost", 1)
    assert set(counters.as_dict().values()) == {0}
    assert isinstance(CONFIRMED, Confirmed)
