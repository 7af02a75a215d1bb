"""What a cancel hears: a table over what it asked and what was found, and that nobody's delivery depends on it."""

from __future__ import annotations

import json

import pytest

from delayer.amqp.properties import Properties, encode_headers, entry, long_string
from delayer.core.counters import Counters
from delayer.core.errors import BrokerLost
from delayer.core.message import Delivery, Returned
from delayer.core.plan import Mode, Policy, Route
from delayer.intake import replies
from delayer.intake.consume import AckTracker
from delayer.intake.handle import Dispatch, IntakeHandler
from delayer.intake.holding import Holding
from delayer.intake.refusals import with_short
from delayer.intake.replies import Asked
from tests.support.fakes import Acks, ScriptedLive, ScriptedPublisher, ids
from tests.unit.intake.test_classify import NAMES


def cancel(tag: int, key: bytes, reply_to: bytes = b"answers", *, correlation: bytes = b"") -> Delivery:
    raw = encode_headers(entry(b"x-delay-cancel", long_string(key)))
    for name, value in (("reply_to", reply_to), ("correlation_id", correlation), ("message_id", b"m-%d" % tag)):
        raw = with_short(raw, name, value) if value else raw
    return Delivery(tag, False, b"in", b"k", raw, b"")


@pytest.mark.parametrize(("found", "said"), [(True, "cancelled"), (False, "too late")])
def test_outcomes(found: bool, said: str) -> None:
    ask = Asked(b"a", b"answers", None)
    assert replies.outcome(ask, frozenset({b"a", b"b"} if found else {b"b"})) == said


def test_a_reply_is_known_by_what_the_cancel_said() -> None:
    for correlation, known in ((b"c-1", b"c-1"), (b"", b"m-7")):
        delivery = cancel(7, b"caf\xc3\xa9", correlation=correlation)
        ask = replies.asked(Properties.parse(delivery.properties), b"caf\xc3\xa9")
        assert ask is not None
        answer = replies.reply(ask, "too late", b"t")
        said = Properties.parse(answer.properties)
        assert (answer.exchange, answer.routing_key, answer.token) == (b"", b"answers", b"t")
        assert said.short("correlation_id") == known
        assert said.short("content_type") == b"application/json"
        assert json.loads(answer.body) == {"outcome": "too late", "key": "café"}
        outcome = said.get(replies.OUTCOME)
        assert outcome is not None
        assert outcome.content == b"too late"


def test_a_cancel_without_reply_to_gets_no_reply() -> None:
    delivery = cancel(1, b"a", reply_to=b"")
    assert replies.asked(Properties.parse(delivery.properties), b"a") is None


class Parking:
    """Has messages under these keys."""

    def __init__(self, *keys: bytes) -> None:
        self.keys = set(keys)

    async def park(self, parcels: object, cancels: list[bytes]) -> frozenset[bytes]:
        taken = frozenset(self.keys & set(cancels))
        self.keys -= taken
        return taken


async def carried(publisher: ScriptedPublisher, parking: Parking, *batch: Delivery) -> Acks:
    policy = Policy(Mode.STORE, {b"in": Route(b"in", b"out")}, b"delays", 10_000, own_queues=frozenset({b"delays.due"}))
    acks = Acks()
    live = ScriptedLive(policy, NAMES)
    counters = Counters()
    holding = Holding(publisher, None, live, counters, new_id=ids())  # type: ignore[arg-type]
    handler = IntakeHandler(live, Dispatch(publisher, holding, live, counters), parking, counters)
    tracker = AckTracker(acks)
    tracker.read(batch)
    await handler(batch, tracker)
    return acks


async def test_every_cancel_that_asks_hears_its_own_outcome() -> None:
    publisher = ScriptedPublisher()
    await carried(publisher, Parking(b"a"), cancel(1, b"a"), cancel(2, b"b"), cancel(3, b"c", reply_to=b""))
    assert [json.loads(one.body) for one in publisher.published] == [
        {"outcome": "cancelled", "key": "a"},
        {"outcome": "too late", "key": "b"},
    ]


@pytest.mark.parametrize("ours", [b"delays", b"delays.due", NAMES.refused_exchange])
async def test_replies_never_go_into_delayer_s_queues(ours: bytes) -> None:
    publisher = ScriptedPublisher()
    await carried(publisher, Parking(b"a"), cancel(1, b"a", reply_to=ours))
    assert publisher.published == []


@pytest.mark.parametrize("failure", [Returned(312, "NO_ROUTE"), BrokerLost("gone"), None])
async def test_an_answer_that_does_not_get_through_keeps_nobody(failure: Returned | BrokerLost | None) -> None:
    publisher = ScriptedPublisher({b"answers": failure} if failure else {})
    publisher.ready = failure is not None
    acks = await carried(publisher, Parking(b"a"), cancel(1, b"a"))
    assert acks.acked == [(1, True)]
