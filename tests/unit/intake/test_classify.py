"""A batch, sorted into what goes to the store and what is published, each publication with its delivery."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.amqp import edits
from delayer.amqp.edits import Endpoints
from delayer.amqp.properties import Properties, array, encode_headers, entry, int64, long_string, table
from delayer.core.cascade import Cascade, routing_key
from delayer.core.message import Delivery, KeyGroup, Parcel, Target
from delayer.core.nservicebus import wire_instant
from delayer.core.plan import Mode, Policy, Refuse, Route
from delayer.core.retry_policy import Retry
from delayer.intake.handle import BatchPlan, batch_plan, classify
from tests.support.fakes import NOW, delivery, ids
from tests.unit.amqp.tables import properties

ORDERS = Route(b"orders.in", b"orders.out")
MAIL = Route(b"mail.in", b"")
NATIVE = Policy(Mode.NATIVE, {route.source: route for route in (ORDERS, MAIL)}, b"delays", 10**12)
STORE = Policy(Mode.STORE, NATIVE.routes, b"delays", 10**12)
NAMES = Endpoints(Cascade(), b"delays.due", b"delays.refused", 10_000)


def work(*deliveries: Delivery, policy: Policy = STORE) -> BatchPlan:
    return batch_plan([classify(one, policy, NOW, NAMES.max_properties) for one in deliveries], NAMES, ids())


def says(name: bytes, value: int | bytes) -> bytes:
    return entry(name, int64(value) if isinstance(value, int) else long_string(value))


LATER = says(b"x-delay", 5000)


def test_parked_as_it_was_received() -> None:
    one = delivery(1, LATER, body=b"body")
    found = work(one)
    [step] = found.steps
    assert step.deliveries == [one]
    assert step.parcels == [
        Parcel(NOW + 5000, b"orders.in", b"orders.in", b"k", Target(b"orders.out", b"k"), one.properties, b"body", None)
    ]
    assert found.publications == []


def test_a_cancel_after_a_park_of_its_key_takes_a_step_of_its_own() -> None:
    key = says(b"x-delay-key", b"a")
    cancel = says(b"x-delay-cancel", b"a")
    steps = work(delivery(1, LATER, key), delivery(2, cancel), delivery(3, LATER, key), delivery(4, LATER)).steps
    assert [[one.tag for one in step.deliveries] for step in steps] == [[1], [2, 3, 4]]
    assert [step.cancels for step in steps] == [[], [b"a"]]
    [step] = work(delivery(1, cancel), delivery(2, LATER, key)).steps
    assert (step.cancels, len(step.parcels)) == ([b"a"], 1)


def test_the_end_of_a_saga_after_a_park_of_its_timeout_takes_a_step_of_its_own() -> None:
    route = Route(b"orders.in", b"", delay_from=("nservicebus-timeout",))
    policy = Policy(Mode.STORE, {b"orders.in": route}, b"delays", 10**12)
    saga = entry(b"NServiceBus.SagaId", long_string(b"saga-1"))
    expire = says(b"NServiceBus.Timeout.Expire", wire_instant(NOW + 5000).encode())
    asks = delivery(1, saga, expire, says(b"NServiceBus.ReplyToAddress", b"Sales"))
    asks = asks._replace(properties=asks.properties[:1] + b"\x80" + asks.properties[2:] + b"\x04id-1")
    clears = delivery(2, saga, says(b"NServiceBus.ClearTimeouts", b"True"))
    first, second = work(asks, clears, policy=policy).steps
    [key] = first.keys
    [cleared] = second.cancels
    assert isinstance(cleared, KeyGroup)
    assert key.startswith(cleared)


def test_a_dead_letter_goes_on_with_a_note_of_its_failure() -> None:
    retry = Retry(5000, 2, 60_000, 0, 3, b"parking-lot")
    policy = Policy(Mode.STORE, {b"orders.in": Route(b"orders.in", b"", retry=retry)}, b"delays", 10**12)
    died = entry(b"x-death", array(table(says(b"queue", b"orders") + says(b"reason", b"rejected"))))
    [step] = work(delivery(1, died), policy=policy).steps
    [parcel] = step.parcels
    found = Properties.parse(parcel.properties)
    assert found.get(b"x-death") is None
    assert (parcel.target, parcel.due_ms) == (Target(b"", b"orders"), NOW + 5000)
    error = found.get(b"x-delayer-error")
    assert error is not None
    assert error.value == "rejected in queue orders"


def test_due_at_once_goes_to_its_destination_as_a_released_message() -> None:
    one = delivery(1, body=b"body")
    [publication] = work(one).publications
    assert publication.delivery is one
    assert publication.outgoing[:2] == Target(b"orders.out", b"k")
    assert publication.outgoing.properties == edits.released(Properties.parse(one.properties), b"id-0", NOW)
    assert publication.outgoing.token == b"id-0"
    assert publication.outgoing.body == b"body"
    assert publication.parcel is not None
    assert publication.parcel.properties == one.properties


def test_into_the_cascade_towards_the_daemon() -> None:
    one = delivery(1, LATER, body=b"body")
    [publication] = work(one, policy=NATIVE).publications
    outgoing = publication.outgoing
    assert outgoing.exchange == b"delayer.delay-level-02"
    assert outgoing.routing_key == routing_key(5, b"delays.due")
    envelope = edits.opened(Properties.parse(outgoing.properties), outgoing.body, NAMES.max_properties)
    assert envelope.id == outgoing.token == b"id-0"
    assert envelope.parcel.properties == one.properties
    assert envelope.parcel.due_ms == NOW + 5000
    assert publication.parcel is None  # the cascade must take it


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"\xff", "malformed properties"),
        (b"\x20\x00\0\0\0\x03bad", "malformed header table"),
        (encode_headers(b"\x07x-delayF\x00\x00\x00\x01\xff"), "malformed header table"),
        (encode_headers(entry(b"x", long_string(bytes(10_000 - edits.ROOM)))), "the properties are too long to carry"),
        (encode_headers(says(b"x-delay", b"soon")), "x-delay: expected milliseconds"),
    ],
)
def test_refused_with_its_reason_and_the_others_go_on(raw: bytes, reason: str) -> None:
    bad = delivery(2)._replace(properties=raw)
    found = work(delivery(1, LATER), bad, delivery(3))
    assert [one.tag for one in found.steps[0].deliveries] == [1]
    first, second = found.publications
    assert first.delivery is bad
    assert first.refusal.startswith(reason)
    assert first.outgoing.exchange == b"delays.refused"
    assert first.outgoing.routing_key == b"k"
    assert first.parcel is None
    assert second.delivery.tag == 3


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
def test_every_delivery_is_in_exactly_one_place(batch: list[Delivery], policy: Policy) -> None:
    numbered = [one._replace(tag=tag) for tag, one in enumerate(batch)]
    found = work(*numbered, policy=policy)
    placed = [one.tag for step in found.steps for one in step.deliveries]
    placed += [publication.delivery.tag for publication in found.publications]
    assert sorted(placed) == list(range(len(batch)))
    for publication in found.publications:
        outgoing = publication.outgoing
        assert max(len(outgoing.exchange), len(outgoing.routing_key)) <= 255
        assert len(outgoing.properties) <= NAMES.max_properties


def test_an_unusable_delivery_has_no_properties() -> None:
    one = classify(delivery(1)._replace(properties=b""), STORE, NOW, NAMES.max_properties)
    assert one.properties is None
    assert isinstance(one.plan, Refuse)
