"""A batch, sorted into operations of the store and publishes; the order of its keys; the replies to cancels."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.amqp.errors import BrokerLost
from delayer.amqp.properties import Properties, encode_headers, entry, int64, long_string
from delayer.amqp.values import CONFIRMED, Delivery, Outgoing, Pace
from delayer.core.cascade import Cascade, routing_key
from delayer.core.counters import Counters
from delayer.core.errors import StoreLost
from delayer.core.hold import Hold, Outcome, returned
from delayer.core.message import KeyGroup, Parcel, Target
from delayer.core.operations import Applied, Cancel, Operation
from delayer.core.plan import Mode, Park, Policy, Route
from delayer.core.retry_policy import RetryPolicy
from delayer.format.envelope import Endpoints, read_envelope
from delayer.format.headers import ROOM
from delayer.format.release import released_properties
from delayer.intake import replies
from delayer.intake.dispatch import Dispatch
from delayer.intake.handle import (
    PARK_BYTES,
    PARK_MESSAGES,
    BatchPlan,
    Classified,
    IntakeHandler,
    batch_plan,
    classify,
    operations_of,
    replies_to,
)
from delayer.intake.session import Session
from tests.support.fakes import NOW, ScriptedLive, ScriptedPublisher, ScriptedSubscription, delivery, ids
from tests.support.raw import Header, Props, Value, array, nested, number, table, text, wire_instant
from tests.unit.amqp.tables import properties, with_short

ORDERS = Route(b"orders.in", b"orders.out")
MAIL = Route(b"mail.in", b"")
NATIVE = Policy(Mode.NATIVE, {route.source: route for route in (ORDERS, MAIL)}, 10**12)
STORE = Policy(Mode.STORE, NATIVE.routes, 10**12)
TARGET = Target(b"out", b"k")
NAMES = Endpoints(Cascade(), b"delays.due", b"delays.refused", 10_000)


def classified(*deliveries: Delivery, policy: Policy = STORE) -> list[Classified]:
    return [classify(one, policy, NOW, NAMES.max_properties) for one in deliveries]


def work(*deliveries: Delivery, policy: Policy = STORE) -> BatchPlan:
    """The batch's requests to the broker."""
    batch = classified(*deliveries, policy=policy)
    return batch_plan([one for one in batch if not isinstance(one[2], Park | Cancel)], NAMES, ids())


def operations(*deliveries: Delivery, policy: Policy = STORE) -> list[Operation]:
    """Its requests to the store."""
    return operations_of(classified(*deliveries, policy=policy))


def says(name: bytes, value: int | bytes) -> bytes:
    return entry(name, int64(value) if isinstance(value, int) else long_string(value))


LATER = says(b"x-delay", 5000)


@pytest.mark.words
def test_a_dead_letter_with_broken_headers_is_published_or_refused() -> None:
    retry = RetryPolicy(5_000, 2, 3_600_000, 0.1, 10, b"parked")
    policy = replace(STORE, routes={b"orders.in": replace(ORDERS, retry=retry)})
    death = table((b"count", number("l", 1)), (b"reason", text("rejected")), (b"queue", text("work")))
    dead = (b"x-death", array(death)), (b"x-delayer-failed-in", text("work"))

    def plan_of(*headers: Header) -> BatchPlan:
        return work(delivery(1)._replace(properties=Props(headers=(*dead, *headers)).encode()), policy=policy)

    [exhausted] = plan_of((b"x-delay", nested(70)), (b"x-delayer-retries", number("l", 10))).publications
    assert exhausted.outgoing.routing_key == b"parked"
    history = (b"x-delayer-history", Value(b"A", b"\0\0\0\1?"))
    [broken] = plan_of(history, (b"x-delayer-retries", number("l", 5))).publications
    assert broken.refusal.startswith("malformed header table: ")


def test_a_deferred_message_of_rebus_leaves_without_the_headers_that_deferred_it() -> None:
    """With them its endpoint would defer it again."""
    form, recipient = "header:rbs2-deferred-until:rfc3339", b"rbs2-defer-recipient"
    route = Route(b"orders.in", b"", delay_from=(form,), routing_key_header=recipient)
    kept = says(b"rbs2-defer-count", b"1")
    until = says(b"rbs2-deferred-until", b"2286-11-20T17:46:40.1234567+00:00")
    one = delivery(1, until, kept, says(recipient, b"orders"))
    [parcel] = operations(one, policy=replace(STORE, routes={b"orders.in": route}, max_delay_ms=10**13))
    assert isinstance(parcel, Parcel)
    assert (parcel.due_ms, parcel.target) == (10**13 + 124, Target(b"", b"orders"))
    assert parcel.properties == encode_headers(kept)


def test_a_message_is_parked_as_received() -> None:
    one = delivery(1, LATER, body=b"body")
    assert operations(one) == [
        Parcel(NOW + 5000, b"orders.in", b"orders.in", b"k", Target(b"orders.out", b"k"), one.properties, b"body", None)
    ]
    assert work(one).publications == []


def test_clearing_a_saga_cancels_its_timeouts_and_is_not_answered() -> None:
    route = Route(b"orders.in", b"", delay_from=("nservicebus-timeout",))
    policy = Policy(Mode.STORE, {b"orders.in": route}, 10**12)
    saga = entry(b"NServiceBus.SagaId", long_string(b"saga-1"))
    expire = says(b"NServiceBus.Timeout.Expire", wire_instant(NOW + 5000).encode())
    asks = delivery(1, saga, expire, says(b"NServiceBus.ReplyToAddress", b"Sales"))
    asks = asks._replace(properties=asks.properties[:1] + b"\x80" + asks.properties[2:] + b"\x04id-1")
    clears = delivery(2, saga, says(b"NServiceBus.ClearTimeouts", b"True"))
    clears = clears._replace(properties=with_short(clears.properties, "reply_to", b"Sales"))
    batch = classified(asks, clears, policy=policy)
    first, second = operations_of(batch)
    assert isinstance(first, Parcel)
    assert isinstance(second, Cancel)
    assert isinstance(second.key, KeyGroup)
    assert first.key is not None
    assert first.key.startswith(second.key)
    assert not replies_to(batch, frozenset(), frozenset(), ids()), (
        "an NServiceBus endpoint expects no answer at its address"
    )


def test_a_due_message_is_published_as_released() -> None:
    one = delivery(1, body=b"body")
    [publication] = work(one).publications
    assert publication.delivery is one
    assert publication.outgoing[:2] == Target(b"orders.out", b"k")
    assert publication.outgoing.properties == released_properties(Properties.parse(one.properties), b"id-0", NOW, 9_999)
    assert publication.outgoing.token == b"id-0"
    assert publication.outgoing.body == b"body"
    assert publication.parcel is not None
    assert publication.parcel.properties == one.properties


def test_the_cascade_leads_to_the_due_queue() -> None:
    one = delivery(1, LATER, body=b"body")
    [publication] = work(one, policy=NATIVE).publications
    outgoing = publication.outgoing
    assert outgoing.exchange == b"delayer.delay-level-02"
    assert outgoing.routing_key == routing_key(5, b"delays.due")
    envelope = read_envelope(Properties.parse(outgoing.properties), outgoing.body, NAMES.max_properties)
    assert envelope.id == outgoing.token == b"id-0"
    assert envelope.parcel.properties == one.properties
    assert envelope.parcel.due_ms == NOW + 5000
    assert publication.parcel is None  # the cascade must take it


@pytest.mark.words
@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"\xff", "malformed properties"),
        (b"\x20\x00\0\0\0\x03bad", "malformed header table"),
        (encode_headers(b"\x07x-delayF\x00\x00\x00\x01\xff"), "malformed header table"),
        (encode_headers(entry(b"x", long_string(bytes(10_000 - ROOM)))), "the properties are too long to carry"),
        (encode_headers(says(b"x-delay", b"soon")), "x-delay: expected milliseconds"),
        (encode_headers(says(b"X-Delay", 5)), "the message has no delay, but a header 'X-Delay': expected 'x-delay'"),
        (
            encode_headers(says(b"a", 5) + says(b"x-delay-cancle", b"k")),
            "the message has no delay, but a header 'x-del",
        ),
    ],
)
def test_a_bad_message_is_refused_with_its_reason_and_the_others_continue(raw: bytes, reason: str) -> None:
    bad = delivery(2)._replace(properties=raw)
    batch = delivery(1, LATER), bad, delivery(3)
    assert len(operations(*batch)) == 1
    first, second = work(*batch).publications
    assert first.delivery is bad
    assert first.refusal.startswith(reason)
    assert first.outgoing.exchange == b"delays.refused"
    assert first.outgoing.routing_key == b"k"
    assert first.parcel is None
    assert second.delivery.tag == 3


def test_some_misspelt_delay_headers_are_not_refused() -> None:
    misspelt, text = says(b"x-dealy", 5), says(b"x-dealy", b"orders.eu")
    stamped = replace(STORE, routes={b"orders.in": replace(ORDERS, delay_from=("timestamp",))})
    assert not work(delivery(1, misspelt, LATER)).publications
    many = b"".join(says(b"%d" % n, 5) for n in range(100))
    named = replace(STORE, routes={b"orders.in": replace(ORDERS, routing_key_header=b"x-dealy")})
    for headers, policy in (
        (text, named),
        (misspelt, stamped),
        (many + misspelt, STORE),
    ):  # the check reads the first 100 headers only
        [publication] = work(delivery(1, headers), policy=policy).publications
        assert not publication.refusal


messages = st.builds(
    Delivery,
    st.just(1),
    st.booleans(),
    st.sampled_from([b"orders.in", b"mail.in", b"else"]),
    st.sampled_from([b"", b"k", b"delays", b"a" * 255]),
    properties() | st.binary(max_size=40),
    st.binary(max_size=5),
)
amounts = st.integers(-(1 << 63), (1 << 63) - 1).map(int64) | st.text("0123456789.-", max_size=31).map(
    lambda text: long_string(text.encode())
)
delayed = st.builds(
    lambda one, name, amount: one._replace(properties=encode_headers(entry(name, amount))),
    messages,
    st.sampled_from([b"x-delay", b"x-deliver-at", b"x-delay-key", b"x-delay-cancel", b"x-delayer-due"]),
    amounts,
)


@given(st.lists(messages | delayed, max_size=4), st.sampled_from([NATIVE, STORE]))
def test_every_delivery_has_exactly_one_operation_or_publication(batch: list[Delivery], policy: Policy) -> None:
    numbered = [one._replace(tag=tag) for tag, one in enumerate(batch)]
    stored = [one[0].tag for one in classified(*numbered, policy=policy) if isinstance(one[2], Park | Cancel)]
    found = work(*numbered, policy=policy)
    assert len(operations(*numbered, policy=policy)) == len(stored)
    assert sorted([*stored, *(one.delivery.tag for one in found.publications)]) == list(range(len(batch)))
    for publication in found.publications:
        outgoing = publication.outgoing
        assert max(len(outgoing.exchange), len(outgoing.routing_key)) <= 255
        assert len(outgoing.properties) <= NAMES.max_properties


# Replies to cancels, on which no delivery depends.


def cancel(tag: int, key: bytes, reply_to: bytes = b"answers", *, correlation: bytes = b"") -> Delivery:
    raw = encode_headers(entry(b"x-delay-cancel", long_string(key)))
    for name, value in (("reply_to", reply_to), ("correlation_id", correlation), ("message_id", b"m-%d" % tag)):
        raw = with_short(raw, name, value) if value else raw
    return Delivery(tag, False, b"in", b"k", raw, b"")


def test_a_reply_has_the_correlation_id_or_message_id_of_its_cancel() -> None:
    for correlation, known in ((b"c-1", b"c-1"), (b"", b"m-7")):
        delivery = cancel(7, b"caf\xc3\xa9", correlation=correlation)
        key = b"caf\xc3\xa9"
        answer = replies.build_reply(Properties.parse(delivery.properties), key, b"t", cancelled=False)
        assert answer is not None
        said = Properties.parse(answer.properties)
        assert (answer.exchange, answer.routing_key, answer.token) == (b"", b"answers", b"t")
        assert said.short("correlation_id") == known
        assert said.short("content_type") == b"application/json"
        assert json.loads(answer.body) == {"outcome": "too late", "key": "café"}
        outcome = said.get(replies.OUTCOME)
        assert outcome is not None
        assert outcome.content == b"too late"


@pytest.mark.parametrize("reply_to", [b"", b"amq.rabbitmq.reply-to.g2EF.k"], ids=["none", "a direct one"])
def test_no_reply_without_a_queue_for_it(reply_to: bytes) -> None:
    asks = Properties.parse(cancel(1, b"k", reply_to).properties)
    assert replies.build_reply(asks, b"k", b"t", cancelled=True) is None


@pytest.mark.parametrize("failure", [returned(312, "NO_ROUTE"), BrokerLost("gone"), None])
async def test_a_failed_reply_does_not_stop_the_acknowledgement(failure: Hold | BrokerLost | None) -> None:
    it = Gathered()
    it.publisher.answers = {b"answers": failure} if failure else {}
    it.publisher.ready = failure is not None
    await it.take(cancel(1, b"a")._replace(exchange=b"orders.in"))
    it.handler.flush()
    await it.session.wait_until_idle()
    assert it.acks.acked == [(1, True)]


async def test_a_queue_that_does_not_confirm_its_replies_does_not_delay_batches() -> None:
    it = Gathered()
    silent = asyncio.Event()

    async def publish(batch: list[Outgoing], pace: Pace | None = None) -> list[Outcome]:
        await silent.wait()
        return [CONFIRMED] * len(batch)

    it.publisher.publish = publish  # type: ignore[method-assign, assignment]
    for tag in range(1, 5):
        await it.take(cancel(tag, b"%d" % tag)._replace(exchange=b"orders.in"))
        it.handler.flush()
    await it.session.wait_for_room()
    await it.take(asks(5, 5_000))
    it.handler.flush()
    await it.take()
    assert it.cancels == [b"1", b"2", b"3", b"4"]
    assert it.parks[-1] == [b"5"]
    silent.set()
    await it.session.wait_until_idle()


# Messages that wait for company, and messages that wait for their instant.


class Gathered:
    """A handler in a session; records the batches that it parks, and its publishes."""

    def __init__(self, live: ScriptedLive | None = None, *, prefetch: int = 5_000, keep_ms: int = 150) -> None:
        self.terms = 0
        self.parks: list[list[bytes]] = []
        self.cancels: list[bytes] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.due_ms: list[int] = []
        self.publisher, self.counters, self.acks = ScriptedPublisher(), Counters(), ScriptedSubscription()
        self.acks.prefetch = prefetch
        self.live = live or ScriptedLive(replace(STORE, keep_ms=keep_ms), NAMES)
        dispatch = Dispatch(self.publisher, self, self.live, self.counters, new_id=ids())
        self.handler = IntakeHandler(self.live, dispatch, self, self.counters)
        self.session = Session(self.acks, lambda: None, 3)
        self.handler.begin(self.session)

    def begin_term(self) -> None:
        self.terms += 1

    async def apply(self, operations: Sequence[Operation]) -> Applied:
        parcels = [one for one in operations if isinstance(one, Parcel)]
        self.parks.append([parcel.body for parcel in parcels])
        self.due_ms = [parcel.due_ms for parcel in parcels]
        self.cancels += [one.key for one in operations if isinstance(one, Cancel)]
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return Applied()

    async def take(self, *batch: Delivery) -> None:
        self.session.acks.add(batch)
        self.handler.handle(batch)
        for _ in range(5):
            await asyncio.sleep(0)


def asks(tag: int, delay_ms: int, **more: float) -> Delivery:
    return delivery(tag, says(b"x-delay", delay_ms), body=b"%d" % tag)._replace(**more)


async def test_a_park_waits_for_more_parcels_unless_it_is_full() -> None:
    it, bodies = Gathered(), [bytes(PARK_BYTES // part - len(asks(1, 50_000).properties)) for part in (4, 4, 2)]
    batch = [asks(tag, 50_000)._replace(body=body) for tag, body in enumerate(bodies, 1)]
    it.session.acks.add(batch)
    for one in batch:  # No other task runs during this loop, so the first message's timer cannot fire.
        it.handler.handle([one])
    await it.session.wait_until_idle()
    assert it.parks == [bodies]
    batch = [asks(tag, 50_000) for tag in range(4, 4 + PARK_MESSAGES)]
    it.session.acks.add(batch)
    for first in range(0, PARK_MESSAGES, 500):
        it.handler.handle(batch[first : first + 500])
    await it.session.wait_until_idle()
    assert list(map(len, it.parks)) == [3, PARK_MESSAGES]
    assert it.acks.acked[-1] == (3 + PARK_MESSAGES, True)


async def test_messages_without_a_delay_are_counted() -> None:
    it = Gathered()
    await it.take(asks(1, 0), delivery(2), delivery(3, says(b"x-delay-key", b"a")), asks(4, 5_000))
    await it.take(delivery(5, says(b"x-dealy", 0)), delivery(6, says(b"x-delay-cancel", b"a")))
    assert it.counters.routes["undelayed"] == {b"orders.in": 2}


async def test_a_message_that_is_due_when_it_arrives_has_no_lateness() -> None:
    it = Gathered()
    await it.take(delivery(1), asks(2, -3_600_000), asks(3, 0), delivery(4, says(b"x-deliver-at", NOW - 3 * 10**10)))
    await it.session.wait_until_idle()
    assert it.counters.routes["released"] == {b"orders.in": 4}
    assert not it.counters.lateness


async def test_batches_with_keys_are_applied_one_after_another() -> None:
    """Messages arriving during it share the next one. Messages without keys do not wait."""
    it = Gathered()
    it.gate.clear()
    for tag, key in enumerate((b"a", b"b", b"c"), 1):
        await it.take(delivery(tag, says(b"x-delay-cancel", key)))
        it.handler.flush()
    await it.take(asks(4, 5_000))
    it.handler.flush()
    await asyncio.sleep(0)
    assert it.cancels == [b"a"]
    assert it.parks == [[], [b"4"]]
    it.gate.set()
    await it.session.wait_until_idle()
    assert it.cancels == [b"a", b"b", b"c"]
    assert it.parks == [[], [b"4"], []]
    assert it.acks.acked[-1] == (4, True)


async def test_a_failed_park_with_keys_returns_the_later_batches() -> None:
    """Their messages must follow those of the first batch, which is redelivered in the next session."""
    it = Gathered()
    it.failure = StoreLost("gone")
    for tag in (1, 2):
        await it.take(delivery(tag, says(b"x-delay-cancel", b"a")))
        it.handler.flush()
    with pytest.raises(StoreLost):
        await it.session.wait_until_idle()
    await it.session.finish()
    assert (it.cancels, it.acks.acked) == ([b"a"], [])
    it.failure = None
    it.handler.end()
    it.handler.begin(it.session)
    await it.take(delivery(3, says(b"x-delay-cancel", b"a")))
    it.handler.flush()
    await it.session.wait_until_idle()
    assert it.cancels == [b"a", b"a"]


async def test_waiting_batches_with_keys_are_bounded() -> None:
    """In bytes too: the reader stops, and no transaction becomes larger than any other."""
    it = Gathered()
    it.gate.clear()
    body = bytes(PARK_BYTES // 4)
    batch = [delivery(tag, LATER, says(b"x-delay-key", b"%d" % tag))._replace(body=body) for tag in range(1, 12)]
    for one in batch[:3]:
        await it.take(one)
        it.handler.flush()
    assert not it.handler.is_full
    for one in batch[3:]:
        await it.take(one)
        it.handler.flush()
    assert it.handler.is_full
    reading = asyncio.create_task(it.session.wait_for_room(lambda: it.handler.is_full))
    await asyncio.sleep(0)
    assert not reading.done()
    it.gate.set()
    await reading
    await it.session.wait_until_idle()
    assert max(sum(map(len, park)) for park in it.parks) <= PARK_BYTES
    assert sum(map(len, it.parks)) == len(batch)


async def test_a_full_prefetch_ends_the_wait_for_more_parcels() -> None:
    it = Gathered(prefetch=2)
    await it.take(asks(1, 5_000))
    assert it.parks == []
    await it.take(asks(2, 5_000))
    assert it.parks == [[b"1", b"2"]]


async def test_a_due_message_leaves_at_once_and_a_soon_due_one_at_its_instant() -> None:
    it = Gathered()
    await it.take(asks(1, 100), asks(2, 0), asks(3, 5_000))
    assert [one.body for one in it.publisher.published] == [b"2"]
    assert it.acks.acked == [(2, False)]
    await it.session.wait_until_idle()
    assert [one.body for one in it.publisher.published] == [b"2", b"1"]
    assert [list(pace.due_ms) for pace in it.publisher.paces] == [[NOW + 100]]
    assert it.acks.acked[1:] in ([(3, False), (1, True)], [(1, True)])  # the third may have been parked already


async def test_kept_messages_do_not_fill_the_prefetch() -> None:
    it = Gathered(prefetch=4)
    await it.take(asks(1, 100), asks(2, 100), asks(3, 100))
    assert it.session.acks.kept == 3
    await it.take(asks(4, 100))
    assert it.parks == [[b"4"]]


async def test_a_delay_counts_from_the_moment_of_reading() -> None:
    it = Gathered()
    await it.take(asks(1, 5_000, read_at=time.monotonic() - 2.0))
    it.handler.flush()
    await it.session.wait_until_idle()
    [step] = it.due_ms
    assert NOW + 2_990 < step <= NOW + 3_001


@dataclass
class PausedLive(ScriptedLive):
    """The system pauses the process between the handler's reads of the two bounds of the clock."""

    paused_at: float = 0.0

    def now_lower_ms(self) -> int:
        self.paused_at = time.monotonic()
        time.sleep(0.03)
        return self.now


async def test_a_pause_of_the_process_does_not_shorten_delays() -> None:
    live = PausedLive(replace(STORE, keep_ms=150), NAMES)
    it = Gathered(live)
    read_at = time.monotonic()
    await it.take(asks(1, 5_000, read_at=read_at))
    it.handler.flush()
    await it.session.wait_until_idle()
    [due_ms] = it.due_ms
    assert due_ms - 5_000 >= NOW - (live.paused_at - read_at) * 1000
