"""Destinations by key and by header, messages that are delayed again, and keys that replace and cancel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.acceptance.own_vhost import delayed as due
from tests.acceptance.world import STORE, World
from tests.support.raw import Arrival, Header, Message, Props, Value, now_ms, number, text

SOON = (b"x-delay", number("I", 600))


def delayed(*headers: Header) -> Props:
    return Props(headers=(SOON, *headers), delivery_mode=2)


MESSAGES = [
    Message("in", b"else", delayed((b"x-delay-routing-key", text("inbox"))), b"by header"),
    Message("in", b"else", Props(headers=((b"x-delay-routing-key", text("inbox")),)), b"by header, at once"),
    Message("in.fixed", b"else", delayed(), b"by the route's key"),
    Message("in.fixed", b"else", delayed((b"x-delay-routing-key", text("copies"))), b"header before the route's key"),
    Message("in.allowed", b"k", delayed((b"x-delay-exchange", text("side.open"))), b"allowed exchange"),
    Message("in.allowed", b"k", Props(headers=((b"x-delay-exchange", text("side.open")),)), b"allowed, at once"),
    Message("in.allowed", b"inbox", delayed(), b"allowed, not asked for"),
]


@pytest.fixture(scope="module")
def routed(any_world: World) -> World:
    own = (b"x-delay-exchange", text("out"))
    messages = [*MESSAGES, Message("in", b"inbox", delayed(own), b"the route's own exchange")]
    any_world.run(any_world.raw.publish(*messages))
    any_world.wait(
        *(message.body for message in messages if message.routing_key != b"k" and "before" not in str(message.body))
    )
    any_world.wait(b"allowed exchange", b"allowed, at once", box="side")
    any_world.wait(b"header before the route's key", box="copies")
    return any_world


@pytest.mark.parametrize(
    ("body", "box", "key"),
    [
        (b"by header", "inbox", b"inbox"),
        (b"by header, at once", "inbox", b"inbox"),
        (b"by the route's key", "inbox", b"inbox"),
        (b"header before the route's key", "copies", b"copies"),
        (b"allowed exchange", "side", b"k"),
        (b"allowed, at once", "side", b"k"),
        (b"allowed, not asked for", "inbox", b"inbox"),
        (b"the route's own exchange", "inbox", b"inbox"),
    ],
)
def test_the_route_and_the_headers_decide_the_destination(routed: World, body: bytes, box: str, key: bytes) -> None:
    arrival = routed.boxes[box].only(body)
    assert arrival.delivery.routing_key.rpartition(b".")[2] == key
    assert arrival.at_ms >= arrival.due_ms
    for name in (b"x-delay-routing-key", b"x-delay-exchange"):
        assert not arrival.props.all(name)


# --- re-delayed


def again(arrival: Arrival, trip: int, value: int) -> Message:
    """A message as a retrying consumer publishes it: the same headers, with a new delay."""
    props = arrival.props.without(b"x-delay").adding((b"x-delay", number("I", value)))
    body = arrival.delivery.body.rsplit(b" ", 1)[0] + b" %d" % trip
    return Message("in", arrival.delivery.routing_key, props, body)


def test_three_trips(any_world: World) -> None:
    """RabbitMQ before 4.0 silently drops a message that still has its x-death, at its second trip through a cascade."""
    first = Message("in", b"inbox", delayed((b"kept", number("s", 1))), b"trip 1")
    plain = Message("in", b"inbox", Props(headers=(SOON,), expiration=b"600000"), b"expiring trip 1")
    any_world.run(any_world.raw.publish(first, plain))
    ids, sizes = set[Value](), set[int]()
    for trip in (2, 3, 4):
        before = [b"trip %d" % (trip - 1), b"expiring trip %d" % (trip - 1)]
        any_world.wait(*before)
        arrivals = [any_world.inbox.only(body) for body in before]
        for arrival in arrivals:
            assert arrival.at_ms >= arrival.due_ms
            assert arrival.props.all(b"x-delay") == [number("I", -600)]
            assert len(arrival.props.all(b"x-delayer-id")) == 1
        sent = now_ms()
        any_world.run(any_world.raw.publish(*(again(arrival, trip, 600) for arrival in arrivals)))
        any_world.wait(b"trip %d" % trip, b"expiring trip %d" % trip)
        arrival = any_world.inbox.only(b"trip %d" % trip)
        assert arrival.due_ms >= sent + 600
        assert arrival.props.all(b"kept") == [number("s", 1)]
        ids.add(arrival.props.one(b"x-delayer-id"))
        sizes.add(len(arrival.props.headers or ()))
    assert len(ids) == 3, "an id of its own for each trip"
    assert len(sizes) == 1, f"its headers grow: {sizes}"


def test_a_message_published_again_unchanged_does_not_wait_again(any_world: World) -> None:
    """A message republished unchanged does not wait a second time, because the sign of its delay was flipped."""
    any_world.run(any_world.raw.publish(Message("in", b"inbox", delayed(), b"turned 1")))
    any_world.wait(b"turned 1")
    arrival = any_world.inbox.only(b"turned 1")
    message = Message("in", arrival.delivery.routing_key, arrival.props, b"turned 2")
    any_world.run(any_world.raw.publish(message))
    any_world.wait(b"turned 2")
    second = any_world.inbox.only(b"turned 2")
    assert second.props.all(b"x-delay") == [number("I", -600)]
    assert not second.props.all(b"x-death")


# --- keys


@pytest.fixture
def keyed(any_world: World) -> World:
    if any_world.mode != STORE:
        pytest.skip("keys need a store")
    return any_world


def cancel(key: str) -> Message:
    return Message("in", b"inbox", Props(headers=((b"x-delay-cancel", text(key)),)), b"a cancel " + key.encode())


def test_a_key_replaces_and_a_cancel_cancels(keyed: World) -> None:
    """Unrelated messages between them pass; a fence, due after all of them, shows that nothing more arrives."""

    def say(*messages: Message) -> None:
        keyed.run(keyed.raw.publish(*messages))

    say(due("first of its key", 1500, under="replaced"))
    say(due("cancelled", 1500, under="cancelled"))
    say(due("other key", 1500, under="other"))
    say(due("in an hour", 3_600_000, under="sooner"))
    say(due("in an hour, too", 3_600_000, under="at once"))
    # All messages above are parked before the next publish: their fence arrived after them.
    say(Message("in", b"inbox", Props(headers=((b"x-delay", number("I", 1)),)), b"fence of the firsts"))
    keyed.wait(b"fence of the firsts")
    say(
        due("second of its key", 1600, under="replaced"),
        cancel("cancelled"),
        cancel("an unknown key"),
        due("sooner than in an hour", 300, under="sooner"),
        due("at once instead of in an hour", 0, under="at once"),
        Message("in", b"inbox", Props(headers=((b"x-delay", number("I", 2500)),)), b"fence"),
    )
    there = [b"second of its key", b"other key", b"sooner than in an hour", b"at once instead of in an hour"]
    keyed.wait(*there, b"fence")
    for body in there:
        arrival = keyed.inbox.only(body)
        assert arrival.at_ms >= arrival.due_ms
        assert not arrival.props.all(b"x-delay-key")
    gone = [b"first of its key", b"cancelled", b"in an hour", b"in an hour, too"]
    gone += [b"a cancel cancelled", b"a cancel an unknown key"]
    assert not [body for body in gone if keyed.inbox.of(body) or keyed.refused.of(body)]


def test_the_same_key_in_one_batch(keyed: World) -> None:
    messages = [due(f"batched {n}", 500, under="batch") for n in range(50)]
    keyed.run(keyed.raw.publish(*messages, due("end of the batch", 900, under="end")))
    keyed.wait(b"batched 49", b"end of the batch")
    assert [n for n in range(50) if keyed.inbox.of(b"batched %d" % n)][-1] == 49
    assert replace(keyed.inbox.only(b"batched 49").props, headers=None) == Props(delivery_mode=2)
